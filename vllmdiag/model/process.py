"""What is recorded of one process: identity, state over the window, limits, memory, descriptors, threads, stacks.

Every field is a copy of what the kernel (or py-spy) said; nothing here is interpreted. The same struct is filled by the
live sources, by a bundle and by pasted evidence, so most fields have a default and may be `Missing`.
"""

from __future__ import annotations

import msgspec

from .base import Fact, Missing
from .gpu import KernelImage
from .startup import Checkpoint


class ProcessSample(Fact, frozen=True, kw_only=True):
    """One look at /proc/PID/stat (and io) at `t` seconds after the start of the window."""

    t: float
    state: str
    """R, S, D, T, t, Z, X, I ... as in stat(5); empty string when the process was gone."""
    utime: float = 0.0
    """Seconds of CPU in user mode since the start of the process (all threads)."""
    stime: float = 0.0
    """Seconds of CPU in kernel mode since the start of the process (all threads)."""
    majflt: int = 0
    read_bytes: int | None = None
    """Bytes fetched from storage (/proc/PID/io read_bytes), None where not readable."""
    rchar: int | None = None
    """Bytes returned by read(2) and friends (/proc/PID/io rchar), None where not readable."""
    rss: int = 0
    """Resident set, bytes."""
    run_delay: float | None = None
    """Seconds its main thread has stood in the queue for a processor since its start (/proc/PID/schedstat)."""


class ThreadSample(Fact, frozen=True, kw_only=True):
    """One look at /proc/PID/task/TID/stat."""

    t: float
    state: str
    utime: float
    stime: float


class Thread(Fact, frozen=True, kw_only=True):
    """One thread of a process, seen over the window."""

    tid: int
    name: str
    """The kernel's comm of the thread (15 characters)."""
    samples: tuple[ThreadSample, ...] = ()
    wchan: str = ""
    """Kernel function it sleeps in; empty where running or not readable."""


class Frame(Fact, frozen=True, kw_only=True):
    """One Python (or native) frame."""

    name: str
    """Function name; qualified (`MessageQueue.acquire_read`) on Python >= 3.11, bare before."""
    file: str
    """Path as py-spy shortens it, e.g. ``vllm/v1/engine/core.py``."""
    line: int = 0


class ThreadStack(Fact, frozen=True, kw_only=True):
    """The stack of one thread in one dump. `frames[0]` is the innermost frame."""

    name: str
    """Python's thread name, e.g. ``MainThread``; empty where unknown."""
    tid: int | None = None
    """The kernel's thread id; for the main thread it equals the pid."""
    active: bool = False
    """py-spy's guess that the thread is on CPU."""
    owns_gil: bool = False
    frames: tuple[Frame, ...] = ()


class StackDump(Fact, frozen=True, kw_only=True):
    """All Python threads of one process at one time."""

    t: float
    threads: tuple[ThreadStack, ...] | Missing
    took_s: float = 0.0


class ShmFd(Fact, frozen=True, kw_only=True):
    """A descriptor of the process that is open on a file in a tmpfs such as /dev/shm."""

    fd: int
    path: str
    """Target of the link, with `` (deleted)`` cut off."""
    deleted: bool
    dev: int
    ino: int
    size: int


class Limits(Fact, frozen=True, kw_only=True, tag=True):
    """Soft limits of the target itself (/proc/PID/limits); None means unlimited."""

    nofile: int | None = None
    nproc: int | None = None
    memlock: int | None = None
    core: int | None = None
    address_space: int | None = None


class Cgroup(Fact, frozen=True, kw_only=True, tag=True):
    """The control group of the target: limits in force and how often they bit. None where the file does not exist."""

    path: str
    version: int
    """1 or 2."""
    frozen: bool = False
    memory_max: int | None = None
    memory_current: int | None = None
    shmem: int | None = None
    oom_kill: int | None = None
    """How many processes of the group the kernel has killed for memory since it exists."""
    pids_max: int | None = None
    pids_current: int | None = None
    pids_refused: int | None = None
    """How often a new task was refused since the group exists (pids.events, only from pasted evidence)."""
    nr_throttled: int | None = None
    throttled_s: float | None = None


class Namespaces(Fact, frozen=True, kw_only=True, tag=True):
    """Inode numbers of the namespaces, to compare with those of the tool."""

    mnt: int
    pid: int
    net: int
    ipc: int
    user: int


class Memory(Fact, frozen=True, kw_only=True, tag=True):
    """smaps_rollup, bytes: PSS is the honest share of pages that several processes map."""

    rss: int
    pss: int
    shared: int
    private: int
    pss_shmem: int = 0


class Process(Fact, frozen=True, kw_only=True):
    """One process of interest. Identity is (`pid`, `starttime`): pids are reused, the pair is not."""

    pid: int
    starttime: int = 0
    """Clock ticks after boot (field 22 of stat)."""
    age_s: float | None = None
    """Seconds between its start and the end of the window."""
    ppid: int = 0
    parent_unseen: bool = False
    """Its parent is no part of the evidence (pasted evidence only): whether that is an API server is not known."""
    node: str = ""
    """Machine it runs on; empty where all of the evidence is of one."""
    told_role: str = ""
    """Part it plays, where evidence other than its title says so (pasted evidence): a ring dump, a prefix in a log."""
    rank: int | None = None
    """Number among all ranks of its job, where the evidence says it outside of the title."""
    pgid: int = 0
    sid: int = 0
    uid: int | None = None
    comm: str = ""
    cmdline: tuple[str, ...] | Missing = ()
    """argv, or the title that setproctitle wrote over it (one element then)."""
    exe: str | Missing = ""
    tracer_pid: int = 0
    sigkill_pending: bool = False
    """SIGKILL stands in SigPnd or ShdPnd: somebody has killed it and it has not died."""
    nspids: tuple[int, ...] = ()
    """Its pid in each nested pid namespace, outermost first."""
    wchan: str = ""
    syscall: str = ""
    """First word of /proc/PID/syscall (the number, or ``running``)."""
    kernel_stack: tuple[str, ...] = ()
    """/proc/PID/stack of the main thread, where permitted."""
    samples: tuple[ProcessSample, ...] = ()
    threads: tuple[Thread, ...] = ()
    stacks: tuple[StackDump, ...] = ()
    environ: dict[str, str] = msgspec.field(default_factory=dict)
    """Allow-listed variables only; empty where the area was overwritten by the title."""
    environ_complete: bool = False
    """False where /proc/PID/environ was clobbered or not readable: an absent variable then proves nothing."""
    limits: Limits | Missing = Limits()
    cgroup: Cgroup | Missing | None = None
    namespaces: Namespaces | Missing | None = None
    memory: Memory | Missing | None = None
    vllm_version: str | None = None
    """From the dist-info beside the libraries it has mapped; None where that could not be found."""
    last_ran_s: float | None = None
    """Seconds from when its main thread last ran to the end of the window (/proc/PID/sched); None if unknown."""
    n_fds: int | None = None
    shm_fds: tuple[ShmFd, ...] | Missing = ()
    socket_inodes: tuple[int, ...] | Missing = ()
    libraries: tuple[str, ...] = ()
    """Paths of mapped libraries that matter (libzmq, libnccl, libcuda, preload shims); empty where not readable."""
    device_files: tuple[str, ...] = ()
    """/dev/nvidia*, /dev/kfd, /dev/dri/*, /dev/infiniband/* that it has open."""
    kernels: tuple[KernelImage, ...] = ()
    """Of the kernel libraries it has mapped; empty where it has none or that was not looked at."""
    packages: dict[str, str] = msgspec.field(default_factory=dict)
    """Versions of distributions whose kernels it runs, as ``{"flashinfer": "0.6.12"}``; those that could be told."""
    checkpoint: Checkpoint | None = None
    """The weights it has mapped; None where it has none or that was not looked for."""
    import_filesystem: str = ""
    """Type of the file system of the packages it imports; empty where not known."""
    missing: tuple[Missing, ...] = ()
    """Facts of this process that could not be had."""

    @property
    def title(self) -> str:
        """What `ps` would print: the command line, else the comm in brackets."""
        if isinstance(self.cmdline, Missing) or not self.cmdline:
            return f"[{self.comm}]"
        return " ".join(self.cmdline).strip()

    @property
    def state(self) -> str:
        """The last state seen; empty when it was gone at the end of the window."""
        return self.samples[-1].state if self.samples else ""

    @property
    def gone(self) -> bool:
        """It existed when the window began and had vanished when it ended."""
        return bool(self.samples) and self.samples[-1].state == ""

    @property
    def cpu_s(self) -> float:
        """CPU seconds it used within the window."""
        seen = [s for s in self.samples if s.state]
        if len(seen) < 2:
            return 0.0
        return (seen[-1].utime + seen[-1].stime) - (seen[0].utime + seen[0].stime)
