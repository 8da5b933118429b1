"""The numbers of a look that a monitoring system keeps."""

from __future__ import annotations

from collections.abc import Iterator

from vllmdiag.model.check import Measure
from vllmdiag.model.diagnosis import Diagnosis, LayerStatus
from vllmdiag.model.view import InstanceView

_LAYER: dict[LayerStatus, int] = {"ok": 0, "suspect": 1, "fault": 2, "unknown": 3}
_GAUGES = {"num_requests_running": "requests_running", "num_requests_waiting": "requests_waiting"}


def measures_of(diagnosis: Diagnosis, view: InstanceView) -> tuple[Measure, ...]:
    """Layers, processes, rings, HTTP."""
    return (*_layers(diagnosis), _processes(view), *_rings(view), *_http(view))


def _layers(diagnosis: Diagnosis) -> Iterator[Measure]:
    for layer in diagnosis.layers:
        yield Measure(
            name="layer_status",
            value=_LAYER[layer.status],
            help="Of each layer: 0 ok, 1 suspect, 2 fault, 3 unknown.",
            labels={"layer": str(layer.layer), "name": layer.name},
        )


def _processes(view: InstanceView) -> Measure:
    count = sum(m.pid is not None and m.role not in ("Helper", "ResourceTracker") for m in view.members)
    return Measure(name="processes", value=count, help="Processes of the instance.")


def _rings(view: InstanceView) -> Iterator[Measure]:
    for ring in view.rings:
        labels = {"queue": ring.queue, "writer": ring.writer.label if ring.writer else "not known"}
        if ring.rate is not None:
            yield Measure(
                name="ring_messages_per_second",
                value=ring.rate,
                help="Messages seen to be published in a ring, a second; a lower bound.",
                labels=labels,
            )
        if ring.last is not None:
            yield Measure(
                name="ring_unread_slots",
                value=ring.last.pending,
                help="Slots that at least one reader has not taken at the end of the look.",
                labels=labels,
            )


def _http(view: InstanceView) -> Iterator[Measure]:
    for client in view.clients:
        for probe in client.probes:
            if probe.path == "/health" and probe.status is not None and probe.total_s is not None:
                yield Measure(
                    name="health_seconds",
                    value=round(probe.total_s, 6),
                    help="How long GET /health took.",
                    unit="s",
                    labels={"port": str(probe.port)},
                )
        for counter in client.counters:
            if counter.name in _GAUGES and counter.last is not None:
                yield Measure(
                    name=_GAUGES[counter.name],
                    value=counter.last,
                    help="Requests, as /metrics of the server says; it may be stale.",
                    labels={"engine": counter.engine},
                )
