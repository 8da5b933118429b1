"""One server from the first look to its end: rounds, looks where something is odd, captures, events."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.diagnosis.view import live_view
from vllmdiag.model.diagnosis import Verdict
from vllmdiag.model.errors import VllmdiagError
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.view import InstanceView, RingView
from vllmdiag.model.watch import EventKind, Frame
from vllmdiag.render.live import title
from vllmdiag.sources.window import now

from .budget import Budget
from .evidence import Commands, Evidence
from .frames import standing
from .look import Looked, Looks
from .outlet import Outlet
from .sampler import Sampler
from .trigger import Reason, Signs, Trigger, signs_of

_SHARE = 0.02
"""Of one core, for close looks; sampling takes about as much again."""
_SOON_S = 4.0
"""While a server starts, its members and rings are looked for this often, as far as the budget allows."""
_REFRESH_S = 60.0
"""What changes slowly (sockets, what each member does) is seen anew this often; for a terminal more often."""
_REFRESH_SHOWN_S = 20.0
_PAST_ROUNDS = 3
"""Rounds before a capture that go into the bundle."""
_SHORT_WINDOW_S = 1.0
_ROUNDS_A_SEARCH = 5
_GONE = ("", "Z", "X")
_KIND: dict[Reason, EventKind] = {"died": "died", "long-wait": "long-wait", "stall": "stall", "still": "stall"}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks of `watch`."""

    hz: float = 100.0
    stall_s: float = 10.0
    round_s: float = 1.0
    status_s: float = 10.0
    """How often a ``status`` event is given."""
    window_s: float | None = None
    """Window of a close look; None: as long as there is time for."""
    logs: tuple[str, ...] = ()


class Generation:
    """The watching of one server.

    Args:
        plan: how.
        first: a look at it.
        evidence: where bundles go.
        commands: what is run when one was captured.
        outlet: is told everything.
        replaced: whether another server has taken the place of the one with these pids; asked when its first process
            has gone, for the others may live on as orphans.
        stop: ends the watching within a moment.
    """

    def __init__(
        self,
        plan: Plan,
        first: Looked,
        evidence: Evidence,
        commands: Commands,
        outlet: Outlet,
        replaced: Callable[[tuple[int, ...]], bool],
        stop: threading.Event,
    ) -> None:
        self._plan, self._evidence, self._commands = plan, evidence, commands
        self._replaced, self._rounds = replaced, 0
        self._head = first.snapshot.target_pids[0]
        self._outlet, self._stop = outlet, stop
        self._budget = Budget(_SHARE)
        self._looks = Looks(self._budget)
        self._trigger = Trigger(plan.stall_s)
        self._sampler = Sampler(first.snapshot, plan.hz, plan.logs)
        self._seen = first
        self._seen_at = 0.0
        self._at = now()
        self._began = time.monotonic()
        self._past: deque[Snapshot] = deque(maxlen=_PAST_ROUNDS)
        self._suspect: Snapshot | None = None
        """The round in which a stall was seen, until a look has judged it."""
        self._moved_at: dict[str, float] = {}
        self._messages = 0
        self._status_at = 0.0

    def run(self) -> None:
        """Watch until the server has ended or it is time to stop."""
        target = self._seen.diagnosis.target
        self._outlet.event(
            "watching",
            f"{len(self._seen.snapshot.target_pids)} processes, {self._seen.diagnosis.verdict.summary}",
            pid=self._head,
            port=target.port,
            vllm_version=target.vllm_version,
        )
        if self._seen.diagnosis.verdict.status == "critical":  # it was broken before anybody watched
            self._judge("still", self._seen)
        while not self._stop.is_set():
            t = self._t()
            snapshot = self._sampler.round(self._plan.round_s, self._stop.wait)
            self._take_in(snapshot, live_view(snapshot), t)
            living = _living(snapshot)
            if not living:
                self._outlet.event("ended", "the server has ended")
                return
            if self._orphaned(living) and self._replaced(snapshot.target_pids):
                words = f"another server has taken its place; {len(living)} processes of it live on"
                self._outlet.event("ended", words)
                return

    def _orphaned(self, living: list[int]) -> bool:
        """Its first process has gone, and it is time to look for a new server (that is a scan of the machine)."""
        self._rounds += 1
        return self._head not in living and self._rounds % _ROUNDS_A_SEARCH == 0

    def _t(self) -> float:
        return time.monotonic() - self._began

    def _take_in(self, snapshot: Snapshot, view: InstanceView, t: float) -> None:
        self._outlet.round(snapshot, view, self._at, t)
        signs = signs_of(snapshot, self._t())
        reason = self._trigger.feed(signs)
        if reason == "died":
            self._died(snapshot)
        elif reason is not None:
            if reason == "stall" and self._suspect is None:
                self._suspect = snapshot
            self._look(snapshot, self._window_s(), reason, urgent=reason != "still")
        elif self._trigger.recovered(signs):
            self._outlet.event("recovered", "every engine moves again")
        elif signs.t - self._seen_at >= self._refresh_s():
            self._look(snapshot, _SHORT_WINDOW_S, None, urgent=False)
        self._digest()
        self._past.append(snapshot)
        self._report(view, signs)
        for code in self._commands.ended():
            self._outlet.event("command", f"the command has ended with {code}", exit_code=code)

    def _look(self, snapshot: Snapshot, window_s: float, reason: Reason | None, *, urgent: bool) -> None:
        living = _living(snapshot)
        if living:
            self._looks.start(living[0], window_s, reason, urgent=urgent)

    def _window_s(self) -> float:
        """Window of a look: the longer nothing may move, the longer there is time to prove it."""
        return self._plan.window_s or min(3.0, max(1.0, self._plan.stall_s / 2))

    def _refresh_s(self) -> float:
        if self._seen.diagnosis.verdict.cause == "starting":
            return _SOON_S
        return _REFRESH_SHOWN_S if self._outlet.seen else _REFRESH_S

    def _digest(self) -> None:
        """Take in what a look has given."""
        result = self._looks.result()
        if not isinstance(result, Looked):  # none, or the server has gone: the next round shows it
            return
        self._seen, self._seen_at = result, self._t()
        self._sampler.rebase(result.snapshot)
        if result.reason is not None:
            self._judge(result.reason, result)

    def _judge(self, reason: Reason, looked: Looked) -> None:
        self._suspect = None
        new, recovered = self._trigger.judged(reason, looked.diagnosis)
        if recovered:
            self._outlet.event("recovered", looked.diagnosis.verdict.summary)
        if new:
            self._capture(reason, looked)

    def _died(self, snapshot: Snapshot) -> None:
        """A member has ended: what the round shows is judged at once, for the rest may follow within the second."""
        if self._suspect is not None:  # it stood before, and the look at that did not come to its end
            self._judge("stall", _as_it_was(self._suspect, "stall"))
        self._judge("died", _as_it_was(snapshot, "died"))
        self._look(snapshot, _SHORT_WINDOW_S, None, urgent=True)

    def _capture(self, reason: Reason, looked: Looked) -> None:
        verdict = looked.diagnosis.verdict
        still = self._trigger.still_s(self._t())
        about = {
            "cause": verdict.cause,
            "layer": verdict.layer,
            "subject": verdict.subject,
            "confidence": verdict.confidence,
        }
        self._outlet.event(_KIND[reason], verdict.summary, since_s=round(still, 1), **about)
        try:
            path = self._evidence.capture([*self._past, looked.snapshot], verdict.cause)
            self._outlet.event("captured", path, bundle=path, **about)
            self._commands.start(path, looked.diagnosis)
        except (VllmdiagError, OSError) as error:
            why = error.why if isinstance(error, VllmdiagError) else ""
            self._outlet.event("problem", f"{error}: {why}" if why else str(error))

    def _report(self, view: InstanceView, signs: Signs) -> None:
        self._messages += sum(ring.messages for ring in view.rings)
        if signs.t - self._status_at >= self._plan.status_s:
            rate = self._messages / (signs.t - self._status_at)
            still = self._trigger.still_s(signs.t)
            words = f"{rate:.1f} messages/s" if self._messages else f"nothing has moved for {still:.0f} s"
            self._outlet.event("status", words, messages_per_s=round(rate, 1), since_s=round(still, 1))
            self._messages, self._status_at = 0, signs.t
        if self._outlet.seen:
            self._outlet.picture(self._frame(view, signs))

    def _stood(self, ring: RingView, t: float) -> RingView:
        """The ring with the time that it stands, over all rounds."""
        if ring.motion == "moving" or ring.segment not in self._moved_at:
            self._moved_at[ring.segment] = t - (ring.still_s or 0.0)
        return standing(ring, t - self._moved_at[ring.segment])

    def _frame(self, view: InstanceView, signs: Signs) -> Frame:
        view = msgspec.structs.replace(view, rings=tuple(self._stood(ring, signs.t) for ring in view.rings))
        moving = sum(ring.rate or 0.0 for ring in view.rings)
        still = self._trigger.still_s(signs.t)
        verdict = self._seen.diagnosis.verdict
        return Frame(
            title=title(view),
            at=now(),
            t=signs.t,
            status=_status(verdict, moving),
            bad=verdict.status == "critical" and self._trigger.incident is not None,
            still_s=still if still >= self._plan.round_s else None,
            messages_per_s=moving,
            doing_age_s=signs.t - self._seen_at,
            view=view,
        )


def _as_it_was(snapshot: Snapshot, reason: Reason) -> Looked:
    """A round judged by itself: without the stacks, which are those of an earlier look."""
    bare = tuple(msgspec.structs.replace(p, stacks=()) for p in snapshot.processes)
    alone = msgspec.structs.replace(snapshot, processes=bare)
    return Looked(reason, alone, diagnose(alone))


def _living(snapshot: Snapshot) -> list[int]:
    return [p.pid for p in snapshot.processes if p.pid in snapshot.target_pids and p.state not in _GONE]


def _status(verdict: Verdict, moving: float) -> str:
    """What the last look has said, unless messages have moved since."""
    if moving and verdict.status == "ok":
        return "serving: messages move"
    return f"{verdict.cause}: {verdict.summary}"
