"""The page itself: what it says, that it is whole, and that nothing from the machine can become a part of it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from tests.unit.render import samples
from tests.unit.report import pages
from tests.unit.report.reading import Reading
from vllmdiag.diagnosis.report import report_of
from vllmdiag.model.report import Report
from vllmdiag.render.html import report_html

GOLDEN = Path(__file__).parent / "golden" / "critical.txt"
ALL = sorted(pages.PAGES)


@cache
def page(name: str) -> str:
    return report_html(pages.PAGES[name](), "9.9.9")


@pytest.fixture(params=ALL)
def each(request: pytest.FixtureRequest) -> tuple[str, Reading]:
    html = page(request.param)
    return html, Reading(html)


def test_what_the_page_says_is_what_it_said() -> None:
    assert Reading(page("critical")).text() == GOLDEN.read_text(encoding="utf-8")


def test_the_verdict_comes_first() -> None:
    lines = Reading(page("critical")).text().splitlines()
    assert lines[0].startswith("CRITICAL process-stopped")
    assert next(line for line in lines if line.startswith("# ")) == "# Worker_TP1 (pid 301) is stopped (T)"


def test_the_page_is_whole_and_ids_stand_once(each: tuple[str, Reading]) -> None:
    html, reading = each
    ids = Counter(a["id"] for _, a in reading.elements if "id" in a)
    assert html.startswith("<!doctype html>")
    assert [name for name, n in ids.items() if n > 1] == []
    for _, attributes in reading.elements:
        refers = (attributes.get("aria-labelledby") or "").split()
        refers += [(attributes.get("href") or "#")[1:]] if attributes.get("href") else []
        assert set(refers) <= set(ids)


def test_nothing_runs_and_nothing_is_loaded(each: tuple[str, Reading]) -> None:
    _, reading = each
    tags = {tag for tag, _ in reading.elements}
    assert tags & {"script", "img", "link", "iframe", "object", "embed", "form", "base"} == set()
    for _, attributes in reading.elements:
        assert not [
            name for name in attributes if name.startswith("on") or name in ("src", "srcset", "style", "xlink:href")
        ]
        assert (attributes.get("href") or "#").startswith("#")


def test_the_policy_allows_the_one_style_sheet_and_nothing_else(each: tuple[str, Reading]) -> None:
    html, reading = each
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    (policy,) = [a["content"] for a in reading.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert "url(" not in style
    assert "@import" not in style


def test_headings_tables_and_drawings_can_be_read_aloud(each: tuple[str, Reading]) -> None:
    _, reading = each
    levels = [int(tag[1]) for tag, _ in reading.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert all("scope" in attributes for attributes in reading.all("th"))
    drawings = reading.all("svg")
    told = [a for a in drawings if a.get("aria-hidden") != "true"]
    assert all(a["role"] == "img" and a["aria-labelledby"] for a in told)
    assert len(reading.all("desc")) == len(told)
    assert reading.all("html")[0]["lang"] == "en"


def test_no_text_from_the_machine_becomes_markup_or_steers_the_reader() -> None:
    html = page("hostile")
    assert "&lt;script&gt;alert(1)" in html
    assert "<script" not in html
    assert "<img" not in html
    assert not re.search("[\x00-\x09\x0b-\x1f\u202a-\u202e]", html)
    assert [a for _, a in Reading(html).elements if any("alert" in name for name in a)] == []


def test_a_page_of_384_ranks_is_no_larger_than_a_photograph_and_names_the_odd_one() -> None:
    html = page("many")
    text = Reading(html).text()
    assert len(html) < 200_000
    assert "Worker_TP0-216,218-383 (383)" in text
    assert "A Worker_TP217 ! stopped (T)" in text
    assert "readers 0-216,218-383" in text
    assert "384 alike" in text


def test_384_ranks_of_which_each_does_something_else_are_all_there() -> None:
    text = Reading(page("all-different")).text()
    assert all(f"in step_{k} (" in text for k in range(pages.MANY))


def test_blind_is_never_shown_as_healthy() -> None:
    text = Reading(page("blind")).text()
    assert text.startswith("UNKNOWN")
    assert "## What could not be seen" in text
    assert "sudo vllmdiag diagnose 100" in text


def test_a_healthy_server_is_called_healthy_and_nobody_is_marked() -> None:
    html = page("healthy")
    assert Reading(html).text().startswith("OK idle")
    assert "first blocker" not in Reading(html).text()


def test_what_the_root_explains_is_folded_under_it() -> None:
    report = Report(diagnosis=samples.critical(), view=samples.instance())
    findings = Reading(report_html(report, "")).text().partition("## Findings")[2].splitlines()
    start = findings.index("Explained by", 0)
    assert findings[start + 1] == "process-stopped 2 kinds"
    assert "collective-waits 4 gpu Worker_TP0 waits in all_reduce · also Worker_TP2-3" in findings


def test_a_recording_alone_shows_the_lag_and_judges_nothing() -> None:
    text = Reading(page("recorded")).text()
    assert text.splitlines()[0] == "A recording of 1 ring · vllmdiag"
    assert "Worker_TP1 at most 10, at the end 10" in text
    assert "Worker_TP0 at most 0, at the end 0" in text
    assert "CRITICAL" not in text


def test_a_recording_of_a_ring_of_the_page_is_drawn_beside_its_grid() -> None:
    report = pages.critical()
    (trace,) = pages.recorded().traces
    (own,) = [ring for ring in report.view.rings if ring.queue == "broadcast ring"] if report.view else []
    both = msgspec.structs.replace(report, traces=(*report.traces, msgspec.structs.replace(trace, segment=own.segment)))
    text = Reading(report_html(both, "")).text()
    assert text.count("Unread by reader, night.rec") == 1
    assert text.count("Unread by reader, the window") == 1


def test_a_snapshot_without_vllm_gives_a_page_too() -> None:
    from vllmdiag.model.snapshot import Snapshot

    assert Reading(report_html(report_of(Snapshot()), "")).text().startswith("UNKNOWN")


def test_an_empty_recording_gives_a_page_too() -> None:
    assert "A recording of 0 rings" in Reading(report_html(Report(), "")).text()


def test_the_same_report_gives_the_same_page() -> None:
    assert report_html(pages.critical(), "9.9.9") == page("critical")


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(Reading(page("critical")).text(), encoding="utf-8")
