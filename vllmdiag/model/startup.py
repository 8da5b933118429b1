"""What is recorded around a start-up: locks of caches, the network as the target sees it, ports that others hold."""

from __future__ import annotations

from .base import Fact


class FileLock(Fact, frozen=True, kw_only=True):
    """A lock on a file of a cache (/proc/locks), or a lock file that is a lock by its mere existence."""

    path: str
    kind: str
    """``FLOCK``, ``POSIX``, ``OFDLCK``; ``baton`` for a file whose existence is the lock (torch's FileBaton)."""
    holder: int | None = None
    """Pid that took it; None where nobody has it open (a baton left behind) or the holder is not visible."""
    holder_comm: str = ""
    holder_state: str = ""
    """Letter of stat(5); empty where the holder is gone."""
    waiters: tuple[int, ...] = ()
    """Pids that sleep in the kernel for it. Pollers (filelock) do not show."""
    age_s: float | None = None
    """Seconds since the file was last modified."""
    stale: bool = False
    """A baton that no process has open: nobody will ever remove it."""


class Interface(Fact, frozen=True, kw_only=True):
    """A network interface of one network namespace."""

    name: str
    addresses: tuple[str, ...] = ()
    up: bool | None = None
    """None where it was not told."""


class HostName(Fact, frozen=True, kw_only=True):
    """A line of /etc/hosts."""

    name: str
    address: str
    node: str = ""
    """Machine whose file it is; empty where all of the evidence is of one."""


class Route(Fact, frozen=True, kw_only=True):
    """A route of IPv4 that is up."""

    network: str
    """``10.0.0.0/24``; ``0.0.0.0/0`` for the default route."""
    interface: str
    gateway: str = ""
    """Empty where the network is on the link itself."""


class Network(Fact, frozen=True, kw_only=True):
    """One network namespace of the instance."""

    netns: int
    """Inode of the namespace; 0 where it may not be named."""
    pids: tuple[int, ...]
    """Members that live in it."""
    interfaces: tuple[Interface, ...] = ()
    routes: tuple[Route, ...] = ()


class TakenPort(Fact, frozen=True, kw_only=True):
    """A TCP port that the instance is to bind and that a process outside of it listens on."""

    port: int
    purpose: str
    """``HTTP``, ``master`` ..."""
    address: str
    """Local address of the other listener."""
    pids: tuple[int, ...] = ()
    """Its owners; empty where they may not be seen."""
    name: str = ""
    """Command of the first owner, without its arguments: they may hold secrets."""


class Checkpoint(Fact, frozen=True, kw_only=True):
    """The weights that a process reads: the file it has mapped now, and its siblings."""

    path: str
    files: int
    """Files of weights in that directory."""
    bytes: int
    """Their sizes together."""
    before: int
    """Sizes of those before this one, by name: with one file after another, what has been read already."""
    size: int
    """Size of the mapped file."""
    filesystem: str = ""
    """Type of the file system, as in /proc/PID/mounts; empty where not known."""


class RayStatus(Fact, frozen=True, kw_only=True):
    """What `ray status` and `ray list actors` say of a cluster."""

    nodes: tuple[str, ...] = ()
    """Addresses (or ids, where it tells no addresses) of the nodes that are up."""
    gpus_total: float | None = None
    gpus_used: float | None = None
    pending: tuple[str, ...] = ()
    """Demands that are not met, as they stand."""
    workers_alive: int = 0
    workers_dead: int = 0
    """Actors that are workers of vLLM. Ray remembers dead ones of earlier runs too."""
