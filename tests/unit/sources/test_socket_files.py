"""Socket files that dead servers left: named, and never one that somebody is bound to or may be about to be."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

import pytest

from vllmdiag.sources.socket_files import stale_ipc_paths
from vllmdiag.sources.sockets import SocketWatch

OLD = (1_000_000_000, 1_000_000_000)


def bind(path: Path) -> socket.socket:
    """A listener of this very process."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)
    os.utime(path, OLD)
    return listener


def leave(path: Path) -> Path:
    """The file of a socket whose owner is gone."""
    bind(path).close()
    return path


@pytest.fixture
def found(tmp_path: Path) -> list[str]:
    """What is said of a directory with a live endpoint and all kinds of neighbours."""
    live = bind(tmp_path / str(uuid.uuid4()))
    neighbour = bind(tmp_path / str(uuid.uuid4()))
    leave(tmp_path / "other.sock")
    fresh = leave(tmp_path / str(uuid.uuid4()))
    os.utime(fresh)
    (tmp_path / str(uuid.uuid4())).write_text("a plain file")
    for _ in range(2):
        leave(tmp_path / str(uuid.uuid4()))
    watch = SocketWatch([os.getpid()])
    watch.sample(0.0)
    paths = stale_ipc_paths(watch.result()[0], watch.bound_paths)
    watch.close()
    live.close()
    neighbour.close()
    return [path for path in paths if path.startswith(str(tmp_path))]


def test_only_old_files_with_a_name_of_vllm_that_nobody_is_bound_to_are_named(found: list[str], tmp_path: Path) -> None:
    names = {path.name: path for path in tmp_path.iterdir()}
    assert len(found) == 2
    for path in found:
        file = names[Path(path).name]
        assert file.is_socket()
        with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
            client.connect(str(file))


def test_a_directory_that_cannot_be_read_says_nothing() -> None:
    assert stale_ipc_paths([], frozenset()) == ()
