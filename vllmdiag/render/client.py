"""`client`: the HTTP side of each port: is it answered, does the client read, do the counters move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vllmdiag.model.http import HttpProbe
from vllmdiag.model.view import ClientView, CounterView, HttpConnectionView, InstanceView

from .page import Page, Role, Span, Style, Text
from .parts import could_not_observe, headline
from .words import duration, number, size, who, whom


def client_text(view: InstanceView, style: Style) -> str:
    """Write what the HTTP ports of an instance look like from the client's side."""
    page = Page(style)
    headline(page, view)
    for client in view.clients:
        page.section(f"port {client.port} · {whom(client.servers) if client.servers else 'nobody listens'}")
        _probes(page, client.probes)
        _connections(page, client)
        _counters(page, client.counters)
    if not view.clients:
        page.line("no HTTP port seen")
    could_not_observe(page, view.missing)
    return page.text()


def _probes(page: Page, probes: Sequence[HttpProbe]) -> None:
    rows: list[tuple[Text, ...]] = []
    for probe in probes:
        good = probe.status is not None and probe.status < 400
        role: Role = "good" if good else "bad"
        answer = f"{'✓' if good else '✗'} {probe.status or probe.error or 'no answer'}"
        stages = (
            ("connect", probe.connect_s),
            ("first byte", probe.first_byte_s),
            ("total", probe.total_s),
        )
        times = ", ".join(f"{name} {_milliseconds(seconds)}" for name, seconds in stages if seconds is not None)
        rows.append((f"GET {probe.path}", Span(answer, role), times))
    page.table(rows, indent=2)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else duration(seconds)


def _connections(page: Page, client: ClientView) -> None:
    states = Counter(connection.state for connection in client.connections)
    counts = ", ".join(f"{n} {state}" for state, n in sorted(states.items())) or "none"
    backlog = f" of {client.backlog}" if client.backlog else ""
    page.line(f"connections: {counts}", indent=2)
    if client.waiting:
        page.line(Span("! ", "bad"), f"{client.waiting}{backlog} not yet accepted", indent=2)
    loud = [c for c in client.connections if page.style.verbose or c.stuck or c.send_q or c.recv_q or c.note]
    page.table([_connection(connection) for connection in loud], indent=4)


def _connection(connection: HttpConnectionView) -> tuple[Text, ...]:
    server = who(connection.server) if connection.server else "no process"
    unsent = f"{size(connection.send_q)} not taken by the client" if connection.send_q else ""
    unread = f"{size(connection.recv_q)} not read by the server" if connection.recv_q else ""
    mark: Text = Span("in the whole window", "bad") if connection.stuck else ""
    return (connection.remote, server, connection.state, unsent, unread, mark, connection.note)


def _counters(page: Page, counters: Sequence[CounterView]) -> None:
    if not counters:
        return
    rows: list[tuple[Text, ...]] = []
    for counter in sorted(counters, key=lambda one: (one.gauge, one.name, one.engine)):
        engine = f"engine {counter.engine}" if counter.engine else ""
        rows.append((counter.name, engine, _value(counter.first), "→", _value(counter.last), _moved(counter)))
    page.gap()
    page.table(rows, header=("metric", "engine", "first", "", "last", "moved"), indent=2, right={2, 4})


def _value(value: float | None) -> str:
    return "" if value is None else number(value)


def _moved(counter: CounterView) -> str:
    if counter.gauge:
        return "gauge: what the last step said"
    if counter.first is None or counter.last is None:
        return ""
    return "no" if counter.last == counter.first else f"+{number(counter.last - counter.first)}"
