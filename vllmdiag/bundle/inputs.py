"""From paths, archives and standard input to pieces of text. Everything is streamed; nothing is unpacked to disk."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Protocol, cast

from vllmdiag.model.errors import NotPermittedError, TargetError

from .pieces import LONGEST_LINE, Binary, Piece

DAMAGE = (OSError, EOFError, UnicodeError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)
"""What reading a damaged file may raise, while its lines are read."""
MOST_FILES = 10_000
MOST_BYTES = 8 << 30
"""Bytes that one archive may hold when unpacked."""
_FREE_BYTES = 256 << 20
_MOST_RATIO = 200
"""An archive that grows to more than this many times its size, and beyond `_FREE_BYTES`, is a bomb."""
_HEAD_BYTES = 64 << 10
_MOST_BINARY = 64 << 20
_MOST_MEMORY = 512 << 20
"""Bytes of a zip archive on standard input: its directory stands at the end."""


class Readable(Protocol):
    """A file, standard input, a member of an archive, or what decompresses one."""

    def read(self, size: int = -1, /) -> bytes:
        """At most that many bytes; none at the end."""


Hole = Callable[[str, str, str], None]
"""Told of what is left out: what, why, what to do."""

_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_NEXT = "give it as text, or leave it out"


def pieces_of(paths: Sequence[str], stdin: io.BufferedReader, hole: Hole) -> Iterator[Piece | Binary]:
    """Every piece of evidence, in the order in which it was given; the files of a directory in the order of names.

    Args:
        paths: files, directories, archives; ``-`` for standard input.
        stdin: read where ``-`` is given.
        hole: told of what is left out.

    Raises:
        TargetError: a path does not exist.
        NotPermittedError: it may not be read.
    """
    for path in paths:
        if path == "-":
            yield from _stream(stdin, "standard input", hole)
        elif os.path.isdir(path):
            yield from _directory(path, hole)
        else:
            yield from _file(path, hole)


def _file(path: str, hole: Hole) -> Iterator[Piece | Binary]:
    try:
        opened = open(path, "rb")  # noqa: SIM115  closed below, after the error was told
    except FileNotFoundError:
        raise TargetError(f"there is no {path}", why="no such file or directory", next="check the path") from None
    except PermissionError as error:
        raise NotPermittedError(f"cannot read {path}", why=str(error.strerror), next="run as its owner") from None
    except OSError as error:
        hole(path, str(error.strerror), _NEXT)
        return
    with opened:
        yield from _stream(opened, path, hole)


def _directory(top: str, hole: Hole) -> Iterator[Piece | Binary]:
    count = 0
    for directory, names, files in os.walk(top):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(files):
            path = os.path.join(directory, name)
            if name.startswith("."):
                continue
            count += 1
            if count > MOST_FILES:
                hole(f"the rest of {top}", f"more than {MOST_FILES} files", "give a smaller directory")
                return
            shown = os.path.relpath(path, top)
            try:
                if not stat.S_ISREG(os.lstat(path).st_mode):
                    hole(shown, "left out: a link or no regular file", _NEXT)
                    continue
                opened = open(path, "rb")  # noqa: SIM115  closed below, after the error was told
            except OSError as error:
                hole(shown, str(error.strerror), _NEXT)
                continue
            with opened:
                yield from _stream(opened, shown, hole)


def _stream(raw: Readable, name: str, hole: Hole, nested: bool = False) -> Iterator[Piece | Binary]:
    """One file, whatever it is: archive, compressed, text in some encoding, a binary that somebody may know."""
    stream = _peeking(raw)
    try:
        head = stream.peek(_HEAD_BYTES)[:_HEAD_BYTES]
    except DAMAGE as error:
        hole(name, f"damaged: {error}", "copy it again")
        return
    opener = _compressed(head)
    if opener is not None and not nested:
        capped = _Capped(stream, opener, name)
        yield from _stream(io.BufferedReader(capped, _HEAD_BYTES), _stem(name), hole, nested=True)
    elif opener is not None:
        hole(name, "left out: an archive inside an archive", "unpack it and give its files")
    elif head.startswith(b"PK\x03\x04"):
        yield from _zip(stream, name, hole)
    elif head[257:262] == b"ustar":
        yield from _tar(stream, name, hole)
    elif not head:
        hole(name, "empty", _NEXT)
    elif (encoding := _encoding(head)) is not None:
        yield Piece(name, _lines(stream, encoding))
    else:
        yield Binary(name, lambda: stream.read(_MOST_BINARY))


def _peeking(raw: Readable) -> io.BufferedReader:
    """A buffer that is large enough to see what a file is."""
    return io.BufferedReader(_Raw(raw), _HEAD_BYTES)


class _Raw(io.RawIOBase):
    """Any binary reader as a raw one, so that it can be peeked at."""

    def __init__(self, inner: Readable) -> None:
        self._inner = inner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._inner.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seekable(self) -> bool:
        # a member of a tar that is streamed looks like a buffered reader, but does not know whether it can seek
        return type(self._inner) is io.BufferedReader and self._inner.seekable()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if not isinstance(self._inner, io.BufferedReader):
            raise io.UnsupportedOperation("seek")
        return self._inner.seek(offset, whence)


class _Capped(io.RawIOBase):
    """A compressed stream that ends with an error once it has grown beyond what an honest one does."""

    def __init__(self, packed: io.BufferedReader, opener: Callable[[IO[bytes]], Readable], name: str) -> None:
        self._counter = _Counter(packed)
        self._inner = opener(cast("IO[bytes]", self._counter))  # all that a decompressor asks of it is read
        self._name = name
        self._grown = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._inner.read(len(buffer))
        self._grown += len(data)
        check_growth(self._grown, self._counter.count)
        buffer[: len(data)] = data
        return len(data)


class _Counter(io.RawIOBase):
    """Counts the bytes that are read through it."""

    def __init__(self, inner: io.BufferedReader) -> None:
        self._inner = inner
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._inner.read(len(buffer))
        self.count += len(data)
        buffer[: len(data)] = data
        return len(data)


def check_growth(grown: int, packed: int) -> None:
    """Refuse a stream that unpacks to far more than it is.

    Raises:
        OSError: it does.
    """
    if grown > MOST_BYTES or (grown > _FREE_BYTES and grown > _MOST_RATIO * max(packed, 1)):
        raise OSError(f"it unpacks to more than {grown >> 20} MiB from {packed >> 10} KiB: not read further")


def _compressed(head: bytes) -> Callable[[IO[bytes]], Readable] | None:
    if head.startswith(b"\x1f\x8b"):
        return lambda packed: gzip.GzipFile(fileobj=packed, mode="rb")
    if head.startswith(b"BZh"):
        return lambda packed: bz2.BZ2File(packed, "rb")
    if head.startswith(b"\xfd7zXZ\x00"):
        return lambda packed: lzma.LZMAFile(packed, "rb")
    return None


def _stem(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".bz2").removesuffix(".xz")


def _outside(name: str) -> bool:
    return name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/") or name[1:2] == ":"


def _tar(stream: io.BufferedReader, name: str, hole: Hole) -> Iterator[Piece | Binary]:
    count = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                shown = f"{name}: {member.name}"
                count += 1
                if count > MOST_FILES:
                    hole(f"the rest of {name}", f"more than {MOST_FILES} files", "give fewer")
                    return
                if member.isdir():
                    continue
                if not member.isreg():
                    hole(shown, "left out: a link or a device", _NEXT)
                elif _outside(member.name):
                    hole(shown, "left out: its name leads out of the archive", _NEXT)
                elif (opened := archive.extractfile(member)) is not None:
                    yield from _stream(opened, member.name, hole, nested=True)
    except DAMAGE as error:
        hole(f"the rest of {name}", f"damaged: {error}", "copy the archive again")


def _zip(stream: io.BufferedReader, name: str, hole: Hole) -> Iterator[Piece | Binary]:
    try:
        seekable: IO[bytes] = stream if stream.seekable() else io.BytesIO(stream.read(_MOST_MEMORY))
        with closing(zipfile.ZipFile(seekable)) as archive:
            members = archive.infolist()
            packed = sum(m.compress_size for m in members)
            for member in sorted(members, key=lambda m: m.filename)[:MOST_FILES]:
                shown = f"{name}: {member.filename}"
                if member.is_dir():
                    continue
                if _outside(member.filename):
                    hole(shown, "left out: its name leads out of the archive", _NEXT)
                    continue
                if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
                    hole(shown, "left out: a link or a device", _NEXT)
                    continue
                check_growth(sum(m.file_size for m in members), packed)
                with archive.open(member) as opened:
                    yield from _stream(opened, member.filename, hole, nested=True)
            if len(members) > MOST_FILES:
                hole(f"the rest of {name}", f"more than {MOST_FILES} files", "give fewer")
    except (*DAMAGE, RuntimeError, NotImplementedError) as error:  # an encrypted member, an unknown method
        hole(f"the rest of {name}", f"damaged: {error}", "copy the archive again")


def _encoding(head: bytes) -> str | None:
    """Encoding of a text; ``nul`` where NUL separates its parts (/proc/PID/environ); None for a binary."""
    for mark, encoding in _BOMS:
        if head.startswith(mark):
            return encoding
    nuls = head.count(0)
    if not nuls:
        control = sum(byte < 9 or 13 < byte < 27 or 27 < byte < 32 for byte in head[:4096])
        return "utf-8" if control * 10 <= len(head[:4096]) else None
    even, odd = head[0::2].count(0), head[1::2].count(0)
    if max(even, odd) * 3 >= len(head) // 2 and min(even, odd) * 20 <= max(even, odd):
        return "utf-16-le" if odd > even else "utf-16-be"
    plain = head.replace(b"\0", b"\n")
    return "nul" if nuls * 4 < len(head) and _encoding(plain) == "utf-8" and not head.startswith(b"\x7fELF") else None


def _lines(stream: io.BufferedReader, encoding: str) -> Iterator[str]:
    text = io.TextIOWrapper(stream, "utf-8" if encoding == "nul" else encoding, errors="replace", newline="\n")
    try:
        while line := text.readline(LONGEST_LINE):
            if not line.endswith("\n"):
                while (rest := text.readline(LONGEST_LINE)) and not rest.endswith("\n"):
                    pass
            if encoding == "nul" and "\0" in line:
                yield from _parted(line)
            else:
                yield line
    finally:
        text.detach()


def _parted(line: str) -> Iterator[str]:
    """NULs separate variables in an environ, words in a cmdline."""
    parts = [part for part in line.rstrip("\n").split("\0") if part]
    variables = sum("=" in part and part.partition("=")[0].replace("_", "").isalnum() for part in parts)
    yield from parts if variables * 2 > len(parts) else (" ".join(parts),)


def names_of(paths: Sequence[str]) -> str:
    """The paths for a message."""
    return ", ".join(Path(path).name or path for path in paths[:3]) + (" ..." if len(paths) > 3 else "")
