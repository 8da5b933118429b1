"""Builds vllmdiag.pyz, one file that needs a Python and nothing else: `python -m tools.zipapp [-o FILE]`.

It holds the wheels of vllmdiag and of what it depends on, for this kind of machine and for several Pythons, each file
once under the name of its hash. `pyz_main` unpacks it where it runs. The same wheels give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
GLIBC = (17, 24, 26, 27, 28)
"""Minor versions of glibc whose wheels are taken: 2.28 is that of Debian 10 and RHEL 8."""

_EXECUTABLE, _PLAIN = 0o700, 0o600


def build(out: Path, pythons: Sequence[str] = PYTHONS) -> None:
    """Write the archive.

    Args:
        out: the file.
        pythons: versions of Python it shall run on.

    Raises:
        subprocess.CalledProcessError: pip does not find a wheel for one of them.
    """
    with tempfile.TemporaryDirectory() as directory:
        own = _own_wheel(Path(directory))
        assemble(out, {version: wheels(own, version, Path(directory) / version) for version in pythons})


def assemble(out: Path, wheels: Mapping[str, Iterable[Path]]) -> None:
    """Write the archive from wheels that are there: version of Python -> its wheels."""
    blobs: dict[str, bytes] = {}
    sites: dict[str, dict[str, tuple[str, int, int]]] = {}
    for version, of_version in wheels.items():
        sites[version] = site = {}
        for wheel in of_version:
            for path, data, mode in _contents(wheel):
                digest = hashlib.sha256(data).hexdigest()
                blobs[digest] = data
                site[path] = (digest, len(data), mode)
    manifest: dict[str, object] = {"machine": platform.machine(), "pythons": sites}
    manifest["digest"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    _write(out, blobs, json.dumps(manifest, sort_keys=True).encode())


def _own_wheel(directory: Path) -> Path:
    from hatchling.builders.wheel import WheelBuilder

    return Path(next(iter(WheelBuilder(str(ROOT)).build(directory=str(directory), versions=["standard"]))))


def wheels(own: Path, version: str, directory: Path) -> list[Path]:
    """vllmdiag and all it depends on, for one version of Python."""
    machine = platform.machine()
    platforms = [word for minor in GLIBC for word in ("--platform", f"manylinux_2_{minor}_{machine}")]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", version, *platforms]
    command += ["--platform", f"manylinux2014_{machine}", "--dest", str(directory), str(own)]
    subprocess.run(command, check=True)
    return sorted(directory.glob("*.whl"))


def _contents(wheel: Path) -> Iterator[tuple[str, bytes, int]]:
    """Path below the directory where it is unpacked, bytes and mode: modules under site/, programs under bin/."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            top, _, below = entry.filename.partition("/")
            if entry.is_dir():
                continue
            place = f"site/{entry.filename}"
            if top.endswith(".data"):
                kind, _, rest = below.partition("/")
                if kind not in ("purelib", "platlib", "scripts"):
                    continue
                place = f"{'bin' if kind == 'scripts' else 'site'}/{rest}"
            runs = place.startswith("bin/") or bool(entry.external_attr >> 16 & stat.S_IXUSR)
            yield place, archive.read(entry), _EXECUTABLE if runs else _PLAIN


def _write(out: Path, blobs: dict[str, bytes], manifest: bytes) -> None:
    moment = time.gmtime(max(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), 315532800))[:6]  # not before 1980
    entries = {"__main__.py": (ROOT / "tools" / "pyz_main.py").read_bytes(), "manifest.json": manifest}
    entries |= {f"blobs/{digest}": data for digest, data in sorted(blobs.items())}
    with out.open("wb") as file:
        file.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for name, data in entries.items():
                entry = zipfile.ZipInfo(name, moment)
                entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(entry, data)
    out.chmod(0o755)


def main() -> int:
    """Parse the command line, build, say what was built."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "dist" / "vllmdiag.pyz")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="only for this one; may come again")
    given = parser.parse_args()
    given.output.parent.mkdir(parents=True, exist_ok=True)
    build(given.output, given.python or PYTHONS)
    print(f"{given.output}  {given.output.stat().st_size / 2**20:.1f} MiB  Python {', '.join(given.python or PYTHONS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
