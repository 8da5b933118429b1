"""One window over one instance: every source at its pace, into a Snapshot. Read-only; see DESIGN.md, "Do no harm"."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone

import msgspec

from vllmdiag import __version__
from vllmdiag.model.base import Missing
from vllmdiag.model.http import HttpProbe, MetricsScrape
from vllmdiag.model.process import Process, ProcessSample, StackDump, Thread, ThreadSample
from vllmdiag.model.shm import PeekedSlot, Segment
from vllmdiag.model.snapshot import Snapshot, SourceCost
from vllmdiag.model.sockets import Socket
from vllmdiag.model.view import InstanceLine
from vllmdiag.vllm.instances import Instance, find_instances
from vllmdiag.vllm.layouts import Layout, candidates, classify_file
from vllmdiag.vllm.settings import ENVIRON_ALLOWED
from vllmdiag.vllm.slots import method_of

from . import cgroups, http, kmsg, observe, proc, rings, shm, target, viewer
from .httpclient import Endpoint
from .sockets import SocketWatch, missing_ipc_paths
from .stacks import StackSampler

_STATE_PERIOD_S = 0.1
"""How often states are read: the order in which processes die is evidence."""
_ASIDE = ("Helper", "ResourceTracker")
_HTTP_DEADLINE_S = 2.5
_KERNEL_LOG_S = 3600.0
_PEEK_BYTES = 512
_STACK_DEADLINE_S = 5.0

Progress = Callable[[str], None]


def list_instances(root: str = "/") -> tuple[InstanceLine, ...]:
    """The instances of this host, one line each."""
    processes, instances = target.running(root)
    return target.lines(instances, processes)


def collect(
    pid: int | None = None,
    port: int | None = None,
    window_s: float = 3.0,
    depth: str = "diagnose",
    progress: Progress = lambda _: None,
    root: str = "/",
) -> Snapshot:
    """Watch one instance for `window_s` seconds.

    Args:
        pid: any process of the instance; None for the only one.
        port: its HTTP port, instead of a pid.
        window_s: seconds from the first to the last sample.
        depth: the verb; ``ps``, ``shm`` and ``endpoints`` leave out what they do not show.
        progress: told in a few words what is going on.
        root: where /proc is looked up.

    Raises:
        TargetError: no such instance, or several and none named.
    """
    progress("looking for vLLM")
    processes, instances = target.running(root)
    instance = target.choose(instances, processes, pid, port)
    if instance is None:
        seen = collect_host(root)
        if not any(_left_behind(s) for s in seen.segments):
            raise target.nothing_found(root)
        return seen
    others = {p for i in instances if i is not instance for p in i.pids}
    return _Window(instance, processes, others, window_s, depth, progress, root).run()


def collect_host(root: str = "/") -> Snapshot:
    """The shared memory of this machine without an instance: what dead servers left behind."""
    looker = viewer.viewer(root)
    here = [observe.observe(p, root) for p in proc.scan(root) if p.pid == looker.pid]
    return Snapshot(
        tool=__version__,
        observed_at=_now(),
        viewer=looker,
        node=viewer.node(root),
        segments=tuple(shm.segments(here, root)),
        shm_mounts=tuple(shm.mounts(here, root)),
    )


def _left_behind(segment: Segment) -> bool:
    """A ring that nobody holds: only a server that did not end cleanly leaves one."""
    return not segment.holders and classify_file(segment.name, segment.size).ring


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Window:
    """The state of one run: created, run once, thrown away."""

    def __init__(
        self,
        instance: Instance,
        processes: list[Process],
        others: set[int],
        window_s: float,
        depth: str,
        progress: Progress,
        root: str,
    ) -> None:
        by_pid = {p.pid: p for p in processes}
        self.root, self.window_s, self.depth, self.say = root, window_s, depth, progress
        self.instance = instance
        self.core = [by_pid[m.pid] for m in instance.members if m.role not in _ASIDE]
        self.aside = [by_pid[m.pid] for m in instance.members if m.role in _ASIDE]
        self.context = [by_pid[p] for p in others] + [
            by_pid[ppid] for ppid in {by_pid[r].ppid for r in instance.roots} if ppid in by_pid and ppid not in others
        ]
        self.costs: list[SourceCost] = []
        self.missing: list[Missing] = []
        self.samples: dict[int, list[ProcessSample]] = {p.pid: [] for p in self.core}
        self.threads: dict[int, dict[int, tuple[str, list[ThreadSample]]]] = {p.pid: {} for p in self.core}
        self.dumps: dict[int, list[StackDump]] = {p.pid: [] for p in self.core}
        self.probes: list[HttpProbe] = []
        self.scrapes: list[MetricsScrape] = []
        self.t0 = time.monotonic()

    @contextmanager
    def _cost(self, source: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.costs.append(SourceCost(source=source, wall_s=round(time.monotonic() - start, 4)))

    def _t(self) -> float:
        return time.monotonic() - self.t0

    def run(self) -> Snapshot:
        """Sample for the window, then put everything together."""
        pids = [p.pid for p in self.core]
        self.say(f"watching {len(pids)} processes for {self.window_s:g} s")
        stacks = _Aside(self._dump_stacks, pids) if self._wants("stacks", "diagnose", "ps") else None
        self._sample_states(threads=True)
        with self._cost("processes"):
            deep = self._wants("ps", "shm", "diagnose")
            observed = observe.observe_all(self.core, self.root, allowed=ENVIRON_ALLOWED, deep=deep)
        with self._cost("sockets"):
            sockets = SocketWatch(pids, self.root, ports=self._http_ports())
            sockets.sample(self._t())
        with self._cost("shared memory"):
            segments = shm.segments(observed, self.root)
            mine = [s for s in segments if any(h.pid in self.samples for h in s.holders)]
            poller = rings.RingPoller(mine, self.root, t0=self.t0).start()
        endpoint = self._endpoint(observed, sockets)
        web = _Aside(self._ask_http, endpoint) if endpoint and self._wants("client", "diagnose", "ps") else None
        with self._cost("window"):
            self._watch(sockets)
        polled = {s.key: s for s in poller.stop()}
        for aside in (stacks, web):
            if aside is not None:
                aside.join()
        sockets.sample(self._t())
        self._sample_states(threads=True)
        seen, holes = sockets.result()
        sockets.close()
        self.missing += holes
        return self._snapshot(observed, [polled.get(s.key, s) for s in segments], seen)

    def _wants(self, *verbs: str) -> bool:
        return self.depth in verbs

    def _http_ports(self) -> tuple[int, ...]:
        options = self.instance.options
        return (options.port,) if options is not None and not options.headless else ()

    def _watch(self, sockets: SocketWatch) -> None:
        half = False
        while (left := self.window_s - self._t()) > 0:
            time.sleep(min(_STATE_PERIOD_S, left))
            self._sample_states(threads=False)
            if not half and self._t() >= self.window_s / 2:
                half = True
                sockets.sample(self._t())
                self._sample_threads()

    def _sample_states(self, *, threads: bool) -> None:
        for process in self.core:
            self.samples[process.pid].append(proc.sample(process.pid, process.starttime, self._t(), self.root))
        if threads:
            self._sample_threads()

    def _sample_threads(self) -> None:
        for process in self.core:
            known = self.threads[process.pid]
            for tid, (name, sample) in proc.sample_threads(process.pid, self._t(), self.root).items():
                known.setdefault(tid, (name, []))[1].append(sample)

    def _dump_stacks(self, pids: list[int]) -> None:
        """Three dumps over the window; the last one begins early enough to end with it."""
        sampler = StackSampler(pids, _STACK_DEADLINE_S)
        took = 0.0
        for share in (0.0, 0.5, 1.0):
            begin = self.window_s * share - (took if share == 1.0 else 0.0)
            time.sleep(max(0.0, begin - self._t()))
            start = self._t()
            for pid, dump in sampler.dump(start).items():
                self.dumps[pid].append(dump)
            took = max(took, self._t() - start)
        self.costs.append(
            SourceCost(source="stacks", wall_s=round(took * 3, 4), note=f"{len(pids)} processes, 3 dumps")
        )

    def _endpoint(self, observed: list[Process], sockets: SocketWatch) -> Endpoint | None:
        """Where to ask for HTTP: only what a member of the instance listens on, or what cannot be told."""
        options = self.instance.options
        servers = {m.pid for m in self.instance.of("APIServer", "Launcher")}
        if options is None or options.headless or not servers:
            return None
        server = next(p for p in observed if p.pid in servers)
        tls = any(a.startswith(("--ssl-keyfile", "--ssl-certfile")) for a in _words(server))
        if options.uds:
            return Endpoint(port=options.port, uds=options.uds, pid=server.pid, tls=tls)
        if isinstance(server.socket_inodes, Missing):
            return Endpoint(port=options.port, pid=server.pid, tls=tls)
        bound = [s for s in sockets.result()[0] if s.state == "LISTEN" and s.family != "unix" and servers & set(s.pids)]
        # --host may be a name, and DNS knows no deadline: the address is the one the socket is bound to.
        hosts = [s.local.rpartition(":")[0].strip("[]") for s in bound if s.port == options.port]
        return Endpoint(port=options.port, host=hosts[0].replace("*", ""), pid=server.pid, tls=tls) if hosts else None

    def _ask_http(self, endpoint: Endpoint) -> None:
        start = time.monotonic()
        deadline = min(_HTTP_DEADLINE_S, max(0.5, self.window_s * 0.8))
        self.probes.append(http.probe(endpoint, "/health", deadline_s=deadline, t=self._t()))
        if self.probes[-1].status is not None:
            self._scrape(endpoint, deadline)
            self.probes.append(http.probe(endpoint, "/version", deadline_s=deadline, t=self._t()))
            # Both scrapes lie within the window, as far apart as it allows.
            time.sleep(max(0.0, self.window_s - self._t() - (time.monotonic() - start)))
            self._scrape(endpoint, max(0.5, min(deadline, self.window_s - self._t())))
        self.costs.append(SourceCost(source="http", wall_s=round(time.monotonic() - start, 4)))

    def _scrape(self, endpoint: Endpoint, deadline: float) -> None:
        found = http.scrape(endpoint, deadline_s=deadline, t=self._t())
        if isinstance(found, Missing):
            self.missing.append(found)
        else:
            self.scrapes.append(found)

    def _snapshot(self, observed: list[Process], segments: list[Segment], sockets: tuple[Socket, ...]) -> Snapshot:
        end = self._t()
        looker = viewer.viewer(self.root, {p.uid for p in observed})
        kernel = kmsg.kernel_lines(self.root, _KERNEL_LOG_S) if self._wants("diagnose") else ()
        if isinstance(kernel, Missing):
            self.missing.append(kernel)
            kernel = ()
        finished = [self._finish(p) for p in observed]
        born = self._born()
        mine = tuple(self.samples)
        return Snapshot(
            tool=__version__,
            observed_at=_now(),
            window_s=round(end, 3),
            viewer=looker,
            node=viewer.node(self.root),
            target_pids=mine,
            processes=(*finished, *born, *(self._looked_twice(p) for p in self.aside), *self.context),
            segments=tuple(self._with_heads(s) for s in segments),
            shm_mounts=tuple(shm.mounts(observed, self.root)),
            sockets=sockets,
            http=tuple(self.probes),
            metrics=tuple(self.scrapes),
            kernel_lines=kernel,
            ipc_paths_missing=missing_ipc_paths(sockets, self.root),
            missing=tuple(self.missing),
            costs=tuple(self.costs),
        )

    def _finish(self, process: Process) -> Process:
        threads = tuple(
            Thread(tid=tid, name=name, samples=tuple(samples))
            for tid, (name, samples) in sorted(self.threads[process.pid].items())
        )
        dumps = self.dumps[process.pid]
        holes = {d.threads for d in dumps if isinstance(d.threads, Missing)}
        return msgspec.structs.replace(
            process,
            samples=tuple(self.samples[process.pid]),
            threads=threads,
            stacks=tuple(dumps),
            cgroup=cgroups.cgroup_of(process.pid, self.root) if self.samples[process.pid][-1].state else None,
            last_ran_s=observe.last_ran(process.pid, self.root),
            missing=(*process.missing, *sorted(holes))
            if holes and all(isinstance(d.threads, Missing) for d in dumps)
            else process.missing,
        )

    def _looked_twice(self, process: Process) -> Process:
        """A helper (a compiler, say) with its CPU over the window: that it works is motion of a start-up."""
        return msgspec.structs.replace(
            process, samples=(*process.samples, proc.sample(process.pid, process.starttime, self._t(), self.root))
        )

    def _born(self) -> list[Process]:
        """Members that appeared within the window: a start-up that advances."""
        before = {(p.pid, p.starttime) for p in [*self.core, *self.aside, *self.context]}
        processes = proc.scan(self.root)
        now = next((i for i in find_instances(processes) if set(self.samples) & set(i.pids)), None)
        if now is None:
            return []
        return [
            p
            for p in processes
            if p.pid in now.pids and p.pid not in self.samples and (p.pid, p.starttime) not in before
        ]

    def _with_heads(self, segment: Segment) -> Segment:
        """Overflow marks and lengths of the slots, under each geometry that the size allows."""
        if not segment.polls:
            return segment
        layouts = candidates(segment.size)
        shapes = dict.fromkeys((c.chunks, c.chunk_bytes) for c in layouts[:2])
        try:
            heads = rings.read_heads(segment, shapes, self.root)
            peeked = self._peek(segment, layouts[0]) if self._wants("peek") and layouts else ()
            return msgspec.structs.replace(segment, heads=heads, peeked=peeked)
        except OSError as error:
            hole = Missing(what=f"slots of {segment.name}", why=str(error), next="run again")
            return msgspec.structs.replace(segment, missing=(*segment.missing, hole))

    def _peek(self, segment: Segment, layout: Layout) -> tuple[PeekedSlot, ...]:
        """The method in each slot of a broadcast ring. The bytes, which hold prompts, end with this function."""
        if layout.queue != "broadcast":
            return ()
        found = []
        for slot in range(layout.chunks):
            data = rings.read_slot(segment, layout.chunk_bytes, slot, limit=_PEEK_BYTES, root=self.root)
            method, length, overflow = method_of(data)
            found.append(PeekedSlot(slot=slot, method=method, length=length, overflow=overflow))
        return tuple(found)


def _words(process: Process) -> Iterable[str]:
    return () if isinstance(process.cmdline, Missing) else process.cmdline


class _Aside:
    """A thread whose exception is not lost."""

    def __init__(self, work: Callable[..., None], *args: object) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work, args), name="vllmdiag", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[..., None], args: tuple[object, ...]) -> None:
        try:
            work(*args)
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits for the result
            self._error = error

    def join(self) -> None:
        """Wait for the end; raises what the work raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
