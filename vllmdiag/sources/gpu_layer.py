"""The GPU layer of one window: devices, NCCL RAS and flight recorder dumps, each only where it is there to be read.

On a machine without accelerators, and for an instance that has no NCCL, nothing is started and nobody is connected to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from vllmdiag.model.base import Missing
from vllmdiag.model.gpu import Accelerator, Driver, FlightRecord, RasReport
from vllmdiag.model.process import Limits, Namespaces, Process
from vllmdiag.model.snapshot import Snapshot, SourceCost
from vllmdiag.model.sockets import Socket
from vllmdiag.vllm.gpu import gpu, speaks_ras

from . import accelerators, fatbin, nccl_ras, pci_paths

_DEVICES_S = 5.0
_AFTER_S = 4.0
"""How long after the window RAS may still answer: with a rank that is stopped the first answer takes some seconds."""
_APART_S = 1.0
"""Least time between two looks that are compared."""
_FD_ROOM = 64
_WHY = {
    "silent": "a process holds the port and does not answer: it is stopped, frozen, or its RAS thread is stuck",
    "late": "the report was not complete in time",
    "closed": "each connection was closed without an answer",
}


class GpuLayer:
    """Made when the processes of the instance have been observed; `works` run beside the window, then `add_to`.

    Args:
        members: processes of the instance; the environment of one stands for all, as titles are written over it.
        users: which of them may use a GPU: workers, and engines that run the model. None: nothing is looked at.
        sockets: of the instance.
        clock: seconds since the start of the window.
        window_s: its length.
        stop: nobody wants the result any more.
        thorough: asked for by the `gpu` verb: also say what is not there, and why.
        root: where the machine's files are.
    """

    def __init__(
        self,
        members: Sequence[Process],
        users: Collection[int],
        sockets: Sequence[Socket],
        clock: Callable[[], float],
        window_s: float,
        stop: threading.Event,
        thorough: bool = False,
        root: str = "/",
    ) -> None:
        self._processes = processes = [p for p in members if p.pid in users]
        self._environments = [p.environ for p in members if p.environ]
        self._clock, self._window_s, self._stop = clock, window_s, stop
        self._thorough, self._root = thorough, root
        self._probes = [backend.open(clock, root) for backend in accelerators.present(root)] if processes else []
        self._nccl = [p for p in processes if any(map(speaks_ras, p.libraries))]
        self._listeners = self._find_listeners(sockets) if self._nccl else []
        self._reports: list[RasReport] = []
        self._errors: list[nccl_ras.RasError] = []
        self._records: list[FlightRecord] = []
        self._missing: list[Missing] = []
        self._costs: list[SourceCost] = []

    def works(self) -> list[Callable[[], None]]:
        """What to run beside the window; each ends by itself soon after it."""
        found: list[Callable[[], None]] = []
        if self._probes:
            found.append(self._watch_devices)
        if self._listeners:
            found.append(self._ask_ras)
        if self._processes and (self._nccl or self._thorough):
            found.append(self._read_records)
        return found

    def add_to(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with what was seen. Call it when the works have ended."""
        drivers: list[Driver] = []
        devices: list[Accelerator] = []
        for probe in self._probes:
            driver, own = probe.result()
            drivers.append(driver)
            devices += own
        around = pci_paths.surroundings(devices, self._root) if devices else pci_paths.Surroundings(devices=())
        return msgspec.structs.replace(
            snapshot,
            drivers=tuple(self._with_fabric(d, around.fabric_manager) for d in drivers),
            accelerators=around.devices,
            rdma=around.rdma,
            processes=self._with_kernels(snapshot.processes, around.devices),
            ras=tuple(self._reports),
            flight_records=tuple(self._records),
            missing=(*snapshot.missing, *self._missing, *self._holes(drivers)),
            costs=(*snapshot.costs, *self._costs),
        )

    def _with_fabric(self, driver: Driver, manager: str) -> Driver:
        return msgspec.structs.replace(driver, fabric_manager=manager) if driver.vendor == "nvidia" else driver

    def _with_kernels(self, processes: Sequence[Process], devices: Sequence[Accelerator]) -> tuple[Process, ...]:
        """The users of GPUs with what their kernel libraries were built for; ranks of one container share them."""
        if not any(d.capability for d in devices):
            return tuple(processes)
        users, seen = {p.pid for p in self._processes}, {}
        found = []
        for process in processes:
            space = process.namespaces.mnt if isinstance(process.namespaces, Namespaces) else process.pid
            key = (space, process.libraries)
            if process.pid in users and key not in seen:
                seen[key] = fatbin.kernels_of(process, self._root)
            kernels = seen.get(key, ()) if process.pid in users else ()
            found.append(msgspec.structs.replace(process, kernels=kernels) if kernels else process)
        return tuple(found)

    def close(self) -> None:
        """End what was started."""
        for probe in self._probes:
            probe.close()

    def _cost(self, source: str, start: float, note: str = "") -> None:
        self._costs.append(SourceCost(source=source, wall_s=round(time.monotonic() - start, 4), note=note))

    # -- devices ------------------------------------------------------------------------------------------------------

    def _watch_devices(self) -> None:
        """A look at the begin of the window and one at its end."""
        start = time.monotonic()
        for probe in self._probes:
            probe.read(start + _DEVICES_S)
        took = time.monotonic() - start
        if not self._stop.wait(max(0.0, self._window_s - took / 2 - self._clock())):
            again = time.monotonic()
            for probe in self._probes:
                probe.read(again + _DEVICES_S)
            took += time.monotonic() - again
        self._costs.append(SourceCost(source="devices", wall_s=round(took, 4)))

    # -- NCCL RAS -----------------------------------------------------------------------------------------------------

    def _find_listeners(self, sockets: Sequence[Socket]) -> list[nccl_ras.Listener]:
        """Where to ask: only a socket on the port of RAS that a process with NCCL, and with room for us, listens on."""
        ras = gpu().ras
        _, port = nccl_ras.address(self._environments, ras.host, ras.port)
        roomy = {p.pid for p in self._nccl if _has_room(p)}
        found: dict[tuple[int, str], list[int]] = {}
        for sock in sockets:
            if sock.state == "LISTEN" and sock.family != "unix" and sock.port == port:
                host = sock.local.rpartition(":")[0].strip("[]")
                mine = [pid for pid in sock.pids if pid in roomy]
                found.setdefault((sock.netns, _reachable(host)), []).extend(mine)
        return [nccl_ras.Listener(host, port, tuple(dict.fromkeys(pids))) for (_, host), pids in found.items() if pids]

    def _ask_ras(self) -> None:
        """Two surveys, as far apart as the window allows."""
        start = time.monotonic()
        deadline = start + max(0.0, self._window_s - self._clock()) + _AFTER_S
        self._survey(deadline)
        apart = max(self._window_s - self._clock(), _APART_S)
        if self._reports and time.monotonic() + apart < deadline and not self._stop.wait(apart):
            self._survey(deadline)
        self._cost("NCCL RAS", start, f"{len(self._reports)} reports")

    def _survey(self, deadline: float) -> None:
        for listener in self._listeners:
            reports, errors = nccl_ras.survey(listener, deadline, self._clock, self._same_process, self._stop)
            self._reports += reports
            self._errors += errors

    def _same_process(self, pid: int, told: int) -> bool:
        process = next((p for p in self._nccl if p.pid == pid), None)
        return process is not None and told in {pid, *process.nspids[-1:]}

    # -- flight recorder ----------------------------------------------------------------------------------------------

    def _read_records(self) -> None:
        from . import flight_recorder

        start = time.monotonic()
        self._records, holes = flight_recorder.records(self._processes, self._environments, self._root)
        self._missing += holes
        self._cost("flight recorder", start)

    # -- what could not be seen ---------------------------------------------------------------------------------------

    def _holes(self, drivers: Sequence[Driver]) -> list[Missing]:
        found = [Missing(what=f"{d.vendor} GPUs", why=d.text, next=d.next) for d in drivers if d.problem]
        if self._processes and not self._probes and (self._thorough or any(p.device_files for p in self._processes)):
            found.append(accelerators.why_none(self._processes, self._root))
        if self._listeners and not self._reports and self._errors:
            found.append(self._no_report(self._errors[-1]))
        elif self._nccl and not self._listeners and (self._thorough or len(self._nccl) > 1):
            found.append(self._no_listener())
        return found

    def _no_report(self, error: nccl_ras.RasError) -> Missing:
        pid = self._listeners[0].pids[0]
        after = "vllmdiag ps" if error.kind in _WHY else "vllmdiag gpu once more"
        if error.kind == "not-permitted":
            after = f"nsenter -t {pid} -n vllmdiag gpu {pid}, or run it inside the container"
        return Missing(what="NCCL RAS", why=_WHY.get(error.kind, str(error)), next=after)

    def _no_listener(self) -> Missing:
        ras = gpu().ras
        port = nccl_ras.address(self._environments, ras.host, ras.port)[1]
        if any(environment.get("NCCL_RAS_ENABLE") == "0" for environment in self._environments):
            why, after = "the server was started with NCCL_RAS_ENABLE=0", "leave that out at the next start"
        elif any(isinstance(p.socket_inodes, Missing) for p in self._nccl):
            why, after = "which process listens may not be seen by this user", "run as the user of the server, or root"
        elif len(self._nccl) == 1:
            why, after = "one rank has no communicator, so NCCL does not listen", "vllmdiag stacks"
        else:
            why = (
                f"no rank listens on port {port}: no communicator yet, NCCL older than {ras.first_version}, "
                "or the job of another user holds the port"
            )
            after = f"ss -ltnp 'sport = :{port}'"
        return Missing(what="NCCL RAS", why=why, next=after)


def _has_room(process: Process) -> bool:
    """Its table of descriptors is not about to be full: accepting us must not be what breaks it."""
    limit = process.limits.nofile if isinstance(process.limits, Limits) else None
    return limit is None or process.n_fds is None or process.n_fds + _FD_ROOM <= limit


def _reachable(host: str) -> str:
    return {"": "127.0.0.1", "*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
