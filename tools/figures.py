"""Draws the figures of docs/ from recorded lab runs: `python -m tools.figures`. Views in, SVG out, the same every time.

`python -m tools.session` records them anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from html import escape

import msgspec

from tools.session import RECORDED, VIEWS
from vllmdiag.model.ring import SlotState
from vllmdiag.model.view import EndpointView, InstanceView, MemberView, RingView

DIRECTORY = VIEWS.parent

STYLE = """
  text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: #1c2430; }
  .page { fill: #fff; }
  .small { font-size: 11.5px; fill: #55606e; }
  .over { paint-order: stroke; stroke: #fff; stroke-width: 5px; }
  .name { font-weight: 600; }
  .box { fill: #f4f6f9; stroke: #8793a3; }
  .ring { stroke: #2b6cb0; } .socket { stroke: #8793a3; stroke-dasharray: 5 3; }
  .ring, .socket { fill: none; stroke-width: 1.6; }
  .tip { fill: #55606e; }
  .read { fill: #dbe7f3; } .never { fill: none; } .unread { fill: #c2410c; } .being { fill: #f0b429; }
  .read, .never, .unread, .being { stroke: #8793a3; }
  .mark { fill: #fff; font-weight: 700; text-anchor: middle; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14181f; } text { fill: #e6eaf0; } .small { fill: #a3adba; } .over { stroke: #14181f; }
    .box { fill: #242b36; } .tip { fill: #a3adba; }
    .ring { stroke: #7db3e8; } .read { fill: #2f4a66; } .unread { fill: #ea6a2e; }
  }
"""

CELL = 22
_KINDS = {SlotState.READ: "read", SlotState.UNREAD: "unread", SlotState.WRITING: "being"}


def recorded() -> dict[str, InstanceView]:
    """Fault -> what was seen of a lab server with it."""
    return msgspec.json.decode(VIEWS.read_bytes(), type=dict[str, InstanceView])


def figures(views: Mapping[str, InstanceView]) -> dict[str, str]:
    """File name -> SVG."""
    return {"processes.svg": processes(views["serving"]), "ring.svg": rings(views)}


def _svg(width: int, height: int, title: str, desc: str, body: Iterable[str]) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    head = '<path class="tip" d="M0 0 L8 4 L0 8 z"/>'
    tip = f'<marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">{head}</marker>'
    lines = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="desc">{escape(desc)}</desc>',
        f"<style>{STYLE}</style>",
        f"<defs>{tip}</defs>",
        '<rect class="page" width="100%" height="100%"/>',
        *body,
        "</svg>",
    )
    return "\n".join(lines) + "\n"


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def _arrow(x1: float, x2: float, y: float, kind: str, words: str, y2: float | None = None) -> Iterator[str]:
    """A line with a head, and words above the middle of it."""
    end = y if y2 is None else y2
    yield f'<path class="{kind}" marker-end="url(#tip)" d="M{x1:g} {y:g} L{x2:g} {end:g}"/>'
    yield _text((x1 + x2) / 2, (y + end) / 2 - 6, words, "small", "middle")


# --- who talks to whom

_WIDE, _HIGH, _GAP = 150, 56, 235
_TOP = 90


def processes(view: InstanceView) -> str:
    """Members of an instance with one engine, and what runs between them: rings as lines, sockets as dashes."""
    server, engine = (next(m for m in view.members if m.role == role) for role in ("APIServer", "EngineCore"))
    workers = [m for m in view.members if m.role == "Worker"]
    step = 190
    middle = _TOP + step * (len(workers) - 1) / 2
    place = {server.pid: (165.0, middle), engine.pid: (165.0 + _GAP + _WIDE, middle)}
    place |= {w.pid: (165.0 + 2 * (_GAP + _WIDE), _TOP + step * i) for i, w in enumerate(workers)}
    body = [_text(20, 30, "Who talks to whom in a vLLM server with two ranks", "name")]
    body += [_text(20, 50, "solid: a ring in shared memory · dashed: a socket · recorded from a lab server", "small")]
    body += [_text(20, middle + 4, "client", "name")]
    for member in (server, engine, *workers):
        body += _box(member, *place[member.pid])
    body += _arrow(70, 165, middle - 8, "socket", "HTTP")
    left, right = place[server.pid][0] + _WIDE, place[engine.pid][0]
    for dy, name, ends in ((-14, "engine input", (left, right)), (22, "engine output", (right, left))):
        endpoint = next(e for e in view.endpoints if e.name == name)
        body += _arrow(*ends, middle + dy, "socket", f"{name}, {_pattern(endpoint)}")
    for ring in view.rings:
        body += _between(ring, place)
    body.sort(key=lambda element: element.startswith("<text"))  # words lie over lines
    return _svg(
        int(165 + 2 * (_GAP + _WIDE) + _WIDE + 40),
        int(_TOP + step * (len(workers) - 1) + _HIGH + 10),
        "The processes of a vLLM server and what runs between them",
        "From left to right: client, API server, EngineCore, workers. Requests go right over sockets and the broadcast"
        " ring, results go left over response rings and sockets.",
        body,
    )


def _pattern(endpoint: EndpointView) -> str:
    first, _, second = endpoint.pattern.partition("/")
    return f"{first} and {second}"


def _box(member: MemberView, x: float, y: float) -> Iterator[str]:
    yield f'<rect class="box" rx="6" x="{x:g}" y="{y - _HIGH / 2:g}" width="{_WIDE}" height="{_HIGH}"/>'
    yield _text(x + _WIDE / 2, y - 3, member.label, "name", "middle")
    yield _text(x + _WIDE / 2, y + 15, f"pid {member.pid}", "small", "middle")


def _between(ring: RingView, place: Mapping[int | None, tuple[float, float]]) -> Iterator[str]:
    """One ring: an arrow to each of its readers."""
    if ring.writer is None:
        return
    x1, y1 = place[ring.writer.pid]
    for reader in ring.readers:
        if reader.party is None:
            continue
        x2, y2 = place[reader.party.pid]
        words = f"{ring.queue}, {ring.geometry.chunks} slots of {ring.geometry.chunk_bytes >> 20} MiB"
        if x1 == x2:  # between workers
            yield from _arrow(x1 + _WIDE / 2, x2 + _WIDE / 2, y1 + _HIGH / 2, "ring", "", y2 - _HIGH / 2)
            yield _text(x1 + _WIDE / 2 + 8, (y1 + y2) / 2 - 4, ring.queue, "small")
            yield _text(x1 + _WIDE / 2 + 8, (y1 + y2) / 2 + 11, words.partition(", ")[2], "small")
        elif x1 < x2:
            yield from _arrow(x1 + _WIDE, x2, y1 - 12, "ring", "", y2 - 12)
            yield _text(x2 - 6, y2 - 24, words, "small over", "end")
        else:
            yield from _arrow(x1, x2 + _WIDE, y1 + 14, "ring", "", y2 + 14)
            yield _text(x1 - 6, y1 + 34, words, "small over", "end")


# --- a ring


def rings(views: Mapping[str, InstanceView]) -> str:
    """The broadcast ring of each view, a row of cells for each reader."""
    body: list[str] = [_text(20, 30, "The ring from EngineCore to its workers, three times", "name")]
    body += [_text(20, 50, "a column is a slot, a row is a reader, recorded from lab servers", "small")]
    y = 84
    for name in RECORDED:
        ring = _broadcast(views[name])
        body += [_text(20, y, name.replace("-", " "), "name"), _text(150, y, ring.summary, "small")]
        body += _grid(ring, y + 12)
        y += 12 + CELL * (len(ring.readers) + 1) + 34
    body += _legend(y - 12)
    return _svg(
        560,
        y + 22,
        "A broadcast ring while it serves, with a stopped reader, and full",
        "; ".join(
            f"{name}: {next(r for r in v.rings if r.queue == 'broadcast ring').summary}" for name, v in views.items()
        ),
        body,
    )


def _broadcast(view: InstanceView) -> RingView:
    return next(ring for ring in view.rings if ring.queue == "broadcast ring")


def _grid(ring: RingView, y: float) -> Iterator[str]:
    if ring.last is None:
        return
    left = 230
    for row, reader in enumerate(ring.readers):
        top = y + row * CELL
        label = reader.party.label if reader.party else "not known"
        yield _text(20, top + 16, f"reader {reader.index}  {label}", "small")
        for slot in ring.last.slots:
            has_read = slot.state is SlotState.UNREAD and reader.index not in slot.unread_by
            kind = "read" if has_read else _KINDS.get(slot.state, "never")
            yield from _cell(left + slot.index * CELL, top, kind)
    bottom = y + len(ring.readers) * CELL
    for slot in ring.last.slots:
        yield _text(left + slot.index * CELL + CELL / 2, bottom + 15, str(slot.index), "small", "middle")
    if ring.last.writer_index is not None:
        at = left + ring.last.writer_index * CELL + CELL / 2
        yield _text(at, bottom + 29, "▲", "small", "middle")
        yield _text(at + 9, bottom + 29, "writer's next", "small")


def _cell(x: float, y: float, kind: str) -> Iterator[str]:
    yield f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL}"/>'
    if kind == "unread":
        yield _text(x + CELL / 2, y + 16, "!", "mark", "middle")


def _legend(y: float) -> Iterator[str]:
    for i, (kind, words) in enumerate((("read", "read"), ("unread", "written, not read"), ("never", "never written"))):
        yield from _cell(20 + i * 170, y, kind)
        yield _text(50 + i * 170, y + 16, words, "small")


def main() -> int:
    """Draw all."""
    for name, text in figures(recorded()).items():
        (DIRECTORY / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
