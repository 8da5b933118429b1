"""A bundle comes back as it was written, is put down whole or not at all, and nothing hostile gets past the reader."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.diagnosis.scenario import Server
from tests.unit.diagnosis.test_causes import worker_stopped
from vllmdiag.bundle import archive, pack
from vllmdiag.bundle.archive import read_bundle
from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.model.errors import BadDataError, ExitCode, NotPermittedError, UsageError
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.render.document import to_json

Member = tuple[tarfile.TarInfo, bytes]


def snapshot() -> Snapshot:
    server = Server()
    worker_stopped(server)
    return server.snapshot()


def bundle() -> bytes:
    return pack.pack([snapshot()])


def members(data: bytes) -> list[Member]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(member, content.read()) for member in tar if (content := tar.extractfile(member)) is not None]


def written(content: list[Member], *, packed: bool = True) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, data in content:
            tar.addfile(member, io.BytesIO(data))
    return gzip.compress(raw.getvalue()) if packed else raw.getvalue()


def plain(name: str, data: bytes = b"") -> Member:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    return member, data


def refused(data: bytes) -> BadDataError:
    with pytest.raises(BadDataError) as raised:
        read_bundle(io.BytesIO(data))
    assert raised.value.exit_code == ExitCode.BAD_DATA
    assert raised.value.why
    return raised.value


# -- what is written comes back ------------------------------------------------------------------------------------


def test_what_was_seen_comes_back_and_is_judged_alike_byte_for_byte() -> None:
    first, last = msgspec.structs.replace(snapshot(), window_s=1.0), snapshot()
    seen = read_bundle(io.BytesIO(pack.pack([first, last])))
    assert seen.snapshots == (first, last)
    assert seen.diagnosis.decode() == to_json(diagnose(seen.snapshot))


def test_the_manifest_names_every_member_with_its_size_and_sum_and_stands_first() -> None:
    data = bundle()
    names = [member.name.split("/", 1)[1] for member, _ in members(data)]
    manifest = read_bundle(io.BytesIO(data)).manifest
    assert manifest is not None
    assert names == ["manifest.json", *(file.name for file in manifest.files)]
    assert {"snapshot.json", "diagnosis.json", "verdict.txt", "raw/ps.txt", "raw/ring.txt", "raw/ss.txt"} <= set(names)
    assert [(f.size, f.sha256) for f in manifest.files] == [
        (len(content), hashlib.sha256(content).hexdigest()) for _, content in members(data)[1:]
    ]
    assert manifest.redaction.redacted is False
    assert manifest.snapshots[-1].cause == "process-stopped"


def test_the_same_snapshots_give_the_same_bytes() -> None:
    assert bundle() == bundle()


def test_a_bare_snapshot_is_read_too_also_behind_a_mark_of_utf8() -> None:
    text = to_json(snapshot()).encode()
    assert read_bundle(io.BytesIO(text)).snapshot == snapshot()
    assert read_bundle(io.BytesIO(b"\xef\xbb\xbf" + text)).snapshot == snapshot()


def test_an_archive_that_somebody_has_unzipped_is_read_too() -> None:
    assert read_bundle(io.BytesIO(gzip.decompress(bundle()))).snapshot == snapshot()


def test_fields_of_a_later_minor_version_are_passed_over() -> None:
    text = to_json(snapshot()).replace('"tool":', '"later": {"a": [1]}, "tool":', 1).encode()
    assert read_bundle(io.BytesIO(text)).snapshot == snapshot()


def test_the_ring_is_written_in_the_form_that_people_paste() -> None:
    text = next(content for member, content in members(bundle()) if member.name.endswith("raw/ring.txt")).decode()
    assert "role=broadcast writer_pid=200 reader_pids=300,301" in text
    assert "\nslot 5: 1 1 0\n" in text


# -- what is hostile or broken -------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_half_a_bundle_is_told_to_be_cut_off(share: float) -> None:
    data = bundle()
    assert "damaged or cut off" in refused(data[: int(len(data) * share)]).why


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"\x7fELF\0\0\0", "neither an archive"),
        ("{}".encode("utf-16"), "neither an archive"),
        (b'{"schema": "vllmdiag.snapshot/1", "processes": 3}', "JSON"),
        (b'{"schema": "vllmdiag.snapshot/1"', "JSON"),
        (b'{"schema": "vllmdiag.snapshot/1", "x": ' + b"[" * 100_000, "JSON"),
        (b'{"schema": "vllmdiag.diagnosis/1"}', "vllmdiag.diagnosis/1, not vllmdiag.snapshot/1"),
        (
            b'{"schema": "vllmdiag.snapshot/7"}',
            "it is vllmdiag.snapshot/7, and this vllmdiag reads vllmdiag.snapshot/1",
        ),
        (b'{"schema": 5}', "JSON"),
        (b"{}", "without a schema"),
        (gzip.compress(b"not a tar"), "damaged"),
    ],
)
def test_something_else_is_called_what_it_is(data: bytes, why: str) -> None:
    assert why in refused(data).why


@pytest.mark.parametrize(
    "name", ["d/../../evil", "/etc/passwd", "../evil", "evil", "d//evil", "d/../snapshot.json"], ids=repr
)
def test_a_member_that_lies_elsewhere_is_refused(name: str) -> None:
    assert "does not lie in the directory" in refused(written([*members(bundle()), plain(name)])).why


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]
)
def test_links_devices_and_the_like_are_refused(kind: bytes) -> None:
    member = tarfile.TarInfo("d/snapshot.json")
    member.type, member.linkname = kind, "/etc/passwd"
    assert "no plain file" in refused(written([*members(bundle())[:1], (member, b"")])).why


def test_a_sparse_member_which_may_be_larger_than_it_looks_is_refused() -> None:
    member, data = plain("d/snapshot.json", b"x")
    member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 60)}
    refused(written([*members(bundle())[:1], (member, data)]))


def _changed(content: list[Member]) -> list[Member]:
    return [(m, data.replace(b"T", b"S") if m.name.endswith("ps.txt") else data) for m, data in content]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_changed, "another SHA-256"),
        (lambda content: content[:-1], "is missing, though the manifest names it"),
        (lambda content: [*content, content[-1]], "stands in it twice"),
        (lambda content: [*content, plain("d/more.txt", b"x")], "not in its manifest"),
        (lambda content: content[1:], "manifest.json does not stand first"),
        (lambda content: [], "manifest.json does not stand first"),
    ],
    ids=["changed", "missing", "twice", "more", "no manifest", "nothing"],
)
def test_a_bundle_that_is_not_what_its_manifest_says_is_refused(
    change: Callable[[list[Member]], list[Member]], why: str
) -> None:
    assert why in refused(written(change(members(bundle())))).why


def test_a_manifest_of_a_later_major_version_says_which_program_can_read_it() -> None:
    content = members(bundle())
    text = content[0][1].replace(b"vllmdiag.bundle/1", b"vllmdiag.bundle/2")
    content[0] = plain(content[0][0].name, text)
    error = refused(written(content))
    assert "vllmdiag.bundle/2" in error.why
    assert error.next == "use the vllmdiag that wrote it"


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4), st.booleans())
@settings(max_examples=60)
def test_whatever_bytes_are_broken_it_is_read_or_refused_and_nothing_else(
    flips: list[tuple[int, int]], unzipped: bool
) -> None:
    data = bytearray(gzip.decompress(bundle()) if unzipped else bundle())
    for at, byte in flips:
        data[at % len(data)] = byte
    with contextlib.suppress(BadDataError):
        assert read_bundle(io.BytesIO(bytes(data))).snapshot == snapshot()


def test_a_bomb_is_recognised_by_its_density_before_it_has_gone_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_RATIO_COUNTS_FROM", 1 << 20)
    bomb = written([*members(bundle())[:1], plain("d/snapshot.json", b" " * (8 << 20))])
    assert "times its size" in refused(bomb).why


def test_what_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bundle()
    monkeypatch.setattr(archive, "MAX_MEMBER_BYTES", 10_000)
    assert "larger than" in refused(data).why
    assert "larger than" in refused(b'{"schema": "vllmdiag.snapshot/1", "tool": "' + b"x" * 20_000 + b'"}').why
    monkeypatch.setattr(archive, "MAX_MEMBER_BYTES", 1 << 20)
    monkeypatch.setattr(archive, "MAX_TOTAL_BYTES", 30_000)
    assert "holds more than" in refused(data).why


def test_too_many_members_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bundle()
    monkeypatch.setattr(archive, "MAX_MEMBERS", 5)
    assert "more than 5 members" in refused(data).why


def test_reading_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.tar.gz").write_bytes(bundle())
    monkeypatch.chdir(tmp_path)
    read_bundle("b.tar.gz")
    with pytest.raises(BadDataError):
        read_bundle(io.BytesIO(written([*members(bundle()), plain("d/../../evil")])))
    assert [path.name for path in tmp_path.iterdir()] == ["b.tar.gz"]


def test_a_file_that_is_not_there_and_a_directory_are_told(tmp_path: Path) -> None:
    for path in (tmp_path / "none.tar.gz", tmp_path):
        with pytest.raises(BadDataError, match="cannot read"):
            read_bundle(path)


# -- how it is put down --------------------------------------------------------------------------------------------


def test_a_bundle_is_its_owners_alone_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    pack.save(b"data", str(tmp_path / "b"))
    assert (tmp_path / "b").read_bytes() == b"data"
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [tmp_path / "b"]


def test_a_file_is_overwritten_only_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "b"
    path.write_bytes(b"old")
    with pytest.raises(UsageError, match="exists") as raised:
        pack.save(b"new", str(path))
    assert raised.value.next == "--force"
    assert path.read_bytes() == b"old"
    pack.save(b"new", str(path), force=True)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_that_was_taken_meanwhile_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b"
    sync = os.fsync

    def another_comes_first(fd: int) -> None:
        path.write_bytes(b"theirs")
        sync(fd)

    monkeypatch.setattr(os, "fsync", another_comes_first)
    with pytest.raises(UsageError, match="exists"):
        pack.save(b"ours", str(path))
    assert path.read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_file_system_leaves_the_old_file_and_says_so(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b"
    path.write_bytes(b"old")

    def full(_fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="cannot write") as raised:
        pack.save(b"new", str(path), force=True)
    assert "nothing was left behind" in raised.value.why
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_that_is_not_there_or_may_not_be_written_to_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        pack.save(b"", str(tmp_path / "none" / "b"))

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(NotPermittedError):
        pack.save(b"", str(tmp_path / "b"))
