"""What the rules look at: the scene, its rings, activities and motion worked out once; how a finding is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vllmdiag.model.base import Missing
from vllmdiag.model.diagnosis import Confidence, Finding, Link, Severity, Subject
from vllmdiag.vllm.instances import Member
from vllmdiag.vllm.stages import READY_ORDER, stage_of

from . import write
from .activity import DEAD, STOPPED, Activity, activity_of
from .motion import Progress, progress_of
from .rings import Ring, rings_of
from .scene import Scene
from .startup_motion import motion_of

_LOOP_FRAMES = ("run_busy_loop", "step", "step_with_batch_queue")


@dataclass(frozen=True, eq=False)
class Case:
    """The instance under judgement."""

    scene: Scene

    @property
    def window_s(self) -> float:
        """Length of the window, seconds."""
        return self.scene.snapshot.window_s

    @cached_property
    def acts(self) -> dict[int, Activity]:
        """What each member does."""
        return {m.pid: activity_of(self.scene.processes[m.pid], m, self.window_s) for m in self.scene.instance.members}

    @cached_property
    def rings(self) -> tuple[Ring, ...]:
        """Rings of the instance."""
        return rings_of(self.scene)

    @cached_property
    def progress(self) -> dict[int, Progress]:
        """Motion and outstanding work by EngineCore."""
        return {e.pid: progress_of(self.scene, e, self.rings, self.acts) for e in self.scene.engines}

    @cached_property
    def motion(self) -> dict[int, tuple[str, ...]]:
        """What shows that each member of a start-up advances, in words; empty where nothing does."""
        return motion_of(self.scene, self.acts, self.window_s)

    @cached_property
    def starting_motion(self) -> tuple[str, ...]:
        """Evidence that the start-up advances."""
        moving = [f"{self.label(pid)}: {', '.join(words)}" for pid, words in self.motion.items() if words]
        return (
            *moving,
            *(["messages move through the rings"] if any(r.sampled and r.moved for r in self.rings) else []),
        )

    def label(self, pid: int | None) -> str:
        """Role and rank as people write it."""
        return self.scene.subject(pid).label if pid is not None else "?"

    def dead(self, pid: int) -> bool:
        """The process has died."""
        return self.acts[pid].kind == DEAD

    def halted(self, pid: int) -> bool:
        """Dead or stopped: it cannot move whatever the others do."""
        return self.acts[pid].kind in (DEAD, STOPPED)

    def in_loop(self, engine: Member) -> bool:
        """The engine has finished its start-up: its main thread is inside the busy loop."""
        act = self.acts[engine.pid]
        if act.main is None:
            return False
        return any(frame.name.rsplit(".", 1)[-1] in _LOOP_FRAMES for stack in act.main.stacks for frame in stack.frames)

    @cached_property
    def listening(self) -> bool:
        """A server of the instance listens for HTTP, as far as its sockets or an answer show it."""
        scene = self.scene
        if any(probe.status is not None for probe in scene.probes):
            return True
        servers = {m.pid for m in scene.instance.of("APIServer", "Launcher")}
        bound = [s for s in scene.listeners if s.family != "unix" and s.port in scene.http_ports]
        return any(servers & set(s.pids) or (self.blind_to_servers and not s.pids) for s in bound)

    @cached_property
    def blind_to_servers(self) -> bool:
        """Which sockets a server has open is not known: that none of them listens is then no news of a start-up."""
        servers = [self.scene.processes[m.pid] for m in self.scene.servers]
        # One that has just begun has no socket yet: that is known where its descriptors were counted.
        return any(isinstance(p.socket_inodes, Missing) or (not p.socket_inodes and p.n_fds is None) for p in servers)

    @cached_property
    def starting(self) -> bool:
        """Not ready yet: no listener where one will be, or an engine that has not reached its loop."""
        scene = self.scene
        if scene.instance.orphaned:
            return False
        alive_engines = [e for e in scene.engines if not self.dead(e.pid)]
        if any(self.acts[m.pid].state == "wait_start" for m in scene.instance.of("APIServer", "Launcher")):
            return True
        by_port = scene.servers and scene.http_ports and scene.options is not None and not scene.options.uds
        if by_port and (self.listening or not self.blind_to_servers):
            return not self.listening and not any(self.halted(s.pid) for s in scene.servers)
        seen = [e for e in alive_engines if self.acts[e.pid].seen]
        if not alive_engines and scene.workers and scene.parents_unseen:
            return any(self._in_start_up(w) for w in scene.workers)
        if not alive_engines:
            fronts = scene.instance.of("APIServer") if scene.snapshot.pasted else ()
            waits = any(self._in_start_up(front) for front in fronts)
            return (waits or bool(scene.instance.of("Launcher", "Driver"))) and not scene.workers
        if scene.snapshot.pasted and not seen:
            return any(self._in_start_up(w) for w in scene.workers)
        return bool(seen) and any(not self.in_loop(e) for e in seen)

    def _in_start_up(self, member: Member) -> bool:
        """Its stack shows a stage of the start-up, where its engine is no part of the evidence."""
        main = self.acts[member.pid].main
        if main is None or any(f.name.rsplit(".", 1)[-1] == "worker_busy_loop" for f in main.frames):
            return False
        stage = stage_of(main.frames, member.role, self.scene.version)
        return stage is not None and stage.order < READY_ORDER

    # -- writing findings -------------------------------------------------------------------------------------------

    def finding(  # noqa: PLR0913  one keyword for each field of a Finding
        self,
        slug: str,
        subject: Subject | int,
        summary: str,
        *,
        evidence: Sequence[str] = (),
        chain: Sequence[Link] = (),
        confidence: Confidence = "high",
        severity: Severity | None = None,
        layer: int | None = None,
        since_s: float | None = None,
        **fill: str,
    ) -> Finding:
        """A finding of a cause of the catalogue, its next steps filled with the pids of this instance."""
        who = self.scene.subject(subject) if isinstance(subject, int) else subject
        return write.finding(
            slug,
            who,
            summary,
            evidence=evidence,
            chain=chain,
            confidence=confidence,
            severity=severity,
            layer=layer,
            since_s=since_s,
            words={"target": str(self.scene.instance.roots[0]), **fill},
        )

    def link(self, pid: int, doing: str | None = None) -> Link:
        """One step of a chain."""
        return Link(subject=self.scene.subject(pid), doing=self.acts[pid].doing if doing is None else doing)

    def chain(self, *pids: int, doing: dict[int, str] | None = None) -> tuple[Link, ...]:
        """client -> API server -> the given members, as far as there is a server."""
        words = doing or {}
        links = []
        server = self._server_before(pids)
        if server is not None or (pids and self.scene.members[pids[0]].role == "APIServer"):
            links.append(Link(subject=Subject(role="Client", label="client"), doing="waits for its answer"))
        if server is not None:
            links.append(self.link(server, words.get(server)))
        links += [self.link(pid, words.get(pid)) for pid in pids]
        return tuple(links)

    def _server_before(self, pids: Sequence[int]) -> int | None:
        """The API server (or script, or launcher) that the first of `pids` works for, if it is not one itself."""
        if not pids or self.scene.members[pids[0]].role in ("APIServer", "Driver", "Launcher"):
            return None
        engine = pids[0]
        fronts = self.scene.instance.of("APIServer") or self.scene.instance.of("Driver", "Launcher")
        connected = [m.pid for m in fronts if (m.pid, engine) in self.scene.connected and not self.dead(m.pid)]
        return next(iter(connected or [m.pid for m in fronts if not self.dead(m.pid)]), None)

    def since(self, pid: int) -> float | None:
        """For how long the member has not run, where the kernel tells."""
        return self.scene.processes[pid].last_ran_s
