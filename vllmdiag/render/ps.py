"""`ps`: the tree of an instance, and the list of instances to choose from."""

from __future__ import annotations

from collections.abc import Sequence

from vllmdiag.model.ranks import fold
from vllmdiag.model.view import InstanceLine, InstanceView, MemberView

from .page import Page, Role, Span, Style, Text
from .parts import could_not_observe, headline
from .words import between, duration, fold_labels, plural, size

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "uninterruptible",
    "T": "stopped",
    "t": "traced",
    "Z": "zombie",
    "X": "dead",
    "I": "idle",
    "": "gone",
}
_FOLD_FROM = 9
"""Equal siblings from this number on are one line; `-v` shows each."""


def ps_text(view: InstanceView, style: Style) -> str:
    """Write the members of an instance as a tree; what is abnormal comes first, in one line."""
    page = Page(style)
    headline(page, view)
    odd = [member for member in view.members if member.abnormal]
    if odd:
        what = ", ".join(f"{m.label}{f' (pid {m.pid})' if m.pid else ''} is {state_words(m)}" for m in odd)
        page.line(Span("! ", "bad"), Span(what, "bad"))
    page.gap()
    rows = [_row(group, style) for group in _groups(view.members, style)]
    header = ("pid", "member", "state", "cpu", "rss", "pss", "threads", "age", "known by", "doing")
    page.table(rows, header=header, indent=2, right={0, 3, 4, 5, 6, 7})
    could_not_observe(page, view.missing)
    return page.text()


def instances_text(instances: Sequence[InstanceLine], style: Style) -> str:
    """Write the instances of the host, to choose one by its pid."""
    page = Page(style)
    page.line(Span(f"{plural(len(instances), 'vLLM instance')} on this host", "head"))
    page.gap()
    rows: list[tuple[Text, ...]] = [
        (
            str(one.pid),
            one.role,
            str(one.port or ""),
            plural(one.members, "process"),
            one.vllm_version or "",
            one.model or "",
            Span(", ".join(one.abnormal), "bad"),
        )
        for one in instances
    ]
    page.table(rows, header=("pid", "role", "port", "size", "vllm", "model", "abnormal"), indent=2, right={0, 2})
    page.gap()
    page.line(Span("next  ", "dim"), f"vllmdiag ps {instances[0].pid}")
    return page.text()


def state_words(member: MemberView) -> str:
    """The state in a word, with its letter where it is abnormal."""
    if member.pid is None:
        return "missing"
    word = _STATES.get(member.state, "in an unknown state")
    return f"{word} ({member.state})" if member.state and member.abnormal else word


def _groups(members: Sequence[MemberView], style: Style) -> list[list[MemberView]]:
    """Members, with runs of many equal siblings together."""
    runs: list[list[MemberView]] = []
    for member in members:
        if runs and _kind(runs[-1][0]) == _kind(member) and not member.abnormal:
            runs[-1].append(member)
        else:
            runs.append([member])
    return [
        part
        for run in runs
        for part in ([run] if len(run) >= _FOLD_FROM and not style.verbose else [[member] for member in run])
    ]


def _kind(member: MemberView) -> tuple[object, ...]:
    return (
        member.role,
        member.depth,
        member.ppid,
        member.state,
        member.doing,
        member.stage,
        member.known_by,
        member.note,
    )


def _row(group: Sequence[MemberView], style: Style) -> tuple[Text, ...]:
    first = group[0]
    role: Role = "bad" if first.abnormal else "plain"
    branch = "  " * (first.depth - 1) + "└ " if first.depth else ""
    name = first.label if len(group) == 1 else f"{fold_labels(m.label for m in group)} ({len(group)})"
    # The stage says it better than the frame; of a stopped one both count.
    doing = first.doing if first.abnormal or not first.stage else ""
    doing = " · ".join(word for word in (first.stage, doing, first.note) if word)
    fds = f"{first.fds} of {first.fds_max} fds" if style.verbose and first.fds is not None else ""
    return (
        Span(fold(m.pid for m in group if m.pid is not None) or "-", role),
        Span(branch + name, role),
        Span(state_words(first), role),
        between([m.cpu for m in group], lambda low: f"{low:.2f}"),
        between([m.rss for m in group], size),
        between([m.pss for m in group], size),
        between([m.threads for m in group], lambda low: f"{low:.0f}"),
        between([m.age_s for m in group], duration),
        first.known_by,
        " · ".join(word for word in (doing, fds) if word),
    )
