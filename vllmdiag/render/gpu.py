"""`gpu`: a row for each rank; ranks that agree are one row, and those that differ stand out with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from vllmdiag.model.gpu import CommunicatorView, FlightView, RankView
from vllmdiag.model.ranks import fold
from vllmdiag.model.view import GpuView, InstanceView

from .page import Page, Role, Span, Style, Text
from .parts import could_not_observe, headline
from .words import between, duration, fold_labels, plural, size

_HEADER = ("rank", "pid", "gpu", "busy", "mem busy", "power", "memory", "temp", "clock", "links", "nccl", "doing")


def gpu_text(view: InstanceView, style: Style) -> str:
    """Write the GPU layer of an instance."""
    page = Page(style)
    headline(page, view)
    for layer in view.gpu:
        _drivers(page, layer)
        _ranks(page, layer.ranks)
        _communicators(page, layer)
        _flights(page, layer)
    if not view.gpu:
        page.line("nothing of a GPU was seen")
    could_not_observe(page, view.missing)
    return page.text()


def _drivers(page: Page, layer: GpuView) -> None:
    for driver in layer.drivers:
        facts = [
            f"{driver.vendor} driver {driver.version}".strip(),
            f"CUDA {driver.runtime}" if driver.runtime else "",
        ]
        page.line(" · ".join(fact for fact in facts if fact))
        if driver.problem == "hangs":
            page.line(Span("! ", "bad"), Span(driver.text, "bad"))


def _ranks(page: Page, rows: Sequence[RankView]) -> None:
    if not rows:
        return
    page.gap()
    groups = _groups(rows, page.style)
    page.table([_row(group) for group in groups], header=_HEADER, indent=2, right={1, 3, 4})
    odd = [row for row in rows if row.differs or row.troubles]
    if odd:
        page.section("what stands out")
    for row in odd:
        _odd(page, row)


def _odd(page: Page, row: RankView) -> None:
    name = row.label if row.pid is None else f"{row.label} (pid {row.pid})"
    where = f", GPU {row.device}" if row.device is not None and row.pid is not None else ""
    page.line(Span(name, "head"), where, indent=2)
    for trouble in row.troubles:
        role: Role = "bad" if trouble.critical else "warn"
        page.line(Span("! ", role), trouble.text, indent=4)
    for words in row.differs:
        page.line(Span("· ", "dim"), words, indent=4)


def _groups(rows: Sequence[RankView], style: Style) -> list[list[RankView]]:
    """Ranks in which nothing stands out and that do the same are one group; `-v` shows each."""
    groups: dict[object, list[RankView]] = {}
    for i, row in enumerate(rows):
        alone = style.verbose or row.pid is None or row.differs or row.troubles
        alike = (row.doing, row.device_name, row.spinning, row.device is None)
        groups.setdefault(i if alone else alike, []).append(row)
    return list(groups.values())


def _row(group: Sequence[RankView]) -> tuple[Text, ...]:
    first = group[0]
    role: Role = "bad" if any(t.critical for t in first.troubles) else "warn" if first.differs else "plain"
    name = first.label if len(group) == 1 else f"{fold_labels(row.label for row in group)} ({len(group)})"
    devices = fold(row.device for row in group if row.device is not None)
    links = f"{first.links_up} of {first.links}" if first.links is not None else ""
    power = between((row.power_w for row in group), lambda w: f"{w:.0f}")
    limit = between((row.power_limit_w for row in group), lambda w: f"{w:.0f}")
    used = between((row.memory_used for row in group), size)
    return (
        Span(name, role),
        fold(row.pid for row in group if row.pid is not None),
        f"{devices} {first.device_name}".strip() if devices else "",
        between((row.busy_pct for row in group), lambda n: f"{n:.0f}%"),
        between((row.memory_busy_pct for row in group), lambda n: f"{n:.0f}%"),
        f"{power} of {limit} W" if power and limit else f"{power} W" if power else "",
        used,
        between((row.temperature_c for row in group), lambda c: f"{c:.0f} C"),
        between((row.clock_mhz for row in group), lambda mhz: f"{mhz:.0f} MHz"),
        links,
        _launched(group),
        _doing(first),
    )


def _launched(group: Sequence[RankView]) -> str:
    totals = [float(sum(row.collectives.values())) for row in group if row.collectives]
    if not totals:
        return ""
    moved = {row.collectives_moved for row in group}
    return between(totals, lambda n: f"{n:.0f}") + (" moving" if True in moved else " still" if False in moved else "")


def _doing(row: RankView) -> str:
    return " · ".join(words for words in (row.doing, "a kernel waits" if row.spinning else "") if words)


def _communicators(page: Page, layer: GpuView) -> None:
    if not layer.communicators:
        return
    page.section(f"NCCL {layer.communicators[0].nccl_version}: {plural(len(layer.communicators), 'communicator')}")
    for one in layer.communicators:
        _communicator(page, one)
    page.line(Span(f"NCCL's view has limits: {'; '.join(layer.limits)}", "dim"), indent=2)


def _communicator(page: Page, one: CommunicatorView) -> None:
    motion = {None: "", True: "moving", False: "still"}[one.moved]
    facts = [one.name, plural(one.size, "rank"), one.counts, motion]
    page.line(" · ".join(fact for fact in facts if fact), indent=2)
    if page.style.verbose and one.members:
        page.line(fold_labels(one.members), indent=4)
    for finding in one.findings:
        page.line(Span("! ", "bad"), finding, indent=4)


def _flights(page: Page, layer: GpuView) -> None:
    if not layer.dumps:
        return
    page.section(f"flight recorder: {layer.dumps}")
    for one in layer.flights:
        _flight(page, one)
    if not layer.flights:
        page.line("in every process group of the dumps the ranks agree", indent=2)


def _flight(page: Page, one: FlightView) -> None:
    age = f", written {duration(one.ages_s[-1])} ago" if one.ages_s else ""
    page.line(Span("! ", "bad"), f"group {one.group}, collective {one.seq}{age}: {one.summary}", indent=2)
