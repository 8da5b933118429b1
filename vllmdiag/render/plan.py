"""`plan`: what each kind of node will hold, what breaks first, where the traffic goes; and a live node beside it."""

from __future__ import annotations

from collections.abc import Sequence

from vllmdiag.model.plan import Break, NodePlan, Plan, PlanCheck, Topology

from .page import Page, Role, Span, Style, Text
from .words import number, plural, size

_BYTES = {"shm"}
_CLOSE = 2.0
"""A limit that one doubling passes is marked."""


def plan_text(plan: Plan, style: Style) -> str:
    """Write a plan."""
    page = Page(style)
    _headline(page, plan)
    for note in plan.notes:
        page.line(Span("note  ", "dim"), note, indent=2, hang=8)
    for kind in plan.kinds:
        _node(page, kind, plan)
    _breaks(page, plan.breaks)
    page.section("traffic")
    page.table(
        [(flow.scope, flow.what, flow.between, flow.over) for flow in plan.flows],
        header=("stays in", "what", "between", "over"),
        indent=2,
    )
    page.section("limits")
    page.table(
        [(limit.name, _amount(limit.name, limit.value), limit.source) for limit in plan.limits], indent=2, right={1}
    )
    if style.verbose:
        page.section("numbers from")
        for source in plan.sources:
            page.line(source, indent=2)
    return page.text()


def check_text(check: PlanCheck, style: Style) -> str:
    """Write a live node beside its plan: what differs first."""
    page = Page(style)
    verdict: Text = Span("AGREES", "good") if check.agrees else Span("DIFFERS", "bad")
    page.line(verdict, "  ", Span(f"{check.kind} of {_shape(check.topology)}", "head"))
    rows: list[Sequence[Text]] = []
    for row in sorted(check.compared, key=lambda c: c.agrees):
        seen = "not observed" if row.seen is None else _of(row.what, row.seen)
        role: Role = "plain" if row.agrees else "bad"
        within = f"up to {row.tolerance:.0%} more" if row.tolerance else ""
        word = "" if row.agrees else "differs"
        rows.append((row.what, _of(row.what, row.planned), Span(seen, role), within, Span(word, role)))
    page.table(rows, header=("what", "planned", "live", "tolerance", ""), indent=2, right={1, 2})
    return page.text()


def _of(what: str, value: int) -> str:
    return size(value) if what.startswith("bytes") else number(value)


def _shape(top: Topology) -> str:
    sizes = {"tp": top.tp, "pp": top.pp, "pcp": top.pcp, "dp": top.dp}
    words = [f"{name} {n}" for name, n in sizes.items() if n > 1 or name == "tp"]
    words += ["ep"] if top.ep else []
    return f"{' x '.join(words)} ({top.executor})"


def _headline(page: Page, plan: Plan) -> None:
    top = plan.topology
    servers = f"{plural(plan.jobs, 'server')} of {_shape(top)}"
    nodes = (
        f"{plural(plan.nodes_per_job, 'node')} each" if plan.jobs > 1 else f"on {plural(plan.nodes_per_job, 'node')}"
    )
    ranks = plan.jobs * top.dp * top.tp * top.pp * top.pcp
    page.line(Span(f"{servers} · {nodes} · {plural(ranks, 'rank')} in all", "head"))


def _node(page: Page, kind: NodePlan, plan: Plan) -> None:
    page.section(f"{kind.kind} · {plural(kind.nodes, 'node')} like this")
    page.table(
        [
            (
                role.role,
                str(role.processes),
                _least(role.fds, role.at_least),
                _least(role.threads, role.at_least),
            )
            for role in kind.roles
        ],
        header=("process", "count", "fds each", "threads each"),
        indent=2,
        right={1, 2, 3},
    )
    if kind.rings:
        page.gap()
        page.table(
            [
                (
                    f"{ring.queue} ring",
                    str(ring.count),
                    f"{ring.chunks} x {size(ring.chunk_bytes)}",
                    size(ring.file_bytes),
                    f"{ring.readers}" + (f" and {ring.remote_readers} over TCP" if ring.remote_readers else ""),
                    ring.writer,
                )
                for ring in kind.rings
            ],
            header=("ring", "count", "slots", "file", "readers", "writer"),
            indent=2,
            right={1, 2, 3},
        )
    page.gap()
    full = f"{size(kind.shm_bytes)} if every slot fills ({kind.shm_bytes} bytes)"
    ports = (f"{port.purpose}: {port.port}" + (f" x {port.count}" if port.count > 1 else "") for port in kind.ports)
    sums = (plural(kind.processes, "process"), f"{number(kind.threads)} threads", f"{number(kind.fds)} fds")
    facts = [
        ("/dev/shm", f"{full}, largest file {size(kind.shm_largest)}" if kind.shm_bytes else ""),
        ("unix", f"{plural(kind.unix_paths, 'path')} {plan.topology.ipc_dir}/UUID" if kind.unix_paths else ""),
        ("TCP", " · ".join(ports)),
        ("total", f"{', '.join(sums)}, or more"),
    ]
    page.table([fact for fact in facts if fact[1]], indent=2)
    if page.style.verbose:
        page.gap()
        page.table(
            [
                (
                    socket.name,
                    f"{socket.binds} <- {socket.connects}",
                    socket.transport,
                    str(socket.listeners),
                    str(socket.connections),
                )
                for socket in kind.sockets
            ],
            header=("endpoint", "bound by <- connected by", "over", "bound", "connections"),
            indent=2,
            right={3, 4},
        )


def _least(value: int | None, at_least: bool) -> str:
    return "" if value is None else f"{'>= ' if at_least else ''}{value}"


def _breaks(page: Page, breaks: Sequence[Break]) -> None:
    page.section("what breaks first")
    rows: list[Sequence[Text]] = []
    for n, row in enumerate(breaks, 1):
        broken = row.need > row.value
        close = row.at is not None and row.at <= _CLOSE * row.now
        role: Role = "bad" if broken else "warn" if close else "plain"
        when = "as it is" if broken else f"at {row.at}, now {row.now}"
        what = "" if broken else row.grows
        held = f"{_amount(row.limit, row.need)} of {_amount(row.limit, row.value)}"
        rows.append((str(n), Span(when, role), what, f"{row.limit}: {row.where}", held, row.effect))
    page.table(rows, header=("", "breaks", "as grows", "limit", "need", "then"), indent=2, right={0})


def _amount(name: str, value: int | None) -> str:
    if value is None:
        return "unlimited"
    return size(value) if name in _BYTES else number(value)
