"""Fixtures of the tier with a real vLLM: ``pytest tests/vllm`` (also ``VLLM=0.12.0 pytest tests/vllm``).

One server runs at a time. Tests say what they want with ``@pytest.mark.topology("dp2")`` and ask for `server`; they are
sorted so that those of one topology follow each other and share it. A test that starts servers of its own, to break
them while they start, asks for `launch` and runs last.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.server import Server
from tests.vllm.setup_vllm import Installation, ensure
from tests.vllm.topologies import TOPOLOGIES

HERE = Path(__file__).parent
TEST_TIMEOUT_S = 600
"""A first use of a topology pays for its start."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and let SIGTERM (a job's time limit) end the servers as Ctrl-C does."""
    if _chosen(config):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    config.addinivalue_line("markers", "topology(name, spoiled=False): the shared server (see Pool.get)")


def _chosen(config: pytest.Config) -> bool:
    named = (Path(config.invocation_params.dir, str(arg).split("::", maxsplit=1)[0]).resolve() for arg in config.args)
    return any(path == HERE or HERE in path.parents for path in named)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The tier installs vLLM and takes half an hour: it runs only when it is named."""
    return None if _chosen(config) else True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say that it did not run."""
    if not _chosen(config):
        terminalreporter.write_line("left out: tests/vllm (a real vLLM; run it with: pytest tests/vllm)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group by topology; tests with servers of their own last."""
    order = {name: number for number, name in enumerate(TOPOLOGIES)}
    mine = [item for item in items if HERE in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))

    def key(item: pytest.Item) -> int:
        wanted = item.get_closest_marker("topology")
        return order[wanted.args[0]] if wanted else order["tp2"]

    def launches(item: pytest.Item) -> bool:
        return "launch" in getattr(item, "fixturenames", ())

    mine_sorted = iter(sorted(mine, key=lambda item: (launches(item), key(item))))
    items[:] = [next(mine_sorted) if HERE in item.path.parents else item for item in items]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of the server's log under a failure."""
    report = yield
    server = getattr(item, "funcargs", {}).get("server")
    if report.failed and isinstance(server, Server) and server.work.exists():
        report.sections.append(("vLLM", f"{server.pids()}\n{server.log_tail()}"))
    return report


class Pool:
    """At most one shared server."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._current: Server | None = None

    def get(self, topology: str, *, spoiled: bool = False) -> Server:
        """A healthy server of that topology: the running one where it will do, else a new one.

        With `spoiled` one that an earlier fault has left its marks on will do, as long as it answers.
        """
        current = self._current
        if current and (
            current.topology.name != topology or (current.spoiled and not spoiled) or not current.healthy()
        ):
            self.release()
        if self._current is None:
            self._current = Server(topology, installation=self._installation)
            self._current.wait_ready().warm_up()
        return self._current

    def release(self) -> None:
        """End the shared server."""
        if self._current:
            current, self._current = self._current, None
            current.stop()


@pytest.fixture(scope="session")
def installation() -> Installation:
    """The vLLM under test; ``$VLLM`` chooses the version."""
    return ensure()


@pytest.fixture(scope="session")
def pool(installation: Installation) -> Iterator[Pool]:
    """Everything that is shared, removed at the end."""
    pool = Pool(installation)
    yield pool
    pool.release()


@pytest.fixture
def server(request: pytest.FixtureRequest, pool: Pool) -> Server:
    """A healthy server of the topology in the mark (default tp2)."""
    wanted = request.node.get_closest_marker("topology")
    return pool.get(*wanted.args, **wanted.kwargs) if wanted else pool.get("tp2")


@pytest.fixture
def launch(pool: Pool, installation: Installation) -> Iterator[Callable[..., Server]]:
    """Start a server of one's own, not waited for: ``launch("tp2", shm_size="64m")``. It is removed after the test."""
    pool.release()
    with ExitStack() as started:
        yield lambda *args, **kwargs: started.enter_context(Server(*args, installation=installation, **kwargs))


@dataclass(frozen=True)
class Answer:
    """What one run of vllmdiag said."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """stdout as JSON."""
        return json.loads(self.out)


class Vllmdiag:
    """The command line program, as a user runs it."""

    def json(self, verb: str, *args: str | int) -> Answer:
        """With ``--format json``; see `Answer.data`."""
        return self.run(verb, *args, "--format", "json")

    def text(self, verb: str, *args: str | int) -> Answer:
        """With ``--format text``."""
        return self.run(verb, *args, "--format", "text")

    def run(self, *args: str | int) -> Answer:
        """With exactly these arguments."""
        command = [sys.executable, "-m", "vllmdiag", *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        return Answer(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def vllmdiag() -> Vllmdiag:
    """Run vllmdiag."""
    return Vllmdiag()
