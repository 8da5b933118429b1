"""Whoever pastes the evidence of a hang gets its cause, whichever way it was pasted.

A case is a directory: files of evidence, and ``expected.json`` with the cause and layer of the verdict and the causes
that must not be given for it. Most are re-created after public reports; hosts, pids and numbers are invented.

Some causes have no case, for no text that people paste shows them: ``zmq-io-silent`` takes a probe of our own,
``node-silent`` and ``node-restarted`` a look at all nodes of a job at once, and ``ipc-path-removed`` is no verdict but
a note beside one, told by paths that a live look tries itself.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from vllmdiag.bundle.triage import triage
from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.model.diagnosis import Diagnosis

HERE = Path(__file__).parent


class Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"forbidden": "not"}):
    """What must be said of a case."""

    cause: str
    """Of the verdict; ``unknown`` where the evidence is not enough: then the layer says where to look."""
    layer: int
    forbidden: tuple[str, ...] = ()
    """Causes that no finding may stand for by itself."""
    pid: int | None = None
    """Subject of the verdict, where the case is about who it is."""
    vllm: str = ""
    after: str = ""
    """The public report that it was made after; empty for one of our own."""


CASES = sorted(path.parent for path in HERE.glob("*/expected.json"))
ids = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def _files(case: Path) -> list[Path]:
    return sorted(path for path in case.iterdir() if path.name != "expected.json")


def _judge(*paths: Path, stdin: bytes = b"") -> Diagnosis:
    return diagnose(triage([str(path) for path in paths] or ["-"], io.BytesIO(stdin)).snapshot())


def _as_expected(case: Path, found: Diagnosis) -> None:
    expected = msgspec.json.decode((case / "expected.json").read_bytes(), type=Expected)
    verdict = found.verdict
    assert (verdict.cause, verdict.layer) == (expected.cause, expected.layer), verdict.summary
    blamed = {f.cause for f in found.findings if f.severity != "info" and f.folded_into is None}
    assert not blamed & set(expected.forbidden)
    if expected.pid is not None:
        assert verdict.subject.pid == expected.pid


@ids
def test_files(case: Path) -> None:
    _as_expected(case, _judge(*_files(case)))


@ids
def test_files_in_another_order(case: Path) -> None:
    _as_expected(case, _judge(*reversed(_files(case))))


def _report(case: Path) -> str:
    """A bug report with every piece in a fence of its own, some of them folded away."""
    parts = ["## Your current environment", "", "It hangs. See below.", ""]
    for number, path in enumerate(_files(case)):
        text = path.read_text().rstrip("\n")
        fence = ["```text" if number % 2 else "```", *text.split("\n"), "```"]
        if number % 3:
            parts += ["<details>", f"<summary>{path.name}</summary>", "", *fence, "", "</details>", ""]
        else:
            parts += [f"### {path.name}", "", *fence, ""]
    return "\n".join(parts) + "\n"


def _quoted(report: str) -> str:
    return "Somebody wrote:\n\n" + "".join(f"> {line}\n" for line in report.split("\n"))


def _coloured(report: str) -> str:
    return "".join(
        f"\x1b[0;32m{line}\x1b[0m\n" if line and line[0] not in "`~" else f"{line}\n" for line in report.split("\n")
    )


PASTED: dict[str, Callable[[str], bytes]] = {
    "markdown": str.encode,
    "line ends of Windows": lambda report: report.replace("\n", "\r\n").encode(),
    "quoted mail": lambda report: _quoted(report).encode(),
    "colours of a terminal": lambda report: _coloured(report).encode(),
    "UTF-16": lambda report: report.encode("utf-16"),
    "compressed": lambda report: gzip.compress(report.encode()),
}


@ids
@pytest.mark.parametrize("form", PASTED)
def test_a_report_on_standard_input(case: Path, form: str) -> None:
    _as_expected(case, _judge(stdin=PASTED[form](_report(case))))


@ids
def test_an_archive(case: Path, tmp_path: Path) -> None:
    packed = tmp_path / "evidence.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for path in _files(case):
            archive.add(path, f"evidence/{path.name}")
    _as_expected(case, _judge(packed))


@ids
def test_a_zip_file(case: Path, tmp_path: Path) -> None:
    packed = tmp_path / "evidence.zip"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in _files(case):
            archive.write(path, f"evidence/{path.name}")
    _as_expected(case, _judge(packed))
