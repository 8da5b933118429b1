"""Who looks, what the kernel lets it see, and on which machine."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection
from typing import NamedTuple

from vllmdiag.model.snapshot import Node, Viewer

from . import procfs
from .proc import parse_fields, parse_stat

# linux/capability.h, in the order of their bits.
_CAPABILITIES = (
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
)
_HIDEPID = {"off": 0, "noaccess": 1, "invisible": 2, "ptraceable": 4}
_NAMESPACES = ("mnt", "pid", "net", "ipc", "user", "cgroup", "uts", "time")
_SYS_PTRACE = "CAP_SYS_PTRACE"
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # include/linux/proc_ns.h: PROC_PID_INIT_INO


def viewer(root: str = "/", target_uids: Collection[int | None] = ()) -> Viewer:
    """The process that looks.

    Args:
        root: where the tree with ``proc`` is.
        target_uids: owners of the processes to look at. Without CAP_SYS_PTRACE their files open only to their owner: a
            viewer that is none of them is an ``observer``. With none given the viewer is taken to be the owner.
    """
    status = _fields(root, "self", "status")
    uid = int((status.get("Uid", "").split() or [str(os.geteuid())] * 2)[1])
    capabilities = decode_capabilities(int(status.get("CapEff", "0"), 16))
    if _SYS_PTRACE in capabilities:
        access = "full"
    else:
        access = "same-uid" if not target_uids or uid in target_uids else "observer"
    return Viewer(
        pid=os.getpid(),
        uid=uid,
        access=access,
        capabilities=capabilities,
        yama_scope=_number(root, "sys", "kernel", "yama", "ptrace_scope"),
        hidepid=hidepid(root),
        namespaces=_namespaces(root),
    )


def started() -> float:
    """When this process was started, on the clock of `time.monotonic`; exact to 10 ms."""
    stat = parse_stat(procfs.read(procfs.proc("/", "self", "stat")))
    now = time.monotonic()
    return now if stat is None else now - max(0.0, procfs.uptime() - stat.starttime / procfs.CLOCK_TICKS)


class CpuTimes(NamedTuple):
    """Ticks of all processors since the start of the machine."""

    kernel: int
    total: int


def cpu_times(root: str = "/") -> CpuTimes:
    """What the processors have done so far. Zeros where it is not to be had."""
    row = _text(root, "stat").partition("\n")[0].split()[1:9]
    ticks = [int(word) for word in row if word.isdigit()]
    if len(ticks) < 7:
        return CpuTimes(0, 0)
    return CpuTimes(ticks[2] + ticks[5] + ticks[6], sum(ticks))  # system, irq, softirq


def node(root: str = "/", since: CpuTimes | None = None) -> Node:
    """The machine: name, kernel, processors, load, memory (bytes), and who has had the processors since then."""
    memory = _fields(root, "meminfo")
    now = cpu_times(root) if since is not None else CpuTimes(0, 0)
    passed = now.total - since.total if since is not None else 0
    pressed = re.search(r"^some avg10=([\d.]+)", _text(root, "pressure", "cpu"), re.MULTILINE)
    load = _text(root, "loadavg").split()
    return Node(
        hostname=_text(root, "sys", "kernel", "hostname"),
        kernel=_text(root, "sys", "kernel", "osrelease"),
        boot_id=_text(root, "sys", "kernel", "random", "boot_id"),
        machine=os.uname().machine,
        n_cpus=len(re.findall(r"^cpu\d", _text(root, "stat"), re.MULTILINE)),
        load1=float(load[0]) if load else None,
        kernel_share=(now.kernel - since.kernel) / passed if since is not None and passed > 0 else None,
        pressure_cpu=float(pressed[1]) / 100 if pressed is not None else None,
        mem_total=_kib(memory.get("MemTotal")),
        mem_available=_kib(memory.get("MemAvailable")),
        clock_ticks=procfs.CLOCK_TICKS,
    )


def hidepid(root: str = "/") -> int:
    """How /proc hides the processes of others: 0 not, 1 their files, 2 and 4 their existence (proc(5))."""
    for line in _text(root, "self", "mounts").splitlines():
        _, place, kind, options, *_ = line.split() + [""] * 4
        if place == "/proc" and kind == "proc" and (found := re.search(r"hidepid=(\w+)", options)):
            word = found[1]
            return int(word) if word.isdigit() else _HIDEPID.get(word, 0)
    return 0


def sees_all_pids(root: str = "/") -> bool:
    """Whether /proc lists every process of the machine to us: nothing hidden, and no pid namespace outside ours."""
    with contextlib.suppress(OSError):  # a recorded tree has no such link
        if os.readlink(os.path.join(root, "proc", "self", "ns", "pid")) != _INITIAL_PID_NAMESPACE:
            return False
    return hidepid(root) < 2 or may_ptrace(root)


def may_ptrace(root: str = "/") -> bool:
    """Whether we have CAP_SYS_PTRACE, before which no option of /proc hides anything."""
    return _SYS_PTRACE in decode_capabilities(int(_fields(root, "self", "status").get("CapEff", "0"), 16))


def decode_capabilities(mask: int) -> tuple[str, ...]:
    """Names of the bits that are set, such as ``CAP_SYS_PTRACE``; bits newer than this list as ``CAP_41``."""
    bits = (bit for bit in range(mask.bit_length()) if mask >> bit & 1)
    return tuple("CAP_" + (_CAPABILITIES[bit] if bit < len(_CAPABILITIES) else str(bit)) for bit in bits)


def _namespaces(root: str) -> dict[str, int]:
    found = {}
    for name in _NAMESPACES:
        try:
            link = os.readlink(procfs.proc(root, "self", "ns", name))
        except OSError:  # a kernel without this kind
            continue
        found[name] = int(re.sub(r"\D", "", link))
    return found


def _text(root: str, *parts: str) -> str:
    try:
        return procfs.text(procfs.proc(root, *parts)).strip()
    except OSError:
        return ""


def _fields(root: str, *parts: str) -> dict[str, str]:
    return parse_fields(_text(root, *parts).encode())


def _number(root: str, *parts: str) -> int | None:
    word = _text(root, *parts)
    return int(word) if word.isdigit() else None


def _kib(value: str | None) -> int | None:
    return int(value.split()[0]) * 1024 if value else None
