"""Files of /proc/PID as text: status, stat, stack, io, limits, environ, cmdline, maps, fd, and counters by look."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vllmdiag.bundle.draft import Draft
from vllmdiag.model.process import Limits, ShmFd
from vllmdiag.sources.proc import parse_stat
from vllmdiag.vllm.settings import ENVIRON_ALLOWED
from vllmdiag.vllm.stages import is_weights
from vllmdiag.vllm.titles import identify

from .format import Context, Format, block

_SIGKILL_BIT = 1 << 8
_CLOCK_TICKS = 100.0


# -- status, stat, wchan, stack ---------------------------------------------------------------------------------------

_STATUS = re.compile(
    r"^\s*(Name|Umask|State|Tgid|Ngid|Pid|PPid|TracerPid|Uid|Gid|FDSize|Groups|NStgid|NSpid|NSpgid|NSsid|Kthread|Vm\w+|Rss\w+"
    r"|HugetlbPages|CoreDumping|THP_enabled|untag_mask|Threads|SigQ|SigPnd|ShdPnd|SigBlk|SigIgn|SigCgt|Cap\w+|NoNewPrivs|Seccomp\w*"
    r"|Speculation\w+|Cpus_allowed\w*|Mems_allowed\w*|voluntary_ctxt_switches|nonvoluntary_ctxt_switches|x86_\w+):\s*(.*)$"
)  # fmt: skip


def _read_status(lines: Sequence[str], context: Context, draft: Draft) -> None:
    fields = {m[1]: m[2].strip() for line in lines if (m := _STATUS.match(line))}
    pid = int(fields["Pid"]) if fields.get("Pid", "").isdigit() else context.pid
    process = draft.process(pid, context) if pid is not None else draft.subject(context)
    if fields.get("Name"):
        process.facts.setdefault("comm", fields["Name"])
    if fields.get("PPid", "").isdigit():
        process.facts["ppid"] = int(fields["PPid"])
    if fields.get("TracerPid", "").isdigit():
        process.facts["tracer_pid"] = int(fields["TracerPid"])
    uid = fields.get("Uid", "").split()
    if uid and uid[0].isdigit():
        process.facts["uid"] = int(uid[0])
    if fields.get("NSpid"):
        process.facts["nspids"] = tuple(int(word) for word in fields["NSpid"].split() if word.isdigit())
    pending = int(fields.get("SigPnd", "0") or "0", 16) | int(fields.get("ShdPnd", "0") or "0", 16)
    if pending & _SIGKILL_BIT:
        process.facts["sigkill_pending"] = True
    if fields.get("State"):
        process.sample(process.next_look("status", context.look), state=fields["State"][0])


_STAT = re.compile(r"^\s*\d+ \(.{1,40}\) [RSDTtZXIWP] -?\d+ -?\d+ -?\d+ ")


def _read_stat(lines: Sequence[str], context: Context, draft: Draft) -> None:
    for line in lines:
        stat = parse_stat(line.strip().encode())
        if stat is None:
            continue
        process = draft.process(int(line.split()[0]), context)
        process.facts.setdefault("comm", stat.comm)
        process.facts.update(ppid=stat.ppid, pgid=stat.pgid, sid=stat.sid, starttime=stat.starttime)
        process.sample(
            process.next_look("stat", context.look),
            state=stat.state,
            utime=stat.utime,
            stime=stat.stime,
            majflt=stat.majflt,
            rss=stat.rss,
        )


_STACK = re.compile(r"^\s*\[<[0-9a-f]*>\]\s+(\S+)(\s+\[\w+\])?\s*$")


def _read_stack(lines: Sequence[str], context: Context, draft: Draft) -> None:
    frames = [m[1].partition("+")[0] + (m[2] or "") for line in lines if (m := _STACK.match(line))]
    draft.subject(context).facts["kernel_stack"] = tuple(frames)


# -- io, and counters written down by look ----------------------------------------------------------------------------

_IO = re.compile(r"^\s*(rchar|wchar|syscr|syscw|read_bytes|write_bytes|cancelled_write_bytes):\s*(\d+)\s*$")


def _read_io(lines: Sequence[str], context: Context, draft: Draft) -> None:
    process = draft.subject(context)
    rows: list[dict[str, int]] = [{}]
    for line in lines:
        found = _IO.match(line)
        if found is not None:
            if found[1] in rows[-1]:
                rows.append({})
            rows[-1][found[1]] = int(found[2])
    for row in rows:
        kept = {name: value for name, value in row.items() if name in ("rchar", "read_bytes")}
        process.sample(process.next_look("io", context.look), **kept)


_COUNTERS = re.compile(
    r"^\s*t\s*=?\s*(\d+)s?\s*:?\s+"
    r"((?:\d[\d.]*(?:\s+\d[\d.]*)*)|(?:(?:utime|stime|majflt|read_bytes|rchar|rss)[\s=:]+\d.*))\s*$"
)
_TICKS = {"utime", "stime"}
_SAMPLE_FIELDS = {"utime", "stime", "majflt", "read_bytes", "rchar", "rss", "state"}


def _read_counters(lines: Sequence[str], context: Context, draft: Draft) -> None:
    """Rows ``t0 rchar 1 read_bytes 2`` or, where a comment names the columns, ``t0 51233 6120044``."""
    process = draft.subject(context)
    columns = [word for word in re.findall(r"\w+", context.header) if word in _SAMPLE_FIELDS]
    times = [int(m[1]) for line in lines if (m := _COUNTERS.match(line))]
    if len(times) >= 2 and times[-1] - times[0] >= len(times) and draft.apart_s is None:
        draft.apart_s = float(times[1] - times[0])  # `t0`, `t10`: seconds, not numbers of looks
    for look, line in enumerate(lines):
        found = _COUNTERS.match(line)
        if found is None:
            continue
        words = re.findall(r"[\w.]+", found[2])
        if words[0].isdigit():
            pairs = list(zip(columns, words, strict=False))
        else:
            pairs = list(zip(words[0::2], words[1::2], strict=False))
        fields: dict[str, Any] = {}
        for name, value in pairs:
            if name in _SAMPLE_FIELDS and value.isdigit():
                fields[name] = int(value) / _CLOCK_TICKS if name in _TICKS else int(value)
        if fields:
            process.sample(context.look + look, **fields)


# -- limits -----------------------------------------------------------------------------------------------------------

_LIMIT = re.compile(
    r"^\s*(Max (?:cpu time|file size|data size|stack size|core file size|resident set|processes|open files"
    r"|locked memory|address space|file locks|pending signals|msgqueue size|nice priority|realtime priority"
    r"|realtime timeout))"
    r"\s+(unlimited|\d+)\s+(unlimited|\d+)"
)
_LIMIT_FIELDS = {
    "Max open files": "nofile", "Max processes": "nproc", "Max locked memory": "memlock", "Max core file size": "core",
    "Max address space": "address_space",
}  # fmt: skip


def _read_limits(lines: Sequence[str], context: Context, draft: Draft) -> None:
    said = {m[1]: m[2] for line in lines if (m := _LIMIT.match(line))}
    values = {field: int(said[name]) for name, field in _LIMIT_FIELDS.items() if said.get(name, "").isdigit()}
    draft.subject(context).facts["limits"] = Limits(**values)


# -- environ and command line -----------------------------------------------------------------------------------------

_VARIABLE = re.compile(r"^\s*(?:export\s+|-e\s+|declare -x\s+)?([A-Za-z_]\w*)=(.*)$")
_KNOWN = re.compile(
    r"^(?:VLLM|NCCL|CUDA|GLOO|TORCH|PYTORCH|LD|OMP|RAY|HF|TMPDIR|KUBERNETES|NVIDIA|UCX|NIXL|LMCACHE|PYTHON|\w*_proxy)"
)


def _is_variable(line: str, _context: Context) -> bool:
    found = _VARIABLE.match(line)
    return found is not None and (found[1] in ENVIRON_ALLOWED or _KNOWN.match(found[1]) is not None)


def _read_environ(lines: Sequence[str], context: Context, draft: Draft) -> None:
    process = draft.subject(context)
    for line in lines:
        found = _VARIABLE.match(line)
        if found is None:
            continue
        name, value = found[1], found[2].strip().strip("'\"")
        if name.lower().endswith("_proxy"):
            process.environ(name, value if name.lower() == "no_proxy" else "set")
        elif name in ENVIRON_ALLOWED:
            process.environ(name, value)
    process.facts["environ_complete"] = len(lines) > 3 and any(line.startswith(("PATH=", "HOME=")) for line in lines)


def _is_command_line(line: str, _context: Context) -> bool:
    if "vllm" not in line:
        return False
    text = _command_text(line)
    known = identify((text,)) if text else None
    return known is not None and known.role == "APIServer" and known.known_by == "command line"


_INLINE = re.compile(r"`((?:\S*/)?(?:vllm serve|python[\d.]* -m vllm\.)[^`]*)`")


def _command_text(line: str) -> str:
    inline = _INLINE.search(line)
    if inline is not None:  # a sentence that tells the command
        return inline[1].strip()
    return re.sub(r"^\s*(?:[$#>]\s+)?(?:(?:nohup|exec|sudo(?: -\S+)*|time|numactl \S+|\w+=\S+)\s+)*", "", line).strip()


def _read_command_line(lines: Sequence[str], context: Context, draft: Draft) -> None:
    text = " ".join(_command_text(line).rstrip("\\").strip() for line in lines)
    draft.subject(context).facts.setdefault("cmdline", (text,))


def _goes_on_command(line: str, _context: Context) -> bool:
    return line.lstrip().startswith("--")


# -- maps and descriptors ---------------------------------------------------------------------------------------------

_MAP = re.compile(r"^\s*(?:[0-9a-f]{6,}-[0-9a-f]{6,} \S{4} \S+ \S+ \d+\s+)?(/\S.*?)(?P<deleted> \(deleted\))?\s*$")
_LIBRARY = re.compile(r"\.so(?:\.[\w.]+)*$|\.dist-info(?:/|$)")
_VERSION = re.compile(r"/vllm-([\w.+]+?)\.dist-info")


def _is_map(line: str, _context: Context) -> bool:
    found = _MAP.match(line)
    return found is not None and (
        _LIBRARY.search(found[1]) is not None or re.match(r"\s*[0-9a-f]{6,}-", line) is not None
    )


def _goes_on_map(line: str, _context: Context) -> bool:
    return _MAP.match(line) is not None or re.match(r"^\s*[0-9a-f]{6,}-[0-9a-f]{6,} ", line) is not None


def _read_maps(lines: Sequence[str], context: Context, draft: Draft) -> None:
    process = draft.subject(context)
    rows = [m for line in lines if (m := _MAP.match(line))]
    paths = [row[1] for row in rows]
    process.append("libraries", *(path for path in paths if _LIBRARY.search(path)))
    version = next((m[1] for path in paths if (m := _VERSION.search(path))), None)
    if version is not None:
        process.facts.setdefault("vllm_version", version)
    for row in rows:
        if row[1].startswith("/dev/shm/"):
            draft.holder(row[1], process.pid, mapped=True)
            draft.file(row[1], deleted=bool(row["deleted"]) or None)


_FD_ROW = re.compile(r"^[l-][rwx-]{9}.*\s(\d+)\s+->\s+'?(\S.*?)(?P<deleted> \(deleted\))?'?\s*$")
_FD_KIND = re.compile(
    r"^\s*(sockets?|pipes?|anon_inode\S*|files?|eventfd|eventpoll|total|other|dev\S*|regular)\s*[:=]?\s+(\d+)\s*$"
)
_COUNT = re.compile(r"^\s*(\d+)\s*$")


def _read_fd_rows(lines: Sequence[str], context: Context, draft: Draft) -> None:
    process = draft.subject(context)
    rows = [m for line in lines if (m := _FD_ROW.match(line))]
    process.facts["n_fds"] = len(rows)
    inodes = [int(m[1]) for row in rows if (m := re.match(r"socket:\[(\d+)\]", row[2]))]
    process.facts["socket_inodes"] = tuple(inodes)
    devices = [row[2] for row in rows if re.match(r"/dev/(?:nvidia|kfd|dri/|infiniband)", row[2])]
    process.append("device_files", *devices)
    for row in rows:
        path = row[2]
        if path.startswith("/dev/shm/"):
            draft.holder(path, process.pid, fd=int(row[1]))
            draft.file(path, deleted=bool(row["deleted"]) or None)
            shm = ShmFd(fd=int(row[1]), path=path, deleted=bool(row["deleted"]), dev=0, ino=0, size=0)
            process.append("shm_fds", shm)
        elif is_weights(path):
            process.append("libraries", path)


def _read_fd_kinds(lines: Sequence[str], context: Context, draft: Draft) -> None:
    counts = {m[1]: int(m[2]) for line in lines if (m := _FD_KIND.match(line))}
    draft.subject(context).facts["n_fds"] = counts.pop("total", None) or sum(counts.values())


def _opens_fd_count(line: str, context: Context) -> bool:
    """The answer to ``ls /proc/PID/fd | wc -l``."""
    return (
        _COUNT.match(line) is not None
        and "/fd" in context.header
        and ("wc" in context.header or "count" in context.header)
    )


def _read_fd_count(lines: Sequence[str], context: Context, draft: Draft) -> None:
    draft.subject(context).facts["n_fds"] = int(lines[0])


_WORD = re.compile(r"^\w+$")


def _opens_wchan(line: str, context: Context) -> bool:
    """The answer to ``cat /proc/PID/wchan``."""
    return _WORD.match(line.strip()) is not None and context.command.endswith("/wchan")


def _read_wchan(lines: Sequence[str], context: Context, draft: Draft) -> None:
    if lines[0].strip() != "0":
        draft.subject(context).facts["wchan"] = lines[0].strip()


def _one(rule: re.Pattern[str]) -> tuple[Any, Any]:
    """Opens and goes on by the same rule."""

    def fits(line: str, _context: Context) -> bool:
        return rule.match(line) is not None

    return fits, fits


def _never(_line: str, _context: Context) -> bool:
    return False


FORMATS: tuple[Format, ...] = (
    block("/proc/PID/status", *_one(_STATUS), _read_status, names=("status", "proc_status")),
    block("/proc/PID/stat", *_one(_STAT), _read_stat),
    block("kernel stack", *_one(_STACK), _read_stack),
    block("/proc/PID/wchan", _opens_wchan, _never, _read_wchan),
    block("/proc/PID/io", *_one(_IO), _read_io),
    block("counters by look", *_one(_COUNTERS), _read_counters),
    block(
        "/proc/PID/limits",
        lambda line, _: _LIMIT.match(line) is not None or line.startswith("Limit  "),
        lambda line, _: _LIMIT.match(line) is not None,
        _read_limits,
    ),
    block(
        "environment",
        _is_variable,
        lambda line, _: _VARIABLE.match(line) is not None,
        _read_environ,
        names=("environ", "env"),
    ),
    block("command line", _is_command_line, _goes_on_command, _read_command_line, names=("cmdline",)),
    block("descriptors", *_one(_FD_ROW), _read_fd_rows),
    block("descriptors by kind", *_one(_FD_KIND), _read_fd_kinds, names=("fd",)),
    block("count of descriptors", _opens_fd_count, _never, _read_fd_count),
    block("/proc/PID/maps", _is_map, _goes_on_map, _read_maps, names=("maps",)),
)
