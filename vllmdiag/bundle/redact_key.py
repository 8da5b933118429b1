"""The key of this host's tokens: made on first use, read by its owner alone, never written into a bundle."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping

from .redact import Redactor

_BYTES = 32


def host_redactor(environ: Mapping[str, str] = os.environ) -> Redactor:
    """A redactor with the key of this host.

    Where the key can be neither read nor made, one is made up for this time: the bundle is as well redacted, but its
    tokens are not those of other bundles. `Redactor.account` says which it was, and why.

    Args:
        environ: says where the state of a user is kept (XDG_STATE_HOME, HOME).
    """
    path = key_path(environ)
    try:
        return Redactor(_read(path) or _make(path))
    except OSError as error:
        note = f"the key of this host cannot be used: {error.strerror or error}"
        return Redactor(secrets.token_bytes(_BYTES), "ephemeral", note)


def key_path(environ: Mapping[str, str] = os.environ) -> str:
    """Where the key is kept: ``$XDG_STATE_HOME/vllmdiag/key``."""
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # the specification says that a relative one is to be ignored
        state = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "vllmdiag", "key")


def _read(path: str) -> bytes:
    """The key; empty where there is none yet. Raises OSError where there is one that must not be used."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return b""
    with open(fd, "rb") as file:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_mode & 0o077:
            raise OSError(0, "it is not a file that its owner alone can read")
        key = file.read(_BYTES)
    if len(key) < _BYTES:
        raise OSError(0, "it is cut off")
    return key


def _make(path: str) -> bytes:
    """Make the key. Of two that do so at once the first one wins, and both use it."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    temporary = f"{path}.{secrets.token_hex(4)}"
    key = secrets.token_bytes(_BYTES)
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(key)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return _read(path)
