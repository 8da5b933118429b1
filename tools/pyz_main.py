"""What runs first in vllmdiag.pyz: with the standard library alone, it unpacks the rest and hands over.

Compiled parts cannot be imported from an archive, so everything is unpacked once, into a directory that only this user
can write to, and what could run natively is compared with its hash at every start. Written so that an old Python reads
it as far as the message that it is too old.
"""

import atexit
import hashlib
import json
import os
import platform
import shutil
import stat
import sys
import tempfile
import zipfile
from typing import Any, Dict, Tuple

ARCHIVE = os.path.dirname(os.path.abspath(__file__))
Files = Dict[str, Tuple[str, int, int]]
"""Path below the directory -> (hash, size, mode)."""

NEXT = "VLLMDIAG_CACHE=DIR, a directory of yours on a disk that may hold programs"


class RefusalError(Exception):
    """What, why and next of an error that the user can act on."""

    def __init__(self, what: str, why: str, next: str) -> None:
        super().__init__(what)
        self.why = why
        self.next = next


def files_for_this_python(manifest: Dict[str, Any]) -> Files:
    """The files of this interpreter. Raises RefusalError where there are none."""
    version = "%d.%d" % sys.version_info[:2]
    if version not in manifest["pythons"]:
        raise RefusalError(
            "this archive holds nothing for Python %s" % version,
            "it is for %s" % ", ".join(manifest["pythons"]),
            "run it with one of those: python3.X vllmdiag.pyz ...",
        )
    here = (platform.system(), platform.machine(), platform.libc_ver()[0] or "another libc")
    if here != ("Linux", manifest["machine"], "glibc"):
        raise RefusalError(
            "this archive is for another machine",
            "it is for Linux %s with glibc, this is %s %s with %s" % (manifest["machine"], *here),
            "build one here: make pyz",
        )
    return dict(manifest["pythons"][version])


def private_directory(name: str) -> str:
    """Where to unpack: a directory in the cache of this user, else a temporary one that goes with this process."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for base in (os.environ.get("VLLMDIAG_CACHE"), os.path.join(home, "vllmdiag")):
        if base and usable(base):
            return os.path.join(base, name)
    temporary = tempfile.mkdtemp(prefix="vllmdiag-")
    atexit.register(shutil.rmtree, temporary, True)
    if not usable(temporary):
        raise RefusalError(
            "there is no place to unpack to",
            "neither the cache of this user nor %s may hold programs (noexec)" % tempfile.gettempdir(),
            NEXT,
        )
    return os.path.join(temporary, name)


def usable(directory: str) -> bool:
    """There or made now, ours, not writable for others, not a link, and on a file system that may run programs."""
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        seen = os.lstat(directory)
        return (
            stat.S_ISDIR(seen.st_mode)
            and seen.st_uid == os.geteuid()
            and not seen.st_mode & 0o022
            and not os.statvfs(directory).f_flag & os.ST_NOEXEC
            and os.access(directory, os.W_OK | os.X_OK)
        )
    except OSError:
        return False


def is_whole(directory: str, files: Files) -> bool:
    """The directory is private and holds what it should: all by size, what runs natively by its hash."""
    try:
        seen = os.lstat(directory)
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_mode & 0o077:
            return False
        for path, (digest, size, _) in files.items():
            full = os.path.join(directory, path)
            if os.lstat(full).st_size != size:
                return False
            if path.startswith("bin/") or ".so" in path:
                with open(full, "rb") as file:
                    if hashlib.sha256(file.read()).hexdigest() != digest:
                        return False
    except OSError:
        return False
    return True


def unpack(archive: zipfile.ZipFile, directory: str, files: Files) -> None:
    """Unpack beside, compare every hash, then put in place at once: another run sees all of it or nothing."""
    beside = tempfile.mkdtemp(prefix=".new-", dir=os.path.dirname(directory))
    try:
        for path, (digest, _, mode) in files.items():
            data = archive.read("blobs/" + digest)
            if hashlib.sha256(data).hexdigest() != digest:
                raise RefusalError("the archive is damaged", "%s is not what it should be" % path, "copy it anew")
            full = os.path.join(beside, path)
            os.makedirs(os.path.dirname(full), mode=0o700, exist_ok=True)
            with open(full, "wb") as file:
                file.write(data)
            os.chmod(full, mode)
        shutil.rmtree(directory, ignore_errors=True)
        os.rename(beside, directory)
    except OSError as error:
        if not is_whole(directory, files):  # else somebody else was faster
            raise RefusalError("cannot unpack to %s" % directory, str(error), NEXT) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def main() -> int:
    """Unpack where that is not done, then be vllmdiag."""
    try:
        if sys.version_info < (3, 10):
            raise RefusalError(
                "Python %s is too old" % platform.python_version(), "vllmdiag needs 3.10", "python3.10 ..."
            )
        with zipfile.ZipFile(ARCHIVE) as archive:
            manifest = json.loads(archive.read("manifest.json").decode())
            files = files_for_this_python(manifest)
            directory = private_directory("pyz-%s-%d.%d" % (manifest["digest"][:16], *sys.version_info[:2]))
            if not is_whole(directory, files):
                unpack(archive, directory, files)
    except RefusalError as refusal:
        sys.stderr.write("error: %s\n  why:  %s\n  next: %s\n" % (refusal, refusal.why, refusal.next))
        return 69
    for name, below in (("PYTHONPATH", "site"), ("PATH", "bin")):  # for helpers and children, too
        others = os.environ.get(name)
        os.environ[name] = os.path.join(directory, below) + (os.pathsep + others if others else "")
    sys.path.insert(0, os.path.join(directory, "site"))
    from vllmdiag.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
