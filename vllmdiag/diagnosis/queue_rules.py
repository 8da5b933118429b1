"""Layers 3 and 4: what holds up an engine whose work does not move. The waits are followed down to their root."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllmdiag.model.diagnosis import Finding
from vllmdiag.vllm.instances import Member
from vllmdiag.vllm.wakeup import recheck_s

from .activity import IDLE, UNINTERRUPTIBLE, Activity
from .case import Case
from .glimpse import AGAIN, glimpse
from .gpu_rules import held_up
from .process_rules import waiting_evidence
from .rings import Ring
from .scheduler_rules import grammar_findings, parked_words, scheduler_findings
from .thread_rules import thread_findings
from .waits import absent_from, broadcast_ring, laggards, path_to, unread_replies

_STARVED = 0.3
"""A main thread that stood in the run queue for this share of the window may be slow for that reason alone."""
_SHORT_OF_CPU = 0.1
"""The others, who wait for it, are then seen in their collective."""
_SHORTEST_LOOK_S = 0.8
_LONGEST_STEP_S = 2.0
"""Of a model on processors: nothing moves in the rings meanwhile."""
_WAITS = ("idle", "collective", "gpu_wait", "wait_response", "wait_readers", "wait_start")


def queue_findings(case: Case) -> Iterator[Finding]:
    """For each engine: its broken threads, else the root of what holds it up."""
    yield from grammar_findings(case)
    for engine in case.scene.engines:
        if case.halted(engine.pid):
            continue
        found = [*thread_findings(case, engine), *scheduler_findings(case, engine)]
        if not found and not case.starting:
            found.extend(_HeldUp(case, engine).findings())
        yield from found


@dataclass(frozen=True, eq=False)
class _HeldUp:
    """One engine, asked why it does not move."""

    case: Case
    engine: Member

    @property
    def act(self) -> Activity:
        return self.case.acts[self.engine.pid]

    @property
    def workers(self) -> tuple[Member, ...]:
        return self.case.scene.instance.workers_of(self.engine.pid)

    def doing(self, member: Member) -> str:
        act = self.case.acts[member.pid]
        return act.doing if act.seen else "not visible"

    def in_state(self, state: str) -> list[Member]:
        return [w for w in self.workers if self.case.acts[w.pid].state == state]

    def say(self, slug: str, root: Member, summary: str, evidence: Sequence[str] = (), **more: Any) -> Finding:
        """A finding whose evidence and chain lead from the engine to `root`."""
        return self.case.finding(
            slug,
            root.pid,
            summary,
            evidence=[*evidence, *self.case.progress[self.engine.pid].outstanding[:3]],
            chain=self.case.chain(*path_to(self.case, root.pid)),
            **more,
        )

    def undecided(self, layer: int, summary: str) -> Finding:
        """A stall whose cause the evidence does not decide: the layer, and what everybody does."""
        words = [f"{m.label}: {self.doing(m)}" for m in (self.engine, *self.workers)]
        return self.say("unknown", self.engine, summary, words, layer=layer, confidence="low")

    # -- from the engine down -----------------------------------------------------------------------------------------

    def findings(self) -> Iterator[Finding]:
        """The root of the stall; nothing for an engine that moves, or that has nothing to do."""
        if any(self.case.halted(w.pid) or self.case.acts[w.pid].kind == UNINTERRUPTIBLE for w in self.workers):
            return  # layer 1 has named the root
        progress = self.case.progress[self.engine.pid]
        ring = broadcast_ring(self.case, self.engine)
        full = ring is not None and ring.full  # in every look: that is no want of a processor
        if not full and (starved := self._kept_from_running()):
            if progress.frozen:
                yield self._starved(starved)
        elif self.act.kind == IDLE:
            if not progress.moved:
                yield from self._idle()
        elif progress.frozen and not full and self._too_short():
            summary = f"nothing moved in {self.case.window_s:.1f} s: too short a look to tell a step from a stall"
            yield self.say("busy", self.engine, summary, severity="info", confidence="low")
        elif progress.frozen:
            # A message that a sleeper has not taken explains what the others wait for, on the GPU too.
            asleep = any(self._asleep(worker) for worker, _ in laggards(self.case, self.engine))
            if not full and not asleep and glimpse(self.case):
                yield from self._one_look()
                return
            at_gpu = held_up(self.case, self.engine) if not asleep else None
            yield from [at_gpu] if at_gpu is not None else self._frozen()

    def _too_short(self) -> bool:
        """A live look shorter than steps often are."""
        return not self.case.scene.snapshot.pasted and 0 < self.case.window_s < _SHORTEST_LOOK_S

    def _one_look(self) -> Iterator[Finding]:
        """Pasted evidence of one moment: where to look, and no more, unless everybody waits for everybody."""
        if self.workers and len(self.in_state("idle")) == len(self.workers):
            yield self._all_idle()
            return
        busy = [w for w in self.workers if self._computes(w)]
        at_gpu = [*self.in_state("collective"), *self.in_state("gpu_wait")]
        if self.act.seen and self.act.state not in ("wait_response", "wait_readers", "wait_start"):
            summary = f"{self.engine.label} is {self.act.doing}; {AGAIN}"
            yield self.undecided(4 if self.act.state in ("collective", "gpu_wait") else 3, summary)
        else:
            who = busy or at_gpu or list(self.workers)
            doing = f": {who[0].label} {self.doing(who[0])}" if who else ""
            layer = 3 if busy or not at_gpu else 4
            yield self.undecided(layer, f"{self.engine.label} waits for its workers{doing}; {AGAIN}")

    def _frozen(self) -> Iterator[Finding]:
        ring = broadcast_ring(self.case, self.engine)
        behind = laggards(self.case, self.engine)
        asleep = [w for w, _ in behind if self._asleep(w)]
        busy = [w for w in self.workers if self._computes(w)]
        if ring is not None and ring.full and not asleep:
            yield self._ring_full(ring, behind)
        elif self.act.state == "collective":
            yield self.undecided(4, f"{self.engine.label} waits in {self.act.doing} for the other engines")
        elif self.act.state == "gpu_wait":
            yield self.undecided(4, f"{self.engine.label} waits for the GPU and nothing moves")
        elif self.act.seen and self.act.state not in _WAITS:
            yield from self._engine_computes()
        elif asleep:
            yield self._lost_wakeup(asleep[0])
        elif busy:
            yield self._busy(busy, {w.pid for w, _ in behind})
        elif cut := [w for w in self.workers if self._asleep(w) and self._unsent(w)]:
            summary = f"{self.engine.label} waits for {cut[0].label} (pid {cut[0].pid}), which nothing reaches"
            yield self.say("rank-never-answered", cut[0], summary, self._unsent(cut[0]), confidence="medium")
        elif unseen := [w for w in self.workers if not self.case.acts[w.pid].seen]:
            names = ", ".join(w.label for w in unseen)
            summary = f"{self.engine.label} waits for {names}, whose stacks cannot be read here"
            yield self.say("rank-never-answered", unseen[0], summary, confidence="low")
        elif inside := self.in_state("collective"):
            yield self._collective(inside)
        elif on_gpu := self.in_state("gpu_wait"):
            names = ", ".join(w.label for w in on_gpu)
            yield self.undecided(4, f"{names} wait for the GPU and nothing moves")
        elif self.workers and len(self.in_state("idle")) == len(self.workers):
            yield self._all_idle()
        else:
            yield self.undecided(3, "work is outstanding and nothing moved")

    def _computes(self, worker: Member) -> bool:
        """It is inside some call that is no known wait: Python, a compile, a load, a method of the user."""
        act = self.case.acts[worker.pid]
        return act.seen and act.state not in _WAITS

    def _asleep(self, worker: Member) -> bool:
        act = self.case.acts[worker.pid]
        return act.state == "idle" and not act.on_cpu

    def _kept_from_running(self) -> list[Member]:
        """Ranks that have something to do and stand in the queue for a processor.

        One that spins in a wait, or that is in the same call all the time, may stand there too: that excuses nothing.
        """
        behind = {worker.pid for worker, _ in laggards(self.case, self.engine)}
        acts = self.case.acts
        ranks = [w for w in self.workers if acts[w.pid].state == "collective" or w.pid in behind]
        return [w for w in ranks if acts[w.pid].starved >= _STARVED]

    def _starved(self, members: list[Member]) -> Finding:
        """They want to run and get no processor: that nothing moved proves nothing."""
        shares = [f"{m.label}: {self.case.acts[m.pid].starved:.0%} of the window" for m in members]
        names = ", ".join(m.label for m in members)
        summary = f"{names} stood in the queue for a processor: the host is short of CPU"
        return self.say("busy", members[0], summary, shares, severity="info", confidence="low")

    # -- the roots ----------------------------------------------------------------------------------------------------

    def _engine_computes(self) -> Iterator[Finding]:
        """EngineCore itself is inside a call: with no worker it runs the model, else it schedules."""
        words = f"{self.engine.label} (pid {self.engine.pid})"
        if not self.act.still:
            summary = f"{words} computes: {self.act.doing}"
            yield self.say("busy", self.engine, summary, severity="info", confidence="medium")
        elif self.workers:
            yield self.undecided(3, f"{words} is inside one call, {self.act.doing}, and nothing moves")
        else:
            summary = f"{words} is inside one call: {self.act.doing}"
            severity = "warning" if self.act.on_cpu else "critical"
            yield self.say("worker-busy", self.engine, summary, severity=severity)

    def _ring_full(self, ring: Ring, behind: list[tuple[Member, tuple[int, ...]]]) -> Finding:
        n = ring.geometry.chunks
        if not behind:
            summary = f"the broadcast ring is full ({n} of {n} slots); the reader that lags is not visible here"
            return self.say("ring-full-slow-reader", self.engine, summary, confidence="low")
        worker, slots = max(behind, key=lambda pair: len(pair[1]))
        act = self.case.acts[worker.pid]
        return self.say(
            "ring-full-slow-reader",
            worker,
            f"the broadcast ring is full: {worker.label} (pid {worker.pid}) reads nothing, {self.doing(worker)}",
            [
                f"{len(slots)} of {n} slots unread by {worker.label} in all of {ring.segment.polls} looks",
                f"{worker.label}: {self.doing(worker)}" + (", the same in every stack" if act.still else ""),
            ],
            confidence="high" if act.seen else "medium",
            since_s=ring.still_s or None,
        )

    def _lost_wakeup(self, worker: Member) -> Finding:
        slots = next(slots for w, slots in laggards(self.case, self.engine) if w is worker)
        version = self.case.scene.version
        recheck = recheck_s(version)
        ring = broadcast_ring(self.case, self.engine)
        still = ring.still_s if ring is not None and ring.still_s is not None else 0.0
        frame = self.case.acts[worker.pid].frame
        habit = f"looks again after {recheck:g} s" if recheck is not None else "never looks again"
        return self.say(
            "lost-wakeup",
            worker,
            f"a message is published and {worker.label} (pid {worker.pid}) sleeps on",
            [
                f"slot {_numbers(slots)} of the broadcast ring unread by {worker.label} in every look",
                f"{worker.label} sleeps in {frame.name if frame is not None else 'dequeue'} in every stack",
                f"vLLM {version or 'of unknown version'} {habit}" if version else "the version is not known",
            ],
            confidence="high" if recheck is None or still > recheck else "medium",
            since_s=still or None,
        )

    def _busy(self, busy: list[Member], behind: set[int]) -> Finding:
        # The one that holds the others up: behind in the ring first, then the one whose stack stands.
        worker = min(busy, key=lambda w: (w.pid not in behind, not self.case.acts[w.pid].still, w.pid))
        act = self.case.acts[worker.pid]
        stacks = len(act.main.stacks) if act.main is not None else 0
        words = [
            f"{worker.label}: {act.doing}",
            f"{'the same' if act.still else 'changing'} frames in {stacks} stacks, {act.cpu:.2f} cores",
            *waiting_evidence(self.case, worker),
            *(f"{w.label} is in a call too: {self.doing(w)}" for w in busy if w is not worker),
        ]
        name = f"{worker.label} (pid {worker.pid})"
        if not act.still:
            # It computes and its stack changes: a long step, not a stuck one.
            summary = f"{name} is in a long step: {act.doing}"
            return self.say("busy", worker, summary, words, severity="info", confidence="medium")
        summary = f"{name} is inside one call, {act.doing.removeprefix('in ')}; {self.engine.label} waits for it"
        return self.say("worker-busy", worker, summary, words, severity="warning" if act.wants_cpu else "critical")

    def _collective(self, inside: list[Member]) -> Finding:
        groups: dict[str, list[str]] = {}
        for worker in inside:
            groups.setdefault(self.doing(worker), []).append(worker.label)
        said = "; ".join(f"{', '.join(names)} in {op}" for op, names in sorted(groups.items()))
        words = [f"{w.label}: {self.doing(w)}" for w in self.workers]
        still = all(self.case.acts[w.pid].still for w in self.workers)
        if absent := absent_from(self.case, inside[0], self.workers):
            root = absent[0]
            ring = broadcast_ring(self.case, self.engine)
            summary = f"{said}; {root.label} (pid {root.pid}) is not in it: {self.doing(root)}"
            if ring is not None and root.pid not in ring.readers and self._asleep(root):
                # It reads over TCP and has no flag: whether the call ever reached it cannot be told from here.
                return self.say("rank-never-answered", root, summary, words, confidence="medium")
            return self.say("collective-divergence", root, summary, words, confidence="high" if still else "medium")
        if len(groups) > 1:
            fewest = min(groups.values(), key=len)
            root = next(w for w in inside if w.label in fewest)
            summary = f"ranks are in different collectives: {said}"
            return self.say("collective-divergence", root, summary, words, confidence="medium")
        if remote := self._remote_ranks():
            summary = f"all local ranks wait: {said}; {remote} ranks are on other nodes"
            return self.say("rank-never-answered", self.engine, summary, words, layer=4, confidence="medium")
        if self._may_be_a_step(inside):
            return self.say(
                "busy", inside[0], f"all ranks are in a step: {said}", words, severity="info", confidence="low"
            )
        return self.undecided(4, f"all ranks are in the same collective and it does not finish: {said}")

    def _may_be_a_step(self, inside: list[Member]) -> bool:
        """Ranks come from one collective to the next alike: seen in one for a moment, they may be well at work.

        Where one does not always get a processor, the others are seen in a collective whenever they wait for it.
        """
        if self.case.scene.snapshot.pasted:
            return False
        short_of_cpu = any(self.case.acts[w.pid].starved >= _SHORT_OF_CPU for w in inside)
        return short_of_cpu or self.case.window_s < _LONGEST_STEP_S

    def _unsent(self, root: Member) -> list[str]:
        """What the engine has sent over TCP to a rank, and the other end has not acknowledged in the whole window."""
        sockets = self.case.scene.snapshot.sockets
        far_ends = {s.local for s in sockets if s.family != "unix" and root.pid in s.pids}
        return [
            f"{s.samples[-1].send_q} B of {self.engine.label} to {root.label} ({s.remote}) not acknowledged in any of"
            f" {len(s.samples)} samples"
            for s in sockets
            if s.remote in far_ends
            and self.engine.pid in s.pids
            and len(s.samples) >= 2
            and all(x.send_q > 0 for x in s.samples)
        ]

    def _remote_ranks(self) -> int:
        options = self.case.scene.options
        return max(0, options.world_size - len(self.workers)) if options is not None and options.nnodes > 1 else 0

    def _all_idle(self) -> Finding:
        """The engine waits for a reply, and every worker of this machine waits for a command."""
        name = f"{self.engine.label} (pid {self.engine.pid})"
        if replies := unread_replies(self.case, self.engine):
            writer, slots = replies[0]
            summary = f"a reply of {writer.label if writer else 'a worker'} is published and {name} sleeps on"
            words = [f"response ring: slot {_numbers(slots)} unread in every look"]
            return self.say("lost-wakeup", self.engine, summary, words, confidence="medium")
        if remote := self._remote_ranks():
            summary = f"every rank of this node is idle; {name} waits for {remote} ranks on other nodes"
            return self.say("rank-never-answered", self.engine, summary, confidence="medium")
        if self.act.state == "wait_response" and self.case.rings and not laggards(self.case, self.engine):
            summary = f"{name} waits for a reply, all {len(self.workers)} workers are idle and every ring is read"
            words = [f"{w.label}: {self.doing(w)}" for w in self.workers]
            sure = "high" if self.act.still else "medium"
            return self.say("lost-message", self.engine, summary, words, confidence=sure)
        return self.undecided(3, "engine and workers wait for each other")

    # -- an engine that is idle although something waits --------------------------------------------------------------

    def _idle(self) -> Iterator[Finding]:
        replies = unread_replies(self.case, self.engine)
        behind = laggards(self.case, self.engine)
        if replies:
            yield self._skew(replies)
        elif behind:
            yield self._unread_command(behind[0][0])
        elif words := parked_words(self.case, self.engine):
            summary = f"{self.engine.label} (pid {self.engine.pid}) is idle although requests are unfinished"
            yield self.say("wait-remote-kv", self.engine, summary, words, confidence="medium")

    def _skew(self, replies: list[tuple[Member | None, tuple[int, ...]]]) -> Finding:
        writer = replies[0][0]
        n = sum(len(slots) for _, slots in replies)
        whose = writer.label if writer else "a worker"
        return self.say(
            "response-skew",
            writer or self.engine,
            f"{n} {'reply lies' if n == 1 else 'replies lie'} unread in the response ring of {whose}"
            f" while {self.engine.label} is idle: the next call takes the first for its own",
            [
                *(
                    f"response ring of {w.label if w else '?'}: slot {_numbers(s)} unread in every look"
                    for w, s in replies
                ),
                f"{self.engine.label}: {self.act.doing} in every stack",
            ],
        )

    def _unread_command(self, worker: Member) -> Finding:
        """A call that the engine has given up, or does not wait for, and that a worker has not taken."""
        if self._asleep(worker):
            return self._lost_wakeup(worker)
        if (at_gpu := held_up(self.case, self.engine)) is not None:
            return at_gpu
        if self._computes(worker):
            return self._busy([worker], {worker.pid})
        if inside := self.in_state("collective"):
            return self._collective(inside)
        return self.undecided(3, f"{worker.label} does not read its messages: {self.doing(worker)}")


def _numbers(slots: Sequence[int]) -> str:
    return ",".join(map(str, slots))
