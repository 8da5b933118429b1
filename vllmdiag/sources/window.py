"""One window over one instance: every source at its pace, into a Snapshot. Read-only; see DESIGN.md, "Do no harm"."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone

import msgspec

from vllmdiag import __version__
from vllmdiag.model.base import Missing
from vllmdiag.model.http import HttpProbe, MetricsScrape
from vllmdiag.model.process import Process, ProcessSample, StackDump, Thread, ThreadSample
from vllmdiag.model.shm import PeekedSlot, Segment
from vllmdiag.model.snapshot import KernelLine, Snapshot, SourceCost
from vllmdiag.model.sockets import Socket
from vllmdiag.vllm.instances import Instance, find_instances
from vllmdiag.vllm.layouts import Layout, candidates
from vllmdiag.vllm.settings import ENVIRON_ALLOWED
from vllmdiag.vllm.slots import method_of

from . import cgroups, http, kmsg, observe, proc, rings, shm, viewer
from .aside import Aside
from .gpu_layer import GpuLayer
from .httpclient import Endpoint
from .logs import LogWatch
from .socket_files import missing_ipc_paths, stale_ipc_paths
from .sockets import SocketWatch
from .stacks import StackSampler
from .surroundings import Surroundings, beside_its_own, serves, surroundings, with_files

_STATE_PERIOD_S = 0.1
"""How often states are read: the order in which processes die is evidence."""
_ASIDE = ("Helper", "ResourceTracker")
_HTTP_DEADLINE_S = 2.5
_KERNEL_LOG_S = 3600.0
_PEEK_BYTES = 512
_STACK_DEADLINE_S = 5.0
_GRACE_S = 2.0
"""How long after the window the answers to what was asked within it may still come."""
_ABANDON_S = 0.3

Progress = Callable[[str], None]


def now() -> str:
    """The time in RFC 3339, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Window:
    """The state of one run: created, run once, thrown away."""

    def __init__(
        self,
        instance: Instance,
        processes: list[Process],
        others: set[int],
        began: float,
        window_s: float,
        depth: str,
        progress: Progress,
        root: str,
    ) -> None:
        by_pid = {p.pid: p for p in processes}
        self.root, self.window_s, self.depth, self.say = root, window_s, depth, progress
        self.instance = instance
        self.core = [by_pid[m.pid] for m in instance.members if m.role not in _ASIDE]
        self.aside = [by_pid[m.pid] for m in instance.members if m.role in _ASIDE and not _ours(by_pid[m.pid])]
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
        self.t0 = began
        self.cpu_before = viewer.cpu_times(root)
        self.closing_s = 2 * (time.monotonic() - began)
        """How long the closing looks may take: they are another scan, and as much again."""
        self.over = threading.Event()
        """Set when nobody waits for the result any more."""

    @contextmanager
    def _cost(self, source: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.costs.append(SourceCost(source=source, wall_s=round(time.monotonic() - start, 4)))

    def _t(self) -> float:
        return time.monotonic() - self.t0

    def run(self, meanwhile: Callable[[], None]) -> Snapshot:
        """Sample for the window, then put everything together. Whatever happens, nothing is left running or open."""
        with ExitStack() as cleanup:
            return self._run(meanwhile, cleanup)

    def _run(self, meanwhile: Callable[[], None], cleanup: ExitStack) -> Snapshot:
        pids = [p.pid for p in self.core]
        self.say(f"watching {len(pids)} processes for {round(self.window_s, 1):g} s")
        asides = []
        if self._wants("stacks", "diagnose", "ps", "gpu"):
            sampler = StackSampler(pids, _STACK_DEADLINE_S)
            asides.append(Aside(lambda: self._dump_stacks(sampler)))
            cleanup.callback(asides[0].abandon, _ABANDON_S)
            cleanup.callback(sampler.stop)
        cleanup.callback(self.over.set)  # the last registered is the first called: then all of them hurry
        logs = self._logs(cleanup)
        self._sample_states()
        self._sample_threads()
        with self._cost("processes"):
            deep = self._wants("ps", "shm", "diagnose")
            observed = observe.observe_all(self.core, self.root, allowed=ENVIRON_ALLOWED, deep=deep)
        with self._cost("sockets"):
            sockets = SocketWatch(pids, self.root, ports=self._http_ports())
            cleanup.callback(sockets.close)
            sockets.sample(self._t())
        with self._cost("shared memory"):
            segments = shm.segments(observed, self.root)
            mine = [s for s in segments if any(h.pid in self.samples for h in s.holders)]
            poller = rings.RingPoller(mine, self.root, t0=self.t0).start()
            cleanup.callback(poller.stop)
        layer = self._gpu_layer(observed, sockets)
        cleanup.callback(layer.close)
        asides += [Aside(work) for work in layer.works()]
        endpoint = self._endpoint(observed, sockets)
        if endpoint is not None and self._wants("client", "diagnose", "ps"):
            asides.append(Aside(lambda: self._ask_http(endpoint)))
        observed, around = self._around(observed, sockets.result()[0])
        with self._cost("window"):
            meanwhile()
            self._watch(sockets)
        # The closing looks begin so early that they end with the window, as the last dump of the stacks does.
        sockets.sample(self._t())
        self._sample_threads()
        born = self._born()
        kernel = self._kernel_lines()
        time.sleep(max(0.0, self.window_s - self._t()))
        polled = {s.key: s for s in poller.stop()}
        for aside in asides:
            aside.join()
        self._sample_states()
        seen, holes = sockets.result()
        self.missing += holes
        processes = [*map(self._finish, observed), *born]
        with self._cost("logs"):
            said = logs.read()
        shown = self._snapshot(processes, [polled.get(s.key, s) for s in segments], seen, kernel)
        stale = stale_ipc_paths(seen, sockets.bound_paths, self.root)
        shown = msgspec.structs.replace(shown, ipc_paths_stale=stale)
        return said.add_to(around.add_to(layer.add_to(shown)))

    def _logs(self, cleanup: ExitStack) -> LogWatch:
        """The logs that the members write to; of nobody where the verb does not ask for them."""
        logs = LogWatch(self.core if self._wants("diagnose", "ps") else (), self.root)
        cleanup.callback(logs.close)
        return logs

    def _around(self, observed: list[Process], bound: tuple[Socket, ...]) -> tuple[list[Process], Surroundings]:
        """The processes and what stands around them: much during a start-up, nearly nothing once it serves."""
        if not self._wants("diagnose", "ps"):
            return observed, Surroundings()
        if serves(self.instance, bound):
            return observed, beside_its_own(observed, self.instance, bound, self.root)
        with self._cost("start-up"):
            observed = [with_files(p, self.root) for p in observed]
            return observed, surroundings(observed, self.instance, self.root)

    def _gpu_layer(self, observed: list[Process], sockets: SocketWatch) -> GpuLayer:
        """The GPU layer of the members that may use one; of nobody where the verb does not ask for it."""
        asked = self._wants("diagnose", "gpu")
        users = {m.pid for m in self.instance.of("Worker", "RayWorker", "EngineCore", "Driver")} if asked else set()
        return GpuLayer(
            observed,
            users,
            sockets.result()[0],
            self._t,
            self.window_s,
            self.over,
            thorough=self.depth == "gpu",
            root=self.root,
        )

    def _kernel_lines(self) -> tuple[KernelLine, ...]:
        lines = kmsg.kernel_lines(self.root, _KERNEL_LOG_S) if self._wants("diagnose", "gpu") else ()
        if isinstance(lines, Missing):
            self.missing.append(lines)
            return ()
        return lines

    def _wants(self, *verbs: str) -> bool:
        return self.depth in verbs

    def _http_ports(self) -> tuple[int, ...]:
        options = self.instance.options
        return (options.port,) if options is not None and not options.headless else ()

    def _watch(self, sockets: SocketWatch) -> None:
        half = False
        end = self.window_s - self.closing_s
        while (left := end - self._t()) > 0:
            time.sleep(min(_STATE_PERIOD_S, left))
            self._sample_states()
            if not half and self._t() >= self.window_s / 2:
                half = True
                sockets.sample(self._t())
                self._sample_threads()

    def _sample_states(self) -> None:
        for process in self.core:
            self.samples[process.pid].append(proc.sample(process.pid, process.starttime, self._t(), self.root))

    def _sample_threads(self) -> None:
        for process in self.core:
            known = self.threads[process.pid]
            for tid, (name, sample) in proc.sample_threads(process.pid, self._t(), self.root).items():
                known.setdefault(tid, (name, []))[1].append(sample)

    def _dump_stacks(self, sampler: StackSampler) -> None:
        """One dump at once and one that ends with the window, and one between where there is time for it."""
        took = 0.0
        for share in (0.0, 0.5, 1.0):
            begin = max(self._t(), self.window_s * share - (took if share == 1.0 else 0.0))
            too_late = self.window_s - took if share == 0.5 else self.window_s + _GRACE_S
            if share and begin + took > too_late:
                continue
            if self.over.wait(begin - self._t()):
                return
            start = self._t()
            patience = min(_STACK_DEADLINE_S, self.window_s + _GRACE_S - start)
            for process, dump in zip(self.core, sampler.dump(start, patience).values(), strict=True):
                self.dumps[process.pid].append(self._of_the_same(process, dump))
            took = max(took, self._t() - start)
        dumps = max(map(len, self.dumps.values()))
        note = f"{len(self.dumps)} processes, {dumps} dumps"
        self.costs.append(SourceCost(source="stacks", wall_s=round(took * dumps, 4), note=note))

    def _of_the_same(self, process: Process, dump: StackDump) -> StackDump:
        """Where the process has ended, its pid may have been given to another one before its stacks were read."""
        if proc.sample(process.pid, process.starttime, 0.0, self.root).state:
            return dump
        hole = Missing(what=f"stacks of pid {process.pid}", why="the process has ended", next="look again")
        return msgspec.structs.replace(dump, threads=hole)

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
        start = self._t()
        self._probe(endpoint, "/health")
        if self.probes[-1].status is not None:
            self._probe(endpoint, "/version")
            # Both scrapes lie within the window, as far apart as it allows. One that failed is not asked for again.
            if self._scrape(endpoint) and not self.over.wait(max(0.0, self.window_s - 2 * self._t() + start)):
                self._scrape(endpoint)
        self.costs.append(SourceCost(source="http", wall_s=round(self._t() - start, 4)))

    def _patience(self) -> float:
        """Seconds for one GET: what is left of the window, but enough for a busy machine."""
        return min(_HTTP_DEADLINE_S, max(1.0, self.window_s - self._t()))

    def _probe(self, endpoint: Endpoint, path: str) -> None:
        self.probes.append(http.probe(endpoint, path, deadline_s=self._patience(), t=self._t()))

    def _scrape(self, endpoint: Endpoint) -> bool:
        found = http.scrape(endpoint, deadline_s=self._patience(), t=self._t())
        if isinstance(found, Missing):
            self.missing.append(found)
            return False
        self.scrapes.append(found)
        return True

    def _snapshot(
        self,
        processes: list[Process],
        segments: list[Segment],
        sockets: tuple[Socket, ...],
        kernel: tuple[KernelLine, ...],
    ) -> Snapshot:
        return Snapshot(
            tool=__version__,
            observed_at=now(),
            window_s=round(self._t(), 3),
            viewer=viewer.viewer(self.root, {p.uid for p in self.core}),
            node=viewer.node(self.root, self.cpu_before),
            target_pids=tuple(self.samples),
            processes=(*processes, *(self._looked_twice(p) for p in self.aside), *self.context),
            segments=tuple(self._with_heads(s) for s in segments),
            shm_mounts=tuple(shm.mounts(processes, self.root)),
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
        return [p for p in processes if p.pid in now.pids and (p.pid, p.starttime) not in before and not _ours(p)]

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


def _ours(process: Process) -> bool:
    """Ourselves or a child of ours: where the server itself has started us, that is no sign of life of it."""
    return os.getpid() in (process.pid, process.ppid)


def _words(process: Process) -> Iterable[str]:
    return () if isinstance(process.cmdline, Missing) else process.cmdline
