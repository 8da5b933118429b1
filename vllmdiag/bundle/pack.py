"""Writes a bundle: snapshots, diagnosis, text for people, and the manifest that names them, as one tar.gz.

``save(pack([snapshot], host_redactor()), path)`` is all that other rooms need. The same snapshots and the same key give
the same bytes. The verdict and the text for people are made of the redacted snapshot, so nothing can leak beside it.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import os
import secrets
import tarfile
from collections.abc import Sequence
from datetime import datetime

from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.model.bundle import BundleFile, Manifest, Moment, Redaction
from vllmdiag.model.diagnosis import Diagnosis
from vllmdiag.model.errors import NotPermittedError, UsageError, VllmdiagError
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.render.document import to_json
from vllmdiag.render.page import Style
from vllmdiag.render.verdict import diagnosis_text

from .archive import DIAGNOSIS, MANIFEST, SERIES, SNAPSHOT
from .raw import raw_texts
from .redact import Redactor

_LEVEL = 6
_README = """\
A bundle of vllmdiag: what was seen of a vLLM server from outside, and the verdict.

  verdict.txt      the verdict, for people
  diagnosis.json   the same for programs
  snapshot.json    everything that was seen: vllmdiag diagnose --from FILE judges it again
  series/          earlier snapshots, oldest first
  raw/             the same facts as text
  manifest.json    what is in here, with sizes and SHA-256, and what is missing
"""


def pack(snapshots: Sequence[Snapshot], redactor: Redactor | None = None) -> bytes:
    """The archive.

    Args:
        snapshots: oldest first, at least one; the last one is judged.
        redactor: replaces what must not leave the host; None writes everything as it was seen.
    """
    kept = redactor.snapshots(snapshots) if redactor is not None else tuple(snapshots)
    names = [f"{SERIES}{number:04}.json" for number in range(1, len(kept))] + [SNAPSHOT]
    diagnoses = [diagnose(snapshot) for snapshot in kept]
    last = diagnoses[-1]
    parts: list[tuple[str, str, str]] = [
        ("README.txt", "what is what", _README),
        ("verdict.txt", "the verdict, for people", diagnosis_text(last, Style(verbose=1))),
        (DIAGNOSIS, "the verdict, for programs", to_json(last)),
        (SNAPSHOT, "everything that was seen", to_json(kept[-1])),
        *((name, "an earlier snapshot", to_json(one)) for name, one in zip(names[:-1], kept[:-1], strict=True)),
        *((f"raw/{name}", about, text) for name, about, text in raw_texts(kept[-1])),
    ]
    files = [(name, about, text.encode("utf-8", "replace")) for name, about, text in parts]
    manifest = Manifest(
        tool=last.tool,
        observed_at=last.observed_at,
        target=last.target,
        redaction=redactor.account if redactor is not None else Redaction(redacted=False),
        snapshots=tuple(map(_moment, names, diagnoses)),
        files=tuple(
            BundleFile(name=name, about=about, size=len(data), sha256=hashlib.sha256(data).hexdigest())
            for name, about, data in files
        ),
        missing=last.missing,
        cost=last.cost,
    )
    members = [(MANIFEST, to_json(manifest).encode()), *((name, data) for name, _, data in files)]
    return _archive(members, last.observed_at)


def default_name(snapshot: Snapshot) -> str:
    """``vllmdiag-20260301T120000Z.tar.gz``, after the end of its window."""
    return f"{_directory(snapshot.observed_at)}.tar.gz"


def save(data: bytes, path: str, *, force: bool = False) -> None:
    """Write a file whole or not at all, readable by its owner alone.

    Raises:
        UsageError: it exists and `force` is not given, or the directory is not there.
        NotPermittedError: the directory may not be written to.
        VllmdiagError: the file system is full.
    """
    temporary = os.path.join(os.path.dirname(path) or ".", f".{os.path.basename(path)}.{secrets.token_hex(4)}")
    try:
        if not force and os.path.lexists(path):
            raise FileExistsError
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            _put(temporary, path, force)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    except FileExistsError:
        raise UsageError(f"{path} exists", why="a bundle is never overwritten unasked", next="--force") from None
    except OSError as error:
        raise _not_written(path, error) from None


def _put(temporary: str, path: str, force: bool) -> None:
    """Give the file its name. A link, unlike a rename, fails where the name was taken meanwhile."""
    if not force:
        try:
            os.link(temporary, path)
            return
        except OSError as error:
            if error.errno not in {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}:  # without hard links
                raise
    os.replace(temporary, path)


def _not_written(path: str, error: OSError) -> VllmdiagError:
    what, why = f"cannot write {path}", str(error.strerror or error)
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return NotPermittedError(what, why=why, next="--output FILE in a directory that you may write to")
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        where = os.path.dirname(path) or "."
        return UsageError(what, why=f"{why}; nothing was left behind", next=f"df -h {where}, or --output elsewhere")
    return UsageError(what, why=why, next="--output FILE")


def _moment(file: str, diagnosis: Diagnosis) -> Moment:
    verdict = diagnosis.verdict
    return Moment(
        file=file,
        observed_at=diagnosis.observed_at,
        window_s=diagnosis.window_s,
        status=verdict.status,
        cause=verdict.cause,
        summary=verdict.summary,
    )


def _directory(observed_at: str) -> str:
    stamp = "".join(c for c in observed_at.partition(".")[0].removesuffix("Z") if c.isalnum())
    return f"vllmdiag-{stamp}Z" if stamp else "vllmdiag"


def _archive(members: Sequence[tuple[str, bytes]], observed_at: str) -> bytes:
    directory = _directory(observed_at)
    try:
        mtime = int(datetime.fromisoformat(observed_at.replace("Z", "+00:00")).timestamp())
    except ValueError:  # evidence that was pasted tells no time
        mtime = 0
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=packed, mode="wb", compresslevel=_LEVEL, mtime=mtime) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, data in members:
            member = tarfile.TarInfo(f"{directory}/{name}")
            member.size, member.mtime, member.mode = len(data), mtime, 0o600
            tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()
