"""What HTTP requests came to: one line a probe, or the transcript of curl -v. Bodies and headers are not kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vllmdiag.bundle.draft import Draft
from vllmdiag.model.http import ClientView, HttpProbe

from .format import Context, block

_METHOD = r"(?P<method>GET|POST|HEAD|PUT|DELETE)"
_LINE = re.compile(
    rf"^\s*{_METHOD}\s+(?P<url>\S*?/\S*?):?(?:\s+(?:via|through|by way of)\s+(?:the\s+)?(?:proxy\s+)?(?P<proxy>\S+?))?"
    r"(?:\s+\([^)]*\))?\s*(?:->|:|=>)?\s+"
    r"(?P<rest>(?:HTTP/\d\S*\s+)?(?:[1-5]\d\d\b|no |time|refus|reset|hang|fail|error|empty|conn).*)$",
    re.IGNORECASE,
)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|sec|seconds|m|min)\b")
_CURL = re.compile(
    rf"^\s*(?:>\s*{_METHOD}\s+\S+\s+HTTP/|\*\s+(?:Trying|Connected to|Host |Uses proxy env)|<\s*HTTP/\S+\s+\d+"
    r"|curl: \(\d+\)|HTTP/\d\S*\s+[1-5]\d\d)"
)
_CURL_GOES_ON = re.compile(r"^\s*(?:[*<>{}]|curl: \(\d+\)|HTTP/|[A-Za-z-]+: |data: |\s*[\d-]+ +[\d.]+[kMG]? )")
_REQUEST = re.compile(rf"^\s*>\s*{_METHOD}\s+(?P<proxy>https?://[^/\s]+)?(?P<path>/\S*)")
"""To a proxy the whole address is sent, to a server only its path."""
_PROXY = re.compile(
    r"^\s*(?:\*\s+Uses proxy env variable \w+ == '(?P<name>[^']+)'|>\s*Proxy-Connection:"
    r"|<\s*(?:X-Squid-Error|Proxy-\w+):|<\s*Server: (?P<server>squid|tinyproxy)\b)",
    re.IGNORECASE,
)
_STATUS = re.compile(r"^\s*(?:<\s*)?HTTP/\S+\s+(?P<status>\d{3})")
_FAILED = re.compile(r"curl: \((?P<code>\d+)\)\s*(?P<words>.*)")
_URL = re.compile(r"https?://[^/\s:'\"]+(?::(?P<port>\d+))?(?P<path>/[^\s'\"]*)?")
_BARE_URL = re.compile(r"\s(?:[\w.-]+|\[[\da-fA-F:]+\]):(?P<port>\d+)(?P<path>/[^\s'\"]*)?")
_CONNECTED = re.compile(r"\*\s+(?:Connected to \S+ \(\S+\) port|Trying \S+:)\s*(?P<port>\d+)")
_VERSION = re.compile(r'"version"\s*:\s*"([\w.+-]+)"')
_CURL_ERRORS = {"7": "refused", "28": "timeout", "52": "reset", "56": "reset", "35": "tls", "60": "tls"}
_DELAY = re.compile(
    r"(?:first (?:byte|token|chunk)|\bTTFT|time to first token)\s*(?:at|after|t=|:|=|came after)?\s*(?:t=)?\s*"
    r"(?P<first>\d+(?:\.\d+)?)\s*(?P<unit>ms|s)\b",
    re.IGNORECASE,
)

_BURST = re.compile(
    r"(?:(?P<chunks>\d+(?:-\d+)?)\s+(?:chunks?|events?|tokens?|messages?)\b[^.;]*?\b(?:each|every)"
    r"|bursts?\b[^.;]*?\b(?:each|every|of))\s+(?P<gap>\d+(?:\.\d+)?)\s*(?P<unit>ms|s)\b",
    re.IGNORECASE,
)


def _read_lines(lines: Sequence[str], context: Context, draft: Draft) -> None:
    for line in lines:
        found = _LINE.match(line)
        if found is None:
            continue
        rest = found["rest"]
        status = re.match(r"(?:HTTP/\S+\s+)?([1-5]\d\d)\b", rest)
        took = _TIME.search(rest)
        port = re.search(r":(\d{2,5})/", found["url"])
        draft.add(
            "http",
            HttpProbe(
                t=context.look,
                port=int(port[1]) if port else 0,
                method=found["method"].upper(),
                path=re.sub(r"^\w+://[^/]+", "", found["url"]),
                status=int(status[1]) if status else None,
                error="" if status else _error(rest),
                total_s=_seconds(took) if took else None,
                proxy=found["proxy"] or "",
            ),
        )


def _error(words: str) -> str:
    low = words.lower()
    for mark, error in (("refus", "refused"), ("reset", "reset"), ("empty", "reset"), ("closed", "reset")):
        if mark in low:
            return error
    return "timeout"


def _seconds(found: re.Match[str]) -> float:
    return float(found[1]) * {"ms": 0.001, "m": 60.0, "min": 60.0}.get(found[2], 1.0)


class _Exchange(NamedTuple):
    """One request of a transcript, as far as it came."""

    method: str
    path: str
    port: int
    status: int | None
    error: str
    took_s: float | None
    version: str | None
    proxy: str


def _read_curl(lines: Sequence[str], context: Context, draft: Draft) -> None:
    for each in _exchanges(lines, context):
        draft.add(
            "http",
            HttpProbe(
                t=context.look,
                port=each.port,
                method=each.method,
                path=each.path,
                status=each.status,
                error=each.error,
                total_s=each.took_s,
                version=each.version,
                proxy=each.proxy,
            ),
        )


def _exchanges(lines: Sequence[str], context: Context) -> Iterator[_Exchange]:
    asked = _URL.search(context.header) or ("curl" in context.header and _BARE_URL.search(context.header)) or None
    path = (asked["path"] or "/") if asked else ""
    port = int(asked["port"] or 80) if asked else 0
    method, status, version = "GET", None, None
    open_request, proxy = bool(asked), ""
    for line in lines:
        request, answer, failed, linked = (
            _REQUEST.match(line), _STATUS.match(line), _FAILED.search(line), _CONNECTED.search(line),
        )  # fmt: skip
        if by_proxy := _PROXY.match(line):
            proxy = by_proxy["name"] or proxy or by_proxy["server"] or "a proxy"
        if linked is not None and not proxy:
            port = int(linked["port"])
        elif request is not None:
            if status is not None:
                yield _Exchange(method, path, port, status, "", None, version, proxy)
            proxy = proxy or ("a proxy" if request["proxy"] else "")
            method, path, status, version, open_request = request["method"], request["path"], None, None, True
        elif answer is not None:
            status, open_request = int(answer["status"]), True
        elif failed is not None:
            took = re.search(r"after (\d+) (?:ms|milliseconds)", failed["words"])
            error = _CURL_ERRORS.get(failed["code"], failed["words"][:60])
            seconds = int(took[1]) / 1000 if took else None
            # bytes that came before it gave up do not make an answer
            yield _Exchange(method, path, port, None, error, seconds, None, proxy)
            status, open_request = None, False
        elif found := _VERSION.search(line):
            version = found[1]
    if status is not None:
        yield _Exchange(method, path, port, status, "", None, version, proxy)
    elif open_request and path:
        yield _Exchange(method, path, port, None, "timeout", None, None, proxy)


def _read_client(lines: Sequence[str], _context: Context, draft: Draft) -> None:
    """What a client says of the time to its first byte, and of the bursts in which the rest came."""
    for line in _by_way(lines):
        first, burst = _DELAY.search(line), _BURST.search(line)
        if first is None and burst is None:
            continue
        chunks = [float(word) for word in (burst["chunks"].split("-") if burst is not None and burst["chunks"] else ())]
        draft.add(
            "client_views",
            ClientView(
                first_byte_s=_delay(first["first"], first["unit"]) if first is not None else None,
                burst_chunks=sum(chunks) / len(chunks) if chunks else None,
                burst_gap_s=_delay(burst["gap"], burst["unit"]) if burst is not None else None,
                text=line.strip().lstrip("# ")[:300],
            ),
        )


_CHANGE = re.compile(r"(?P<least>\d+(?:\.\d+)?)\s*(?:ms|s)?\s*(?:->|→)\s*(?P<most>\d+(?:\.\d+)?\s*(?:ms|s)\b)")


def _by_way(lines: Sequence[str]) -> Iterator[str]:
    """``TTFT 22 -> 287 ms`` tells of two ways: straight, and through what was put between."""
    for line in lines:
        if _DELAY.search(line) is None and _CHANGE.search(line) and "TTFT" in line:
            yield "direct: " + _CHANGE.sub(lambda m: m["least"] + (" ms" if m["most"].endswith("ms") else " s"), line)
            yield _CHANGE.sub(lambda m: m["most"], line)
        else:
            yield line


def _delay(number: str, unit: str) -> float:
    return float(number) * (0.001 if unit == "ms" else 1.0)


def _opens_client(line: str, context: Context) -> bool:
    if not any(word in line for word in ("first", "urst", "very", "each", "TTFT")):
        return False
    told = any(_DELAY.search(each) or _BURST.search(each) for each in _by_way([line]))
    return told and ("client" in line.lower() or context.name.startswith("client"))


FORMATS = (
    block(
        "HTTP probe",
        lambda line, _: _LINE.match(line) is not None,
        lambda line, _: _LINE.match(line) is not None,
        _read_lines,
        names=("http", "probe", "curl"),
    ),
    block(
        "curl -v",
        lambda line, _: _CURL.match(line) is not None,
        lambda line, _: not line.strip() or _CURL_GOES_ON.match(line) is not None or _VERSION.search(line) is not None,
        _read_curl,
    ),
    block("a client's times", _opens_client, _opens_client, _read_client, names=("client",)),
)
