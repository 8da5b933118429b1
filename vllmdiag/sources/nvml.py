"""NVIDIA devices, read by a child that may be killed (`nvml_child`): a call that does not return is the finding."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from vllmdiag.model.gpu import Accelerator, DeviceProcess, Driver, NvLink, Peer, Reading, Trouble
from vllmdiag.vllm.gpu import NvmlError, gpu, nvml_error

from . import nvml_child, procfs
from .helper import POLL_S, REAP_S

_MAX_BYTES = 4 << 20
_NO_PYTHON_LIBRARY = -1

Key = tuple[int | None, str]


class _Child:
    """The running program: lines out, a wish for another round in."""

    def __init__(self) -> None:
        self._buffer = b""
        self._received = 0
        self._process = subprocess.Popen(
            [sys.executable, nvml_child.__file__],  # not -m, which would look for modules in whatever directory we are
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C is for us; we kill it ourselves
        )

    def again(self) -> None:
        """Ask for another round. Raises OSError where the child has ended."""
        if self._process.stdin is not None:
            self._process.stdin.write(b"\n")

    def line(self, deadline: float) -> bytes:
        """The next line.

        Raises:
            TimeoutError: none came until then.
            ChildProcessError: the child has ended, or talks without end.
        """
        fd = self._process.stdout.fileno() if self._process.stdout is not None else -1
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if not select.select([fd], [], [], min(left, POLL_S))[0]:
                continue
            chunk = os.read(fd, 1 << 16)
            self._received += len(chunk)
            if not chunk or self._received > _MAX_BYTES:
                raise ChildProcessError(f"exit code {self._process.poll()}" if not chunk else "it talks without end")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def where(self) -> tuple[str, str]:
        """State and wait channel, as the kernel tells."""
        state = wchan = ""
        with contextlib.suppress(OSError, IndexError):
            state = procfs.text(procfs.proc("/", self._process.pid, "stat")).rpartition(")")[2].split()[0]
            wchan = procfs.text(procfs.proc("/", self._process.pid, "wchan")).strip("0\n")
        return state, wchan

    def end(self) -> None:
        """Kill it. One that is stuck in the kernel is left behind: nobody can wait for it."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Nvml:
    """A `Probe` on the devices of NVML. The child lives from the first `read` to `close`.

    Args:
        clock: seconds since the start of the window.
        root: where the driver's own files are.
    """

    def __init__(self, clock: Callable[[], float], root: str = "/") -> None:
        self._clock, self._root = clock, root
        self._child: _Child | None = None
        self._call: Key = (None, "start")
        self._facts: dict[Key, Any] = {}
        self._rounds: list[tuple[float, dict[Key, Any]]] = []
        self._errors: dict[Key, NvmlError] = {}
        self._problem: tuple[str, str, str] | None = None
        self._took_s = 0.0

    def read(self, deadline: float) -> None:
        """Ask every device once more. After a call that did not return nothing is asked again."""
        if self._problem is not None:
            return
        start = time.monotonic()
        self._rounds.append((self._clock(), {}))
        try:
            if self._child is None:
                self._child = _Child()
            else:
                self._child.again()
            while self._take(self._child.line(deadline)):
                pass
        except TimeoutError:
            self._problem = self._late(*(self._child.where() if self._child is not None else ("", "")))
        except (OSError, ValueError) as error:
            text = f"the program that asks NVML ended in the call {_name(self._call)}: {error}"
            self._problem = ("died", text, "nvidia-smi")
        self._took_s += time.monotonic() - start

    def result(self) -> tuple[Driver, tuple[Accelerator, ...]]:
        """The driver and its devices, as far as they answered."""
        code, text, after = self._problem or ("", "", "")
        cuda = self._facts.get((None, "cuda"))
        driver = Driver(
            vendor="nvidia",
            version=self._facts.get((None, "driver")) or "",
            runtime=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            problem=code,
            text=text,
            next=after,
            took_s=round(self._took_s, 3),
        )
        numbers = sorted({device for device, _ in (*self._facts, *self._errors) if device is not None})
        return driver, tuple(self._accelerator(number) for number in numbers)

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _take(self, line: bytes) -> bool:
        """Note one line; False at the end of a round, or where nothing more will come. Raises ValueError."""
        kind, *words = json.loads(line)
        if kind == "end":
            return False
        device, name, *rest = words
        key: Key = (device, name)
        if kind == "call":
            self._call = key
        elif kind == "value":
            self._facts[key] = self._rounds[-1][1][key] = rest[0]
        else:
            return self._failed(key, *rest)
        return True

    def _failed(self, key: Key, number: int, said: str) -> bool:
        if number == _NO_PYTHON_LIBRARY:
            self._problem = ("no-binding", said, "pip install nvidia-ml-py")
            return False
        error = nvml_error(number, said)
        if key[0] is None and key[1] in {"init", "count"}:
            self._problem = (error.code or f"nvml-{number}", self._in_words(error, said), error.next)
            return False
        if error.code and (key[1] == "handle" or error.code != "no-permission"):  # some values are for root only
            self._errors[key] = error
        return True

    def _in_words(self, error: NvmlError, said: str) -> str:
        if error.code != "version-mismatch":
            return error.text or said
        try:
            module = procfs.text(os.path.join(self._root, "sys/module/nvidia/version")).strip()
        except OSError:
            return error.text
        return f"{error.text} (kernel module {module})"

    def _late(self, state: str, wchan: str) -> tuple[str, str, str]:
        """What keeps the child, as the kernel says."""
        where = f"the child is in state {state or '?'}{f', in {wchan}' if wchan else ''}"
        call = _name(self._call)
        if state == "R" or self._call[1] in {"start", "import"}:
            return "slow", f"NVML did not answer in time, in the call {call}; {where}", "look again"
        return (
            "hangs",
            f"NVML hangs in the call {call}: a lock of the driver or the GPU's firmware; {where}",
            "dmesg -T | grep -iE 'nvrm|xid|blocked for more'; do not start nvidia-smi, it would hang too",
        )

    # -- from answers to values -----------------------------------------------------------------------------------

    def _accelerator(self, index: int) -> Accelerator:
        def fact(name: str) -> Any:
            return self._facts.get((index, name))

        processes = fact("processes")
        remapped = fact("remapped")
        fabric = fact("fabric")
        mig = fact("mig")
        return Accelerator(
            vendor="nvidia",
            index=index,
            name=fact("name") or "",
            uuid=fact("uuid") or "",
            pci=short_pci(fact("pci") or ""),
            minor=fact("minor"),
            readings=tuple(self._reading(index, t, answers) for t, answers in self._rounds if _any(answers, index)),
            ecc_uncorrected=fact("ecc"),
            rows_remapped=remapped[0] + remapped[1] if remapped else None,
            capability=".".join(map(str, fact("capability") or ())),
            peers=tuple(_peer(*told) for told in fact("p2p") or ()),
            fabric=gpu().fabric.get(fabric[0], f"state {fabric[0]}") if fabric else "",
            mig=bool(mig) if mig is not None else None,
            processes=tuple(DeviceProcess(pid=pid, memory=used) for pid, used in processes)
            if processes is not None
            else None,
            troubles=tuple(self._troubles(index)),
        )

    def _reading(self, index: int, t: float, answers: dict[Key, Any]) -> Reading:
        def now(name: str) -> Any:
            return answers.get((index, name))

        busy, memory, power = now("busy") or (None, None), now("memory") or (None, None), now("power")
        limit, bits = self._facts.get((index, "power_limit")), now("throttle")
        return Reading(
            t=round(t, 3),
            busy_pct=busy[0],
            memory_busy_pct=busy[1],
            power_w=power / 1000 if power is not None else None,
            power_limit_w=limit / 1000 if limit is not None else None,
            temperature_c=now("temperature"),
            slowdown_c=self._facts.get((index, "slowdown")),
            clock_mhz=now("clock"),
            clock_max_mhz=self._facts.get((index, "clock_max")),
            memory_used=memory[0],
            memory_total=memory[1],
            throttle=tuple(t.text for t in gpu().throttle if bits & t.bit) if bits is not None else None,
            pcie_generation=now("pcie_generation"),
            pcie_width=now("pcie_width"),
            pcie_width_max=self._facts.get((index, "pcie_width_max")),
            pcie_replays=now("pcie_replays"),
            links=tuple(NvLink(number=n, up=up, errors=errors) for n, up, errors in now("links") or ()),
        )

    def _troubles(self, index: int) -> list[Trouble]:
        found: dict[str, Trouble] = {}
        for (device, _), error in self._errors.items():
            if device == index:
                found[error.code] = Trouble(code=error.code, text=error.text, critical=error.critical)
        if self._problem is not None and self._problem[0] == "hangs" and self._call[0] == index:
            found["hangs"] = Trouble(code="hangs", text=self._problem[1], critical=True)
        ecc, remapped = self._facts.get((index, "ecc")), self._facts.get((index, "remapped"))
        action, fabric = self._facts.get((index, "recovery")), self._facts.get((index, "fabric"))
        if ecc:
            found["ecc"] = Trouble(code="ecc", text=f"{ecc} uncorrected memory errors since the driver was loaded")
        if remapped and remapped[2]:
            found["rows-pending"] = Trouble(
                code="rows-pending", text="a row of memory waits to be remapped: the GPU must be reset"
            )
        if remapped and remapped[3]:
            found["rows-failed"] = Trouble(
                code="rows-failed", text="a row of memory could not be remapped: replace the GPU", critical=True
            )
        if action:
            words = gpu().recovery.get(action, f"recovery action {action}")
            found["recovery"] = Trouble(code="recovery", text=f"the driver asks to {words}", critical=True)
        if fabric and (fabric[0] in {1, 2} or (fabric[0] == 3 and fabric[1])):
            words = gpu().fabric[fabric[0]] if fabric[0] != 3 else f"failed with NVML error {fabric[1]}"
            found["fabric"] = Trouble(
                code="fabric",
                text=f"registration with the NVSwitch fabric {words}: see nvidia-fabricmanager",
                critical=True,
            )
        return list(found.values())


def _peer(index: int, level: int, status: int) -> Peer:
    words = gpu()
    return Peer(index=index, path=words.levels.get(level, ""), p2p=words.p2p.get(status, ""))


def short_pci(address: str) -> str:
    """NVML's ``00000000:61:00.0`` and the kernel's ``0000:61:00`` as ``0000:61:00.0``."""
    domain, colon, rest = address.lower().partition(":")
    if not colon:
        return address
    return f"{domain[-4:].rjust(4, '0')}:{rest if '.' in rest else rest + '.0'}"


def _any(answers: dict[Key, Any], index: int) -> bool:
    return any(device == index and name != "handle" for device, name in answers)


def _name(key: Key) -> str:
    device, name = key
    return name if device is None else f"{name} on GPU {device}"
