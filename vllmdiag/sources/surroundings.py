"""What stands around a start-up, gathered in one go, and only while nobody serves: a serving instance pays nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from vllmdiag.model.process import Process
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.sockets import Socket
from vllmdiag.model.startup import FileLock, Network, TakenPort
from vllmdiag.vllm.instances import Instance
from vllmdiag.vllm.ports import wanted

from .interfaces import networks
from .locks import file_locks
from .mounts import filesystem_of
from .ports import taken_ports
from .weights import with_checkpoint


class Surroundings(NamedTuple):
    """Fields of the snapshot by their names."""

    locks: tuple[FileLock, ...] = ()
    networks: tuple[Network, ...] = ()
    taken_ports: tuple[TakenPort, ...] = ()

    def add_to(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with these fields."""
        return msgspec.structs.replace(snapshot, **self._asdict())


def serves(instance: Instance, sockets: Sequence[Socket]) -> bool:
    """A member listens for HTTP where the arguments say that it will: the start-up is over."""
    options = instance.options
    if options is None or options.headless:
        return False
    mine = set(instance.pids)
    bound = [s for s in sockets if s.state == "LISTEN" and mine & set(s.pids)]
    return any(s.local == options.uds if options.uds else s.port == options.port for s in bound)


def beside_its_own(
    processes: Sequence[Process], instance: Instance, sockets: Sequence[Socket], root: str = "/"
) -> Surroundings:
    """Who else listens on the HTTP port of an instance that serves. Free where all listeners on it are its own."""
    options, mine = instance.options, set(instance.pids)
    if options is None or not any(
        s.state == "LISTEN" and s.port == options.port and not mine & set(s.pids) for s in sockets
    ):
        return Surroundings()
    return Surroundings(taken_ports=taken_ports({"HTTP": options.port}, options.host, processes, root))


def with_files(process: Process, root: str = "/") -> Process:
    """The process with the weights it has mapped and the file system of its packages, as far as they are visible."""
    packages = next((path for path in process.libraries if "-packages/" in path), "")
    kind = filesystem_of(process.pid, packages, root) if packages else ""
    return msgspec.structs.replace(with_checkpoint(process, root), import_filesystem=kind)


def surroundings(processes: Sequence[Process], instance: Instance, root: str = "/") -> Surroundings:
    """Look once. Never raises.

    Args:
        processes: of the instance, observed (with their environment).
        instance: what they make.
        root: where /proc is looked up.
    """
    options = instance.options
    ports: tuple[TakenPort, ...] = ()
    if options is not None:
        first = instance.member(instance.roots[0])
        binder = [p for p in processes if first is not None and p.pid == first.pid]
        environ = {name: value for p in processes for name, value in p.environ.items()}
        ports = taken_ports(wanted(options, environ), options.host, [*binder, *processes], root)
    return Surroundings(
        locks=file_locks(processes, root),
        networks=networks(processes, root),
        taken_ports=ports,
    )
