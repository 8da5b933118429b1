"""Damaged and hostile evidence: a clear message, the rest is judged, nothing is written."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllmdiag.bundle import inputs
from vllmdiag.bundle.triage import Triage, triage
from vllmdiag.cli.main import main
from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.model.base import Missing
from vllmdiag.model.errors import BadDataError, TargetError
from vllmdiag.model.process import Frame, Process

STOPPED = """  PID  PPID STAT ELAPSED COMMAND
  100     1 Ssl     9000 /usr/bin/python3 /usr/local/bin/vllm serve org/model --tensor-parallel-size 2
  200   100 Sl      8990 VLLM::EngineCore
  300   200 Rl      8980 VLLM::Worker_TP0
  301   200 Tl      8980 VLLM::Worker_TP1
"""


def read(*paths: Path, stdin: bytes = b"") -> Triage:
    return triage([str(path) for path in paths] or ["-"], io.BytesIO(stdin))


def cause(done: Triage) -> str:
    return diagnose(done.snapshot()).verdict.cause


def frames(process: Process) -> tuple[Frame, ...]:
    """Of the first thread in the first dump."""
    (dump,) = process.stacks
    assert not isinstance(dump.threads, Missing)
    return dump.threads[0].frames


def holes(done: Triage) -> str:
    return "\n".join(f"{hole.what}: {hole.why}" for hole in done.snapshot().missing)


def archive(*members: tuple[str, bytes], **special: bytes) -> bytes:
    """A tar.gz with files of these names; `special` maps a name to a type of member."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, kind in special.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gz", "bz2", "xz"])
def test_one_compressed_file_is_read_as_what_it_is(pack: Callable[[bytes], bytes]) -> None:
    assert cause(read(stdin=pack(STOPPED.encode()))) == "process-stopped"


def test_an_archive_that_ends_too_early_is_judged_by_what_it_holds() -> None:
    noise = bytes(str(n % 251).encode()[0] for n in range(400_000))
    whole = archive(("ps.txt", STOPPED.encode()), ("z.bin", noise * 3))
    done = read(stdin=whole[: len(whole) * 3 // 4])
    assert cause(done) == "process-stopped"
    assert "damaged" in holes(done)


def test_names_that_lead_out_of_an_archive_are_left_out_and_named(tmp_path: Path) -> None:
    inside = tmp_path / "work"
    inside.mkdir()
    done = read(stdin=archive(("../../evil.txt", b"x"), ("/etc/cron.d/evil", b"x"), ("ps.txt", STOPPED.encode())))
    assert cause(done) == "process-stopped"
    assert holes(done).count("leads out of the archive") == 2
    assert list(tmp_path.iterdir()) == [inside]


def test_links_and_devices_of_an_archive_are_left_out_and_named() -> None:
    special = {"link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "null": tarfile.CHRTYPE, "pipe": tarfile.FIFOTYPE}
    done = read(stdin=archive(("ps.txt", STOPPED.encode()), **special))
    assert cause(done) == "process-stopped"
    assert holes(done).count("a link or a device") == 4


def test_a_bomb_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_FREE_BYTES", 1 << 20)
    bomb = archive(("ps.txt", STOPPED.encode()), ("zeros.txt", (b"0" * 1023 + b"\n") * (8 << 10)))
    done = read(stdin=bomb)
    assert cause(done) == "process-stopped"
    assert "it unpacks to more than" in holes(done)


def test_a_zip_bomb_is_refused_by_what_it_promises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(inputs, "_FREE_BYTES", 1 << 20)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("zeros.txt", (b"0" * 1023 + b"\n") * (8 << 10))
    with pytest.raises(BadDataError) as caught:
        read(tmp_path / "bomb.zip")
    assert "it unpacks to more than" in caught.value.why


def test_an_archive_in_an_archive_is_left_out() -> None:
    inner = archive(("ps.txt", STOPPED.encode()))
    done = read(stdin=archive(("ps.txt", STOPPED.encode()), ("inner.tar.gz", inner)))
    assert "an archive inside an archive" in holes(done)


def test_links_of_a_directory_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "ps.txt").write_text(STOPPED)
    (tmp_path / "passwd").symlink_to("/etc/passwd")
    done = read(tmp_path)
    assert cause(done) == "process-stopped"
    assert "passwd: left out: a link" in holes(done)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"])
def test_any_usual_encoding(encoding: str) -> None:
    text = "# Prozeßliste\n" + STOPPED if encoding == "latin-1" else STOPPED
    assert cause(read(stdin=text.encode(encoding))) == "process-stopped"


def test_a_binary_file_is_named_and_the_rest_is_judged(tmp_path: Path) -> None:
    (tmp_path / "core").write_bytes(b"\x7fELF" + bytes(range(256)) * 64)
    (tmp_path / "ps.txt").write_text(STOPPED)
    done = read(tmp_path)
    assert cause(done) == "process-stopped"
    assert "core: not understood: a binary file" in holes(done)


def test_what_is_not_understood_is_listed_with_its_first_line() -> None:
    done = read(stdin=(STOPPED + "\nquux 17 of 4711 frobnicated\n").encode())
    assert [stretch.first for stretch in done.unknown] == ["quux 17 of 4711 frobnicated"]
    assert "quux 17 of 4711 frobnicated" in holes(done)


def test_the_words_around_the_fences_of_a_report_are_no_evidence() -> None:
    report = f"I ran the server.\n\nIt hangs!\n\n```\n{STOPPED}```\n\nThanks for any help.\n"
    done = read(stdin=report.encode())
    assert cause(done) == "process-stopped"
    assert done.unknown == []


def test_half_a_dump_gives_the_threads_that_are_whole() -> None:
    dump = (
        'Process 7: VLLM::EngineCore\nThread 7 (idle): "MainThread"\n'
        "    wait (threading.py:355)\n    get (queue.py:171)\n    _process_input"
    )
    (process,) = read(stdin=dump.encode()).snapshot().processes
    assert [frame.name for frame in frames(process)] == ["wait", "get"]


def test_lines_that_a_tracker_has_wrapped_are_joined() -> None:
    dump = (
        'Process 7: VLLM::Worker_TP0\nThread 7 (active): "MainThread"\n'
        "    acquire_read (vllm/distributed/device_communicators/\nshm_broadcast.py:794)\n"
        "    worker_busy_loop\n(vllm/v1/executor/multiproc_executor.py:973)\n"
    )
    (process,) = read(stdin=dump.encode()).snapshot().processes
    assert [(f.name, f.file, f.line) for f in frames(process)] == [
        ("acquire_read", "vllm/distributed/device_communicators/shm_broadcast.py", 794),
        ("worker_busy_loop", "vllm/v1/executor/multiproc_executor.py", 973),
    ]


def test_arguments_and_locals_of_a_dump_are_not_kept() -> None:
    dump = (
        'Process 7: VLLM::EngineCore\nThread 7 (active): "MainThread"\n    step (vllm/v1/engine/core.py:1)\n'
        '        Arguments:\n            self: <EngineCore at 0x7f>\n        Locals:\n            prompt: "my secret"\n'
        "    run_busy_loop (vllm/v1/engine/core.py:2)\n"
    )
    done = read(stdin=dump.encode())
    assert "secret" not in repr(done.snapshot())
    assert [frame.name for frame in frames(done.snapshot().processes[0])] == ["step", "run_busy_loop"]


def test_secrets_of_an_environment_are_not_kept() -> None:
    done = read(stdin=b"# /proc/7/environ\nVLLM_API_KEY=sk-1\nHF_TOKEN=hf_2\nhttp_proxy=http://u:pw@p\nVLLM_PORT=5\n")
    assert not {"sk-1", "hf_2", "pw@p"} & set(repr(done.snapshot()).replace("'", " ").split())
    assert "u:pw" not in repr(done.snapshot())
    assert done.snapshot().processes[0].environ["VLLM_PORT"] == "5"


@pytest.mark.parametrize("text", ["", "\n\n", "hello\nworld\n", "{}", "\0\1\2\3" * 50])
def test_nothing_to_judge_is_an_error_that_says_so(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.txt").write_text(text)
    assert main(["triage", str(tmp_path / "x.txt")]) == 65
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nothing in x.txt is evidence" in captured.err


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TargetError):
        read(tmp_path / "none")


@settings(max_examples=40)
@given(st.binary(max_size=400))
def test_any_bytes_are_read_without_a_crash(noise: bytes) -> None:
    text = STOPPED.encode() * 4 + b"\n" + noise.replace(b"\0", b"")
    assert read(stdin=text).snapshot().process(301) is not None


@settings(max_examples=40)
@given(st.text(max_size=400), st.integers(0, 3))
def test_any_text_before_a_table_is_read_without_a_crash(noise: str, blank: int) -> None:
    done = read(stdin=(noise + "\n" * (blank + 1) + STOPPED).encode("utf-8", "replace"))
    diagnose(done.snapshot())
