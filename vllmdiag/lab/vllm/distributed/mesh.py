"""The ranks of one engine, connected all to all by TCP: what gloo and its TCPStore are to the real one.

`Mesh.exchange` is the heart. A rank sends its part to each of the others and then waits until the part of every one of
them has come *under the same tag*; so ranks in different collectives wait for each other for ever, as with NCCL,
and a rank that is stopped holds up all others.
"""

from __future__ import annotations

import pickle
import selectors
import socket
import struct
import time
from typing import Any

_STORE_BACKLOG = 4096
_LENGTH = struct.Struct("<I")
_RETRY_S = 0.05


class Mesh:
    """One rank's end of the mesh. Building it returns when all ranks have come.

    Args:
        rank: of this process.
        world_size: ranks of the engine.
        store: where rank 0 listens for all others (host, port).
        host: the address of this node.
    """

    def __init__(self, rank: int, world_size: int, store: tuple[str, int], host: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self._peers: dict[int, socket.socket] = {}
        self._inbox: dict[tuple[str, int], Any] = {}
        self._buffers: dict[int, bytearray] = {}
        self._selector = selectors.DefaultSelector()
        self._own = _listen(host, 0, _STORE_BACKLOG)
        self._store, self._clients, addresses = self._meet(store)
        for other in range(rank):
            self._peers[other] = _connect(addresses[other])
            self._peers[other].sendall(_LENGTH.pack(rank))
        while len(self._peers) < world_size - 1:
            peer, _ = self._own.accept()
            (other,) = _LENGTH.unpack(_receive(peer, _LENGTH.size))
            self._peers[other] = peer
        for other, peer in self._peers.items():
            self._selector.register(peer, selectors.EVENT_READ, other)

    def _meet(self, store: tuple[str, int]) -> tuple[socket.socket, list[socket.socket], dict[int, tuple[str, int]]]:
        """Tell the store where this rank listens, and learn it of all others. Rank 0 is the store.

        Returns:
            (the connection to the store, or the store itself; its clients, which stay connected as those of a TCPStore
            do; where each rank listens)
        """
        mine: tuple[str, int] = self._own.getsockname()
        if self.rank:
            asking = _connect(store)
            _send(asking, (self.rank, mine))
            table: dict[int, tuple[str, int]] = _read(asking)
            return asking, [], table
        listening = _listen(*store, _STORE_BACKLOG)
        table, others = {0: mine}, []
        while len(table) < self.world_size:
            peer, _ = listening.accept()
            other, address = _read(peer)
            table[other] = address
            others.append(peer)
        for peer in others:
            _send(peer, table)
        return listening, others, table

    def exchange(self, tag: str, ranks: list[int], value: Any) -> dict[int, Any]:
        """Give `value` to the other `ranks`, and wait for theirs under the same tag.

        Returns:
            The value of each rank, its own too.
        """
        others = [rank for rank in ranks if rank != self.rank]
        for other in others:
            self.send(tag, other, value)
        return {self.rank: value} | {other: self.receive(tag, other) for other in others}

    def send(self, tag: str, to: int, value: Any) -> None:
        """Send a value to one rank."""
        _send(self._peers[to], (tag, value))

    def receive(self, tag: str, sender: int) -> Any:
        """Wait for the value that one rank sends under a tag."""
        while (tag, sender) not in self._inbox:
            for key, _ in self._selector.select():
                self._take(key.data)
        return self._inbox.pop((tag, sender))

    def close(self) -> None:
        """Leave; the others are not told."""
        self._selector.close()
        for connection in (*self._peers.values(), *self._clients, self._own, self._store):
            connection.close()

    def _take(self, sender: int) -> None:
        """Read what a rank has sent, and keep whole messages for whoever waits for them."""
        data = self._peers[sender].recv(1 << 16)
        if not data:
            # The connection of a dead rank: as with a GPU, nobody is told, and the collective does not finish.
            self._selector.unregister(self._peers[sender])
            return
        buffer = self._buffers.setdefault(sender, bytearray())
        buffer += data
        while len(buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(buffer)[0]
            if len(buffer) < end:
                break
            tag, value = pickle.loads(buffer[_LENGTH.size : end])
            del buffer[:end]
            self._inbox[tag, sender] = value


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((host, port))
    made.listen(backlog)
    return made


def _connect(address: tuple[str, int]) -> socket.socket:
    while True:
        made = socket.socket()
        if not made.connect_ex(address):
            return made
        made.close()
        time.sleep(_RETRY_S)  # it does not listen yet


def _send(to: socket.socket, value: Any) -> None:
    data = pickle.dumps(value)
    to.sendall(_LENGTH.pack(len(data)) + data)


def _read(source: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_receive(source, _LENGTH.size))
    return pickle.loads(_receive(source, length))


def _receive(source: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = source.recv(n - len(data))
        if not part:
            raise ConnectionError("a rank has gone while the group was formed")
        data += part
    return data
