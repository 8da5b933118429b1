"""What is run on a node: the vllmdiag that is installed there, or one that is sent along and run from memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllmdiag.model.errors import NotPermittedError, UsageError

LOADER = (
    "import os,sys;f=os.memfd_create('vllmdiag',0);"
    "[os.write(f,b) for b in iter(lambda:os.read(0,1<<20),b'')];"
    "os.execv(sys.executable,[sys.executable,'/proc/self/fd/%d'%f,*sys.argv[1:]])"
)
"""Takes a program from stdin into memory and becomes it. (What vllmdiag.pyz unpacks of itself goes to a cache.)"""


@dataclass(frozen=True)
class Far:
    """The command on a node and what it reads."""

    words: tuple[str, ...]
    stdin: bytes = b""


def far_end(
    window_s: float, deadline_s: float, remote: tuple[str, ...] = ("vllmdiag",), ship: Path | None = None
) -> Far:
    """The command that answers.

    Args:
        window_s: how long an instance is watched.
        deadline_s: after which nobody listens any more.
        remote: how vllmdiag is called there; with `ship` the Python that runs it.
        ship: a zip application of vllmdiag to send.

    Raises:
        UsageError, NotPermittedError: `ship` cannot be read.
    """
    own = ("fleet", "node", "--window", f"{window_s:g}", "--deadline", str(int(deadline_s)))
    if ship is None:
        return Far((*remote, *own))
    try:
        program = ship.read_bytes()
    except PermissionError as error:
        raise NotPermittedError(f"cannot read {ship}", why=str(error.strerror), next="--ship FILE") from None
    except OSError as error:
        raise UsageError(f"cannot read {ship}", why=str(error.strerror), next="make pyz") from None
    python = ("python3",) if remote == ("vllmdiag",) else remote
    return Far((*python, "-c", LOADER, *own), program)
