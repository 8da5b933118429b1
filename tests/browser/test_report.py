"""The page of `report` in a real Chromium, opened as a file: laid out without overflow, legible, silent, printable.

With VLLMDIAG_PICTURES=DIR every page is left there as a picture, to be looked at.
"""

from __future__ import annotations

import io
import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from pypdf import PdfReader

from tests.browser.chromium import Tab, browser
from tests.unit.report import pages
from vllmdiag.render.html import report_html

pytestmark = pytest.mark.needs("chromium")

CHECKS = Path(__file__).with_name("checks.js").read_text(encoding="utf-8").partition("\n")[2]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("pages")
    for name, report in pages.PAGES.items():
        (directory / f"{name}.html").write_text(report_html(report(), "0.1.0"), encoding="utf-8")
    return {name: directory / f"{name}.html" for name in pages.PAGES}


VIEWS = [
    pytest.param(name, width, dark, id=f"{name}-{width}-{'dark' if dark else 'light'}")
    for name in sorted(pages.PAGES)
    for width in (360, 1400)
    for dark in (False, True)
    if not (dark and name == "all-different")  # large, and of the colours of the others
]


@pytest.mark.parametrize(("name", "width", "dark"), VIEWS)
def test_a_page_fits_the_window_can_be_read_and_is_silent(
    tab: Tab, files: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    tab.open(files[name], width=width, dark=dark)
    if directory := os.environ.get("VLLMDIAG_PICTURES"):
        Path(directory, f"{name}-{width}-{'dark' if dark else 'light'}.png").write_bytes(tab.picture())
    assert tab.complaints() == []
    assert tab.requests() == [files[name].as_uri()]
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    assert tab.value("innerWidth") <= width
    wrong = tab.value(f"({CHECKS.strip()})({width})")
    if name == "hostile":  # a word of two hundred letters has to be broken somewhere
        del wrong["broken"]
    assert {kind: found for kind, found in wrong.items() if found} == {}


def test_the_two_dresses_differ(tab: Tab, files: dict[str, Path]) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    tab.open(files["critical"], width=1400)
    light = tab.value(ground)
    tab.open(files["critical"], width=1400, dark=True)
    assert tab.value(ground) != light


@pytest.mark.parametrize(("width", "shown"), [(360, "narrow"), (1400, "wide")])
def test_one_of_the_two_drawings_is_shown(tab: Tab, files: dict[str, Path], width: int, shown: str) -> None:
    tab.open(files["critical"], width=width)
    drawn = (
        "[...document.querySelectorAll('.graph svg')].filter(s => s.getClientRects().length).map(s => s.classList[0])"
    )
    assert tab.value(drawn) == [shown]


def test_the_verdict_stands_above_the_fold_on_a_telephone(tab: Tab, files: dict[str, Path]) -> None:
    tab.open(files["many"], width=360)
    assert tab.value("document.querySelector('h1').getBoundingClientRect().bottom") < 400
    assert tab.value("document.querySelector('h1').innerText") == "Worker_TP217 (pid 517) is stopped (T)"


def test_what_is_folded_opens_without_a_script(tab: Tab, files: dict[str, Path]) -> None:
    tab.open(files["critical"], width=1400)
    last = "[...document.querySelectorAll('details:not([open])')][0]"
    tab.value(f"{last}.scrollIntoView()")
    x, y = tab.value(f"(b => [b.x + 20, b.y + 8])({last}.querySelector('summary').getBoundingClientRect())")
    before = tab.value("document.querySelectorAll('details[open]').length")
    for kind in ("mousePressed", "mouseReleased"):
        tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    assert tab.value("document.querySelectorAll('details[open]').length") == before + 1


def test_an_attack_in_the_evidence_does_nothing(tab: Tab, files: dict[str, Path]) -> None:
    tab.open(files["hostile"], width=1400)
    assert tab.value("document.querySelectorAll('script, img, iframe').length") == 0
    assert "<script>alert(1)</script>" in tab.value("document.querySelector('h1').textContent")


def test_what_would_load_something_is_refused_by_the_policy(tab: Tab, files: dict[str, Path], tmp_path: Path) -> None:
    """The second line of defence: a page into which something was put after all."""
    page = files["critical"].read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    broken.write_text(page.replace("<main>", "<main><script>window.ran = 1</script><img src='http://127.0.0.1:9/x'>"))
    tab.open(broken, width=1400)
    assert tab.value("window.ran === undefined")
    tab.wait_for("Network.loadingFailed")
    assert tab.requests() == [broken.as_uri()]
    assert len(tab.complaints()) >= 2


@pytest.mark.parametrize("name", ["critical", "many", "recorded"])
def test_on_paper_everything_is_there_what_was_folded_too(tab: Tab, files: dict[str, Path], name: str) -> None:
    tab.open(files[name], width=1400, dark=True)
    folded = tab.value(
        "[...document.querySelectorAll('details:not([open]) li')].map(e => e.textContent.trim())[0] || ''"
    )
    printed = "\n".join(page.extract_text() for page in PdfReader(io.BytesIO(tab.pdf())).pages)
    text = " ".join(unicodedata.normalize("NFKC", printed).split())  # fonts have a letter of their own for "fi"
    assert " ".join(tab.value("document.querySelector('h1').textContent").split())[2:] in text
    assert folded in text
    assert text.count("✓ ok") == tab.value("[...document.querySelectorAll('#layers td.good')].length")
    assert "one file, no script" in text
