"""`endpoints`: who binds, who is connected, what waits."""

from __future__ import annotations

from vllmdiag.model.sockets import ZmtpProbe
from vllmdiag.model.view import ConnectionView, EndpointView, InstanceView

from .page import Page, Role, Span, Style, Text
from .parts import could_not_observe, headline
from .words import fold_labels, plural, size, who, whom

_STALE_SHOWN = 5


def endpoints_text(view: InstanceView, style: Style) -> str:
    """Write the endpoints of an instance: one block each, connections that carry nothing folded."""
    page = Page(style)
    headline(page, view)
    for endpoint in view.endpoints:
        page.gap()
        _endpoint(page, endpoint)
    if not view.endpoints:
        page.line("no endpoint seen")
    if view.stale_ipc_paths:
        page.gap()
        _stale(page, view.stale_ipc_paths)
    could_not_observe(page, view.missing)
    return page.text()


def _stale(page: Page, paths: tuple[str, ...]) -> None:
    """What dead servers left: harmless, and all that is listed is surely not in use here."""
    page.line(f"{plural(len(paths), 'socket file')} of dead servers: nobody is bound to them, they do no harm")
    shown = paths if page.style.verbose else paths[:_STALE_SHOWN]
    for path in shown:
        page.line(Span(path, "dim"), indent=2)
    if len(paths) > len(shown):
        page.line(Span(f"and {len(paths) - len(shown)} more: -v", "dim"), indent=2)


def _endpoint(page: Page, endpoint: EndpointView) -> None:
    facts = [endpoint.pattern, f"bound by {who(endpoint.binder)}"]
    page.line(Span(endpoint.name, "head"), "  ", " · ".join(fact for fact in facts if fact))
    gone: Text = Span("  the file is gone: who is connected stays, nobody new can come", "bad")
    page.line(Span(endpoint.address, "dim"), gone if endpoint.path_exists is False else "", indent=2)
    if endpoint.waiting:
        limit = f" of {endpoint.backlog}" if endpoint.backlog else ""
        page.line(Span("! ", "bad"), f"{plural(endpoint.waiting, 'connection')}{limit} not accepted", indent=2)
    if endpoint.expected:
        page.line(Span("! ", "bad"), f"not connected: {whom(endpoint.expected)}", indent=2)
    if endpoint.probe is not None:
        page.line(*_probe(endpoint.probe), indent=2, hang=4)
    rows = [
        (
            Span(*_peers(group)),
            _bytes("to it", group[0].to_peer),
            _bytes("from it", group[0].from_peer),
            _state(group[0]),
        )
        for group in _groups(endpoint.connections, page.style)
    ]
    page.table(rows, indent=2)


def _probe(probe: ZmtpProbe) -> tuple[Text, ...]:
    if probe.outcome == "ready":
        identity = probe.identity or (f"of {probe.identity_length} bytes" if probe.identity_length else "")
        named = f", identity {identity}" if identity else ""
        return (f"probed: {probe.socket_type}, ZMTP {probe.version}{named}, answered in {_quick(probe.took_s)}",)
    if probe.outcome in ("gated", "not-permitted"):
        return (Span("? ", "warn"), f"not probed: {probe.reason}")
    return (Span("! ", "bad"), f"probed: {probe.reason}")


def _quick(seconds: float | None) -> str:
    """Milliseconds: an IO thread that runs answers in fractions of one."""
    return f"{(seconds or 0.0) * 1000:.1f} ms"


def _groups(connections: tuple[ConnectionView, ...], style: Style) -> list[list[ConnectionView]]:
    """Each connection on which something waits alone; the quiet ones of one state together."""
    loud: list[list[ConnectionView]] = []
    quiet: dict[str, list[ConnectionView]] = {}
    for connection in connections:
        if style.verbose or connection.stuck or connection.to_peer or connection.from_peer:
            loud.append([connection])
        else:
            quiet.setdefault(connection.state, []).append(connection)
    return [*loud, *quiet.values()]


def _peers(group: list[ConnectionView]) -> tuple[str, Role]:
    names = who(group[0].peer) if len(group) == 1 else f"{fold_labels(dict.fromkeys(c.peer.label for c in group))}"
    return (f"{names} ({plural(len(group), 'connection')})" if len(group) > 1 else names, "plain")


def _bytes(way: str, waiting: int | None) -> str:
    return f"{size(waiting)} wait {way}" if waiting else ""


def _state(connection: ConnectionView) -> Text:
    if connection.stuck:
        return Span("not read in the whole window", "bad")
    return "" if connection.state == "ESTAB" else connection.state
