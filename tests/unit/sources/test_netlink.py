"""Netlink by hand: the tables agree with what was opened, and no answer can make the reader crash."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.sources import netlink
from vllmdiag.sources.netlink import ProcNet, Row, SockDiag


def rows_now() -> list[Row]:
    with closing(SockDiag()) as table:
        return list(table.rows())


def inode_of(opened: socket.socket) -> int:
    return os.fstat(opened.fileno()).st_ino


def row_of(opened: socket.socket, rows: list[Row]) -> Row:
    return next(row for row in rows if row.inode == inode_of(opened))


def test_the_ends_of_a_unix_connection_name_each_other_and_show_the_bytes_in_between() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.send(b"x" * 1000)
        rows = rows_now()
        sender, reader = row_of(left, rows), row_of(right, rows)
    assert (sender.peer_inode, reader.peer_inode) == (reader.inode, sender.inode)
    assert reader.recv_q == 1000
    assert sender.send_q is not None
    assert sender.send_q >= 1000  # the kernel counts its own overhead too


def test_a_unix_listener_shows_its_path_its_backlog_and_who_waits(tmp_path: Path) -> None:
    path = str(tmp_path / "listener")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(path)
        listener.listen(7)
        client.connect(path)
        rows = rows_now()
        row = row_of(listener, rows)
        assert row == Row("unix", inode_of(listener), "LISTEN", path, "", None, 1, 7, (inode_of(client),))
        assert row_of(client, rows).peer_inode is None


def test_an_abstract_name_begins_with_an_at_sign() -> None:
    name = f"vllmdiag-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        assert row_of(listener, rows_now()).local == "@" + name


@pytest.mark.parametrize(
    ("family", "host", "written", "name"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1", "tcp"),
        pytest.param(socket.AF_INET6, "::1", "[::1]", "tcp6", marks=pytest.mark.needs("ipv6")),
    ],
)
def test_a_tcp_listener_shows_the_connections_not_accepted(
    family: socket.AddressFamily, host: str, written: str, name: str
) -> None:
    with socket.socket(family) as listener, socket.socket(family) as client:
        listener.bind((host, 0))
        listener.listen(9)
        port = listener.getsockname()[1]
        client.connect((host, port))
        rows = rows_now()
        client_address = f"{written}:{client.getsockname()[1]}"
        assert row_of(listener, rows) == Row(
            name, inode_of(listener), "LISTEN", f"{written}:{port}", recv_q=1, send_q=9
        )
        assert row_of(client, rows).remote == f"{written}:{port}"
        unaccepted = [row for row in rows if row.remote == client_address]
        assert [(row.inode, row.state) for row in unaccepted] == [(0, "ESTAB")]


@pytest.mark.needs("ipv6")
def test_an_ipv4_client_of_an_ipv6_listener_has_the_same_address_on_both_ends() -> None:
    with socket.socket(socket.AF_INET6) as listener, socket.socket(socket.AF_INET) as client:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("::", 0))
        listener.listen()
        client.connect(("127.0.0.1", listener.getsockname()[1]))
        accepted = listener.accept()[0]
        with accepted:
            rows = rows_now()
            near, far = row_of(client, rows), row_of(accepted, rows)
    assert (near.local, near.remote) == (far.remote, far.local)
    assert (near.family, far.family) == ("tcp", "tcp6")


def test_one_netlink_socket_serves_many_dumps_even_after_one_was_given_up() -> None:
    with closing(SockDiag()) as table, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        next(table.rows(), None)
        for _ in range(3):
            assert row_of(listener, list(table.rows())).state == "LISTEN"


def test_proc_shows_the_same_sockets_without_unix_peers_and_queues(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix, socket.socket() as tcp, socket.socket() as client:
        unix.bind(str(tmp_path / "listener"))
        unix.listen()
        tcp.bind(("127.0.0.1", 0))
        tcp.listen(9)
        client.connect(tcp.getsockname())
        expected, seen = rows_now(), list(ProcNet(os.getpid()).rows())
        full = row_of(unix, expected)
        assert row_of(unix, seen) == Row("unix", full.inode, "LISTEN", full.local)
        assert row_of(tcp, seen) == row_of(tcp, expected)._replace(send_q=None)
        assert row_of(client, seen) == row_of(client, expected)


def test_a_process_that_is_gone_has_no_table() -> None:
    with pytest.raises(OSError, match="No such file"):
        list(ProcNet(0).rows())


def test_a_refusal_of_the_kernel_is_an_error_with_its_number() -> None:
    refusal = netlink._HEADER.pack(20, netlink.NLMSG_ERROR, 0, 1, 0) + (-errno.ENOENT).to_bytes(
        4, "little", signed=True
    )
    ours, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with closing(SockDiag()) as table, kernel:
        table.close()
        table._socket = ours
        kernel.send(refusal)
        with pytest.raises(OSError, match="sock_diag") as caught:
            list(table.rows())
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("read", [netlink._unix_row, netlink._inet_row])
@given(data=st.binary(max_size=200))
def test_no_message_crashes_the_reader(read: Callable[[bytes], Row], data: bytes) -> None:
    with suppress(OSError):
        assert read(data).family in ("unix", "tcp", "tcp6")


@given(st.binary(max_size=200))
def test_what_is_split_was_there(data: bytes) -> None:
    assert sum(4 + len(value) for _, value in netlink.attributes(data)) <= len(data)
    with suppress(OSError):
        assert sum(16 + len(payload) for _, _, payload in netlink.messages(data)) <= len(data)


@given(st.text(max_size=200))
def test_no_line_of_proc_crashes_the_reader(line: str) -> None:
    assert netlink.unix_line(line) is None or netlink.unix_line(line).inode  # type: ignore[union-attr]
    netlink.inet_line(line, "tcp")


@given(st.binary(max_size=107).filter(lambda name: not name.startswith(b"\0") and b"\0" not in name))
def test_every_path_that_can_be_bound_becomes_text_that_json_can_carry(name: bytes) -> None:
    netlink._unix_name(name + b"\0").encode()
