"""The facts of a (redacted) snapshot as the text that people know from their tools; never read beside the snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from vllmdiag.diagnosis.rings import Ring, rings_of
from vllmdiag.diagnosis.scene import scene_of
from vllmdiag.model.base import Missing, known
from vllmdiag.model.http import MetricsScrape
from vllmdiag.model.process import Process, StackDump
from vllmdiag.model.ring import Slot, SlotState
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.render.page import clean
from vllmdiag.vllm.metrics import METRICS

Source = Callable[[Snapshot], Iterable[str]]


def raw_texts(snapshot: Snapshot) -> Iterator[tuple[str, str, str]]:
    """(file name, what it holds, text) of each source that gave something."""
    for name, (about, source) in _FILES.items():
        lines = [clean(line) for line in source(snapshot)]
        if lines:
            yield name, about, "\n".join(lines) + "\n"


def _ps(snapshot: Snapshot) -> Iterator[str]:
    if snapshot.processes:
        yield "    PID    PPID S ELAPSED COMMAND         WCHAN                     COMMAND"
    for p in snapshot.processes:
        age = f"{p.age_s:.0f}" if p.age_s is not None else "-"
        title = f"[{p.comm}] <defunct>" if p.state == "Z" else p.title
        yield f"{p.pid:7} {p.ppid:7} {p.state or '-'} {age:>7} {p.comm:15} {p.wchan or '-':25} {title}"


def _stacks(pick: int) -> Source:
    """The first dumps of all processes, or (-1) the last ones where there were several."""

    def lines(snapshot: Snapshot) -> Iterator[str]:
        for process in snapshot.processes:
            dumps = process.stacks[pick:][:1] if pick == 0 or len(process.stacks) > 1 else ()
            for dump in dumps:
                yield from _dump(process, dump)

    return lines


def _dump(process: Process, dump: StackDump) -> Iterator[str]:
    yield f"Process {process.pid}: {process.title}"
    if isinstance(dump.threads, Missing):
        yield f"# {dump.threads.what}: {dump.threads.why}"
    for thread in () if isinstance(dump.threads, Missing) else dump.threads:
        state = "active" if thread.active else "idle"
        yield ""
        yield f'Thread {thread.tid or 0} ({state}{"+gil" if thread.owns_gil else ""}): "{thread.name}"'
        yield from (f"    {frame.name} ({frame.file}:{frame.line})" for frame in thread.frames)
    yield ""


def _rings(snapshot: Snapshot) -> Iterator[str]:
    scene = scene_of(snapshot)
    for ring in rings_of(scene) if scene is not None else ():
        yield from _ring(ring)


def _ring(ring: Ring) -> Iterator[str]:
    shape = ring.geometry
    pids = ",".join("?" if pid is None else str(pid) for pid in ring.readers)
    yield (
        f"ring {ring.segment.name} n_reader={shape.n_readers} chunk={shape.chunk_bytes} slots={shape.chunks}"
        f" role={ring.queue or '?'} writer_pid={ring.writer or '?'} reader_pids={pids}"
    )
    yield f"# {ring.segment.polls} looks in {ring.segment.polled_s:.1f} s, {ring.moved} changes"
    for slot in ring.last.slots if ring.last is not None else ():
        yield f"slot {slot.index}: {_flags(slot, shape.n_readers)}"
    yield ""


def _flags(slot: Slot, n_readers: int) -> str:
    if slot.state in (SlotState.UNREAD, SlotState.READ):
        return " ".join(["1", *("0" if reader in slot.unread_by else "1" for reader in range(n_readers))])
    if slot.state is SlotState.EMPTY:
        return " ".join(["0"] * (1 + n_readers))
    return f"# {slot.state.value}"


def _sockets(snapshot: Snapshot) -> Iterator[str]:
    if snapshot.sockets:
        yield "Netid State      Recv-Q Send-Q Local Address:Port  Peer Address:Port  Process"
    names = {p.pid: p.comm for p in snapshot.processes}
    for s in snapshot.sockets:
        users = ",".join(f'("{names.get(o.pid, "?")}",pid={o.pid},fd={(o.fds or (0,))[0]})' for o in s.owners)
        ends = (
            f"{s.local or '*'} {s.inode} {s.remote or '*'} {s.peer_inode or 0}"
            if s.family == "unix"
            else f"{s.local} {s.remote or '*:*'}"
        )
        netid = {"unix": "u_str", "tcp6": "tcp"}.get(s.family, s.family)
        owners = f" users:({users})" if users else ""
        yield f"{netid:5} {s.state:10} {_count(s.recv_q):>6} {_count(s.send_q):>6} {ends}{owners}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _metrics(number: int) -> Source:
    def lines(snapshot: Snapshot) -> Iterator[str]:
        for scrape in snapshot.metrics[number : number + 1]:
            yield f"# port {scrape.port}, {scrape.t:.2f} s after the window began"
            yield from _samples(scrape)

    return lines


def _samples(scrape: MetricsScrape) -> Iterator[str]:
    for metric, by_engine in scrape.values.items():
        name, _, value_of_label = metric.partition(":")
        for engine, value in by_engine.items():
            labels = [f'{METRICS.engine_label}="{engine}"'] if engine else []
            labels += [f'{METRICS.split[name]}="{value_of_label}"'] if value_of_label and name in METRICS.split else []
            yield f"{METRICS.prefix}{name}{{{','.join(labels)}}} {value!r}"


def _http(snapshot: Snapshot) -> Iterator[str]:
    for p in snapshot.http:
        answer = f"{p.status}" if p.status is not None else p.error
        took = f" in {p.total_s * 1000:.0f} ms" if p.total_s is not None else ""
        yield f"GET http://localhost:{p.port}{p.path} -> {answer}{took}"


def _limits(snapshot: Snapshot) -> Iterator[str]:
    rows = {
        "Max processes": "nproc",
        "Max open files": "nofile",
        "Max locked memory": "memlock",
        "Max core file size": "core",
        "Max address space": "address_space",
    }
    for process in _members(snapshot):
        limits = known(process.limits)
        if limits is None:
            continue
        yield f"# /proc/{process.pid}/limits ({process.n_fds if process.n_fds is not None else '?'} descriptors open)"
        yield "Limit                     Soft Limit"
        for title, field in rows.items():
            value = getattr(limits, field)
            yield f"{title:25} {'unlimited' if value is None else value}"
        yield ""


def _environ(snapshot: Snapshot) -> Iterator[str]:
    for process in _members(snapshot):
        if process.environ:
            whole = "" if process.environ_complete else ", a part of it"
            yield f"# /proc/{process.pid}/environ{whole}; only variables that are known and hold no secret"
            yield from (f"{name}={value}" for name, value in sorted(process.environ.items()))
            yield ""


def _cgroups(snapshot: Snapshot) -> Iterator[str]:
    for process in _members(snapshot):
        group = known(process.cgroup)
        if group is not None:
            yield f"# control group of {process.pid}: {group.path} (v{group.version})"
            figures = ((name, value) for name, value in msgspec.structs.asdict(group).items() if value is not None)
            yield from (f"{name} {value}" for name, value in figures if name not in {"path", "version"})
            yield ""


def _shm(snapshot: Snapshot) -> Iterator[str]:
    for mount in snapshot.shm_mounts:
        yield f"# df: {mount.path} size {mount.size} free {mount.free} seen by {','.join(map(str, mount.pids)) or 'us'}"
    for s in snapshot.segments:
        held = ",".join(str(holder.pid) for holder in s.holders) or ("nobody" if s.holders_complete else "?")
        gone = " (deleted)" if s.deleted else ""
        yield f"{s.size:>12} {_count(s.resident):>12} {s.path}{gone}  held by {held}"


def _kernel(snapshot: Snapshot) -> Iterator[str]:
    for line in snapshot.kernel_lines:
        yield f"[{line.t:13.6f}] {line.text}" if line.t is not None else line.text


def _log(snapshot: Snapshot) -> Iterator[str]:
    file = ""
    for line in snapshot.log_lines:
        if line.file != file:
            file = line.file
            yield f"# {file}"
        yield line.text


def _missing(snapshot: Snapshot) -> Iterator[str]:
    for hole in dict.fromkeys((*snapshot.missing, *(hole for p in snapshot.processes for hole in p.missing))):
        yield f"{hole.what}: {hole.why}" + (f" (next: {hole.next})" if hole.next else "")


def _members(snapshot: Snapshot) -> Iterator[Process]:
    mine = set(snapshot.target_pids)
    return (p for p in snapshot.processes if p.pid in mine or not mine)


_FILES: dict[str, tuple[str, Source]] = {
    "ps.txt": ("processes, at the end of the window", _ps),
    "stacks.txt": ("Python stacks in the form of py-spy, at the start of the window", _stacks(0)),
    "stacks_t1.txt": ("the same at its end", _stacks(-1)),
    "ring.txt": ("flags of each ring at the end of the window: written, read by each reader", _rings),
    "ss.txt": ("sockets in the form of ss", _sockets),
    "shm.txt": ("/dev/shm of the target, and who holds what", _shm),
    "http.txt": ("what the HTTP port answered", _http),
    "metrics_t0.txt": ("samples of /metrics that show motion, first scrape", _metrics(0)),
    "metrics_t1.txt": ("the same, second scrape", _metrics(1)),
    "limits.txt": ("soft limits of each process", _limits),
    "cgroup.txt": ("limits of the control groups, and how often they bit", _cgroups),
    "environ.txt": ("environment of each process, by an allow-list", _environ),
    "dmesg.txt": ("lines of the kernel log that matter", _kernel),
    "log.txt": ("known lines of the logs", _log),
    "missing.txt": ("what could not be observed, and why", _missing),
}
"""File name -> what it holds, and what makes its lines."""
