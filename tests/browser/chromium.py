"""A real Chromium without a window, driven over its DevTools protocol through a pair of pipes: no library, no port.

Messages are JSON, each ended by a NUL: descriptor 3 of the browser takes commands, 4 gives answers and events.
"""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--remote-debugging-pipe",
)
_PATIENCE_S = 60.0


class Tab:
    """One page. What it logs, what goes wrong in it and what it asks for is kept."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send a command and wait for its answer. Raises AssertionError when the browser refuses it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._events.append(answer)

    def wait_for(self, event: str) -> None:
        """Wait until an event has come (again, where it had come before)."""
        while not any(one.get("method") == event for one in self._events):
            self._events.append(self._next())

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Load a file as a screen of that width (CSS pixels) shows it."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self.call("Page.navigate", url=path.as_uri())
        self.wait_for("Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives in the page, as JSON."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def complaints(self) -> list[str]:
        """What the browser has complained about since `open`: console, exceptions, security policy."""
        bad = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Audits.issueAdded")
        return [json.dumps(one["params"]) for one in self._events if one.get("method") in bad]

    def requests(self) -> list[str]:
        """What was asked for since `open`, without what the policy of the page kept from being asked for."""
        asked = [one["params"] for one in self._events if one.get("method") == "Network.requestWillBeSent"]
        failed = [one["params"] for one in self._events if one.get("method") == "Network.loadingFailed"]
        refused = {one["requestId"] for one in failed if one.get("blockedReason") == "csp"}
        return [one["request"]["url"] for one in asked if one["requestId"] not in refused]

    def pdf(self) -> bytes:
        """The page on paper (A4)."""
        return base64.b64decode(self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"])

    def picture(self) -> bytes:
        """The whole page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], _PATIENCE_S)
            assert ready, f"the browser has said nothing for {_PATIENCE_S:.0f} s"
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser has gone"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded


@contextmanager
def browser(profile: Path, program: str = "chromium") -> Iterator[Tab]:
    """A tab of a browser that has nothing but the given empty directory, and is gone afterwards."""
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    # The shell puts the ends that the browser takes at 3 and 4, whatever numbers they have here.
    shell = f'exec "$@" 3<&{command_read} 4>&{answer_write}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(command_read, answer_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile), "XDG_CONFIG_HOME": str(profile), "XDG_CACHE_HOME": str(profile)},
    )
    os.close(command_read)
    os.close(answer_write)
    try:
        tab = Tab(command_write, answer_read)
        yield tab
        tab._session = None
        tab.call("Browser.close")
        process.wait(timeout=_PATIENCE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(command_write)
        os.close(answer_read)
