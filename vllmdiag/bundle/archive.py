"""Reads a bundle that `capture` wrote (or a bare snapshot), from anybody, without trusting a byte of it.

For other rooms: ``read_bundle(path or stream)`` gives a `Bundle`; ``bundle.snapshot`` goes into the judge and the view
as a live one would. `bundle.pack` writes: ``save(pack([snapshot], host_redactor()), path)``.

Nothing is unpacked to disk: members are read one after the other into memory, below the limits that stand here, and
only plain files that the manifest names with their size and SHA-256 are accepted.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, TypeVar

import msgspec

from vllmdiag.model.bundle import BUNDLE_SCHEMA, BundleFile, Manifest
from vllmdiag.model.errors import BadDataError, NotPermittedError
from vllmdiag.model.snapshot import SNAPSHOT_SCHEMA, Snapshot

MANIFEST = "manifest.json"
SNAPSHOT = "snapshot.json"
DIAGNOSIS = "diagnosis.json"
SERIES = "series/"
"""Earlier snapshots: ``series/0001.json`` ..."""

MAX_MEMBERS = 2000
MAX_MEMBER_BYTES = 256 << 20
MAX_TOTAL_BYTES = 512 << 20
MAX_RATIO = 200
"""Honest bundles unpack to 10 to 60 times their size."""
_RATIO_COUNTS_FROM = 32 << 20
"""So little may be as dense as it likes."""

_GZIP = b"\x1f\x8b"
_PEEKED = 4096
_TAR_MAGIC = (257, b"ustar")
_TAR_DAMAGE = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError, OverflowError)

T = TypeVar("T")


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """What a file of evidence held."""

    snapshots: tuple[Snapshot, ...]
    """Oldest first, at least one."""
    manifest: Manifest | None = None
    """None of a bare snapshot."""
    diagnosis: bytes = b""
    """``diagnosis.json`` as it was written; empty of a bare snapshot."""

    @property
    def snapshot(self) -> Snapshot:
        """The last one: the one that is judged."""
        return self.snapshots[-1]


def read_bundle(source: str | os.PathLike[str] | BinaryIO) -> Bundle:
    """Read a bundle or the JSON of one snapshot.

    Args:
        source: a path, or a binary stream, which is read to its end and left open.

    Raises:
        BadDataError: it is damaged, hostile, of a later major version, or something else.
        NotPermittedError: the file may not be read.
    """
    if not isinstance(source, str | os.PathLike):
        return _read(source, "standard input" if getattr(source, "name", "") == "<stdin>" else "the stream")
    name = os.fspath(source)
    try:
        with open(name, "rb") as stream:
            return _read(stream, name)
    except PermissionError as error:
        raise NotPermittedError(f"cannot read {name}", why=str(error.strerror), next=f"ls -l {name}") from None
    except OSError as error:
        raise BadDataError(f"cannot read {name}", why=str(error.strerror or error), next="name a bundle") from None


def is_bundle(head: bytes) -> bool:
    """Whether a file that begins with these bytes (512 are enough) may be an archive that `read_bundle` reads."""
    at, magic = _TAR_MAGIC
    return head.startswith(_GZIP) or head[at : at + len(magic)] == magic


def captured(path: str, stdin: io.BufferedReader) -> Bundle | None:
    """The bundle, where a file (``-``: standard input) is an archive that `vllmdiag capture` wrote; None for any other.

    Nothing of standard input is taken unless it is one.

    Raises:
        BadDataError: it is one, and damaged.
    """
    if path == "-":
        return read_bundle(stdin) if _begins_with_manifest(stdin.peek(_PEEKED)[:_PEEKED]) else None
    try:
        with open(path, "rb") as stream:
            head = stream.read(_PEEKED)
    except OSError:
        return None
    return read_bundle(path) if _begins_with_manifest(head) else None


def _begins_with_manifest(head: bytes) -> bool:
    """The first member of the archive that begins so is a manifest."""
    if head.startswith(_GZIP):
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, 512)
        except zlib.error:
            return False
    return is_bundle(head) and head[:100].rstrip(b"\0").rpartition(b"/")[2] == MANIFEST.encode()


def _read(stream: BinaryIO, name: str) -> Bundle:
    head = stream.read(512)
    whole = _Joined(head, stream)
    if head.startswith(_GZIP):
        return _read_archive(_Limited(gzip.GzipFile(fileobj=whole, mode="rb"), name, whole), name)
    if is_bundle(head):
        return _read_archive(_Limited(whole, name), name)
    if not head.strip():
        raise _bad(name, "it is empty")
    if not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        raise _bad(name, "it is neither an archive of `vllmdiag capture` nor the JSON of a snapshot")
    text = _Limited(whole, name).read(MAX_MEMBER_BYTES + 1)
    if len(text) > MAX_MEMBER_BYTES:
        raise _bad(name, f"it is larger than {MAX_MEMBER_BYTES >> 20} MiB")
    return Bundle(snapshots=(decode_snapshot(text.removeprefix(b"\xef\xbb\xbf"), name),))


def decode_snapshot(data: bytes, name: str) -> Snapshot:
    """A snapshot from its JSON. `name` is what an error calls it. Raises BadDataError."""
    return _decode(data, Snapshot, SNAPSHOT_SCHEMA, name)


def _read_archive(stream: _Limited, name: str) -> Bundle:
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            members = _members(tar, name)
            first = next(members, None)
            if first is None or first[0] != MANIFEST:
                raise _bad(name, f"{MANIFEST} does not stand first in it: `vllmdiag capture` has not written it")
            manifest = _decode(first[1], Manifest, BUNDLE_SCHEMA, f"{MANIFEST} of {name}")
            files = dict(_checked(members, manifest, name))
    except _TAR_DAMAGE as error:
        raise _bad(name, f"it is damaged or cut off ({str(error) or type(error).__name__})") from None
    moments = [moment.file for moment in manifest.snapshots]
    if not moments or moments[-1] != SNAPSHOT:
        raise _bad(name, f"its manifest does not name {SNAPSHOT} as the last snapshot")
    absent = [file for file in moments if file not in files]
    if absent:
        raise _bad(name, f"{absent[0]} is missing")
    return Bundle(
        snapshots=tuple(decode_snapshot(files[file], f"{file} of {name}") for file in moments),
        manifest=manifest,
        diagnosis=files.get(DIAGNOSIS, b""),
    )


def _members(tar: tarfile.TarFile, name: str) -> Iterator[tuple[str, bytes]]:
    """The plain files of an archive below its one directory, whole. Raises BadDataError at anything else."""
    for count, member in enumerate(tar, 1):
        if count > MAX_MEMBERS:
            raise _bad(name, f"it has more than {MAX_MEMBERS} members")
        parts = member.name.split("/")
        if not member.isreg() or member.issparse():
            raise _bad(name, f"{member.name!r} in it is no plain file")
        if ".." in parts or "" in parts or len(parts) < 2:
            raise _bad(name, f"{member.name!r} in it does not lie in the directory of a bundle")
        if member.size > MAX_MEMBER_BYTES:
            raise _bad(name, f"{member.name!r} in it is larger than {MAX_MEMBER_BYTES >> 20} MiB")
        content = tar.extractfile(member)
        data = content.read() if content is not None else b""
        if len(data) != member.size:
            raise _bad(name, "it is cut off")
        yield "/".join(parts[1:]), data


def _checked(members: Iterator[tuple[str, bytes]], manifest: Manifest, name: str) -> Iterator[tuple[str, bytes]]:
    """The documents among the members, each compared with what the manifest says of it. Text for readers is dropped."""
    expected: dict[str, BundleFile] = {file.name: file for file in manifest.files}
    wanted = {DIAGNOSIS, *(moment.file for moment in manifest.snapshots)}
    for member, data in members:
        file = expected.pop(member, None)
        if file is None:
            raise _bad(name, f"{member!r} is not in its manifest, or stands in it twice")
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise _bad(name, f"{member!r} has another SHA-256 than the manifest says: it was changed or damaged")
        if member in wanted:
            yield member, data
    if expected:
        raise _bad(name, f"{next(iter(expected))!r} is missing, though the manifest names it")


class _Named(msgspec.Struct):
    schema: str = ""


def _decode(data: bytes, kind: type[T], schema: str, name: str) -> T:
    try:
        said = msgspec.json.decode(data, type=_Named).schema
        family, _, major = said.rpartition("/")
        ours, _, our_major = schema.rpartition("/")
        if family == ours and major.isdigit() and int(major) > int(our_major):
            raise _bad(name, f"it is {said}, and this vllmdiag reads {schema}", next="use the vllmdiag that wrote it")
        if said != schema:
            raise _bad(name, f"it is {said or 'a document without a schema'}, not {schema}")
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:  # a ValidationError is a DecodeError
        raise _bad(name, f"its JSON is not that of {schema}: {str(error)[:200]}") from None


def _bad(name: str, why: str, next: str = "vllmdiag capture -o FILE makes a bundle") -> BadDataError:
    return BadDataError(f"cannot use {name}", why=why, next=next)


class _Joined(io.RawIOBase):
    """A stream whose head has been read already; counts what went through."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head, self._rest, self.count = head, rest, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            data, self._head = self._head + self._rest.read(), b""
        else:
            data, self._head = self._head[:size], self._head[size:]
            if len(data) < size:
                data += self._rest.read(size - len(data))
        self.count += len(data)
        return data


class _Limited(io.RawIOBase):
    """A stream that refuses to give more than an honest bundle holds."""

    def __init__(
        self, stream: BinaryIO | io.RawIOBase | gzip.GzipFile, name: str, packed: _Joined | None = None
    ) -> None:
        self._stream, self._name, self._packed, self._count = stream, name, packed, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._stream.read(min(size, MAX_MEMBER_BYTES + 1) if size >= 0 else MAX_MEMBER_BYTES + 1) or b""
        self._count += len(data)
        if self._count > MAX_TOTAL_BYTES:
            raise _bad(self._name, f"it holds more than {MAX_TOTAL_BYTES >> 20} MiB")
        dense = self._packed is not None and self._count > MAX_RATIO * max(self._packed.count, 1)
        if dense and self._count > _RATIO_COUNTS_FROM:
            raise _bad(self._name, f"it unpacks to more than {MAX_RATIO} times its size: it is not taken for honest")
        return data
