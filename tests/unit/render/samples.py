"""Hand-made values to render: one diagnosis or view for each picture that an engineer may meet."""

from __future__ import annotations

import msgspec

from vllmdiag.model.base import Missing
from vllmdiag.model.diagnosis import (
    Cost,
    Diagnosis,
    Finding,
    LayerResult,
    Link,
    NextStep,
    Subject,
    Target,
    Verdict,
)
from vllmdiag.model.http import HttpProbe
from vllmdiag.model.process import Frame
from vllmdiag.model.ring import Geometry, decode
from vllmdiag.model.shm import PeekedSlot
from vllmdiag.model.sockets import ZmtpProbe
from vllmdiag.model.view import (
    ClientView,
    ConnectionView,
    CounterView,
    EndpointView,
    HttpConnectionView,
    InstanceLine,
    InstanceView,
    MemberView,
    MountView,
    Party,
    ReaderView,
    RingView,
    SegmentView,
    StackView,
)

MIB = 1024 * 1024
API = Party(label="APIServer", pid=2839)
CORE = Party(label="EngineCore", pid=2852)
TP0 = Party(label="Worker_TP0", pid=2862)
TP1 = Party(label="Worker_TP1", pid=2863)

_CLIENT = Subject(role="Client", label="client")
_API = Subject(role="APIServer", pid=2839, label="APIServer")
_CORE = Subject(role="EngineCore", pid=2852, label="EngineCore")
_TP0 = Subject(role="Worker", pid=2862, rank={"tp": 0}, label="Worker_TP0")
_TP1 = Subject(role="Worker", pid=2863, rank={"tp": 1}, label="Worker_TP1")

_TARGET = Target(
    api_server_pids=(2839,), engine_pids=(2852,), worker_pids=(2862, 2863), vllm_version="0.32.0", port=8000
)


def _layers(**said: tuple[str, str]) -> tuple[LayerResult, ...]:
    names = ("process", "handshake", "queue", "gpu", "client")
    usual = ("ok", "nothing stands out")
    return tuple(
        LayerResult(layer=i, name=name, status=said.get(name, usual)[0], summary=said.get(name, usual)[1])  # type: ignore[arg-type]
        for i, name in enumerate(names, 1)
    )


def critical() -> Diagnosis:
    """One worker is stopped; the others wait for it."""
    chain = (
        Link(subject=_CLIENT, doing=""),
        Link(subject=_API, doing=""),
        Link(subject=_CORE, doing=""),
        Link(subject=_TP0, doing="all_reduce"),
        Link(subject=_TP1, doing=""),
    )
    evidence = (
        "stat of 2863: T, 0 ticks in 3.0 s",
        "broadcast ring slot 5: reader 1 has not read",
        "TP0 in all_reduce in 3 of 3 stacks",
    )
    step = NextStep(command="kill -CONT 2863", why="it runs on; vllmdiag explain process-stopped", risk="none")
    stopped = Finding(
        cause="process-stopped",
        layer=1,
        severity="critical",
        confidence="high",
        subject=_TP1,
        summary="Worker_TP1 (pid 2863) is stopped (T)",
        evidence=evidence,
        since_s=3.0,
    )
    return Diagnosis(
        tool="0.1.0",
        observed_at="2026-11-30T22:31:00Z",
        window_s=3.0,
        target=_TARGET,
        verdict=Verdict(
            status="critical",
            cause="process-stopped",
            layer=1,
            subject=_TP1,
            since_s=3.0,
            confidence="high",
            summary="Worker_TP1 (pid 2863) is stopped (T)",
            chain=chain,
            next=(step,),
            evidence=evidence,
        ),
        layers=_layers(
            process=("fault", "1 of 4 processes is stopped"),
            queue=("suspect", "broadcast ring: reader 1 lags by 1"),
            gpu=("unknown", "no NVIDIA driver on this host"),
        ),
        findings=(
            stopped,
            Finding(
                cause="reader-lags",
                layer=3,
                severity="warning",
                confidence="high",
                subject=_TP1,
                summary="broadcast ring: Worker_TP1 has not read slot 5",
                folded_into="process-stopped",
            ),
            *(
                Finding(
                    cause="collective-waits",
                    layer=4,
                    severity="warning",
                    confidence="medium",
                    subject=Subject(role="Worker", pid=2862 + rank, rank={"tp": rank}, label=f"Worker_TP{rank}"),
                    summary=f"Worker_TP{rank} waits in all_reduce",
                    folded_into="process-stopped",
                )
                for rank in (0, 2, 3)
            ),
        ),
        missing=(Missing(what="GPUs", why="no NVIDIA driver on this host", next=""),),
        cost=Cost(wall_s=3.41, processes_dumped=4, sources={"procfs": 0.101, "py-spy": 0.35}),
    )


def idle() -> Diagnosis:
    """Healthy, nothing to do."""
    return Diagnosis(
        window_s=3.0,
        target=_TARGET,
        verdict=Verdict(
            status="ok",
            cause="idle",
            layer=0,
            subject=Subject(role="EngineCore", pid=2852, label="EngineCore"),
            since_s=None,
            confidence="high",
            summary="EngineCore waits for requests, no request is outstanding",
        ),
        layers=_layers(),
    )


def unknown() -> Diagnosis:
    """Too little could be seen."""
    denied = "EACCES: descriptors belong to uid 1001, this shell has uid 1000"
    return Diagnosis(
        window_s=3.0,
        target=Target(api_server_pids=(2839,), port=8000),
        verdict=Verdict(
            status="unknown",
            cause="unknown",
            layer=0,
            subject=Subject(role="Host"),
            since_s=None,
            confidence="low",
            summary="a request is outstanding and nothing moved, but stacks and rings could not be read",
            next=(NextStep(command="sudo vllmdiag diagnose 2839", why="root may read them", risk="none"),),
        ),
        layers=_layers(
            queue=("unknown", "rings not readable: run as root"), gpu=("unknown", "stacks not readable: run as root")
        ),
        missing=(
            *(
                Missing(what=f"stacks of pid {pid}", why=denied, next="sudo vllmdiag diagnose 2839")
                for pid in (2839, 2852, 2862, 2863, 2864, 2865)
            ),
            Missing(what="kernel log", why="EPERM: dmesg_restrict is 1", next="grant CAP_SYSLOG"),
        ),
    )


def warning() -> Diagnosis:
    """A client that does not read, and a resource that runs out, unrelated to it."""
    client = Subject(role="Client", label="client 10.0.0.7:51234")
    step = NextStep(command="vllmdiag client 2839", why="", risk="none")
    return Diagnosis(
        window_s=10.0,
        target=_TARGET,
        verdict=Verdict(
            status="warning",
            cause="client-does-not-read",
            layer=5,
            subject=client,
            since_s=610.0,
            confidence="medium",
            summary="2.4 MiB of answer wait in the send queue",
            next=(
                step,
                NextStep(command="ss -K dst 10.0.0.7", why="drops its connections", risk="its requests are lost"),
            ),
            evidence=("send queue 2 516 582 bytes in 5 of 5 samples",),
        ),
        layers=_layers(client=("fault", "1 of 12 connections is not read")),
        findings=(
            Finding(
                cause="descriptors-nearly-used-up",
                layer=1,
                severity="warning",
                confidence="high",
                subject=_API,
                summary="APIServer (pid 2839) has 980 of 1024 descriptors open",
                evidence=("Max open files 1024 (soft)",),
                next=(NextStep(command="prlimit --pid 2839 --nofile=65536", why="raises it", risk="none"),),
            ),
            Finding(
                cause="zmq-version-old",
                layer=2,
                severity="info",
                confidence="high",
                subject=_API,
                summary="APIServer (pid 2839) runs libzmq 4.3.2",
            ),
        ),
    )


def instance() -> InstanceView:
    """The stopped worker again, seen by every verb."""
    ring = decode(bytes([1, 1, 1] * 5 + [1, 1, 0] + [0, 0, 0] * 4), 2)
    response = decode(bytes([1, 1] * 10), 1)
    core_stack = (
        Frame(name="acquire_read", file="vllm/distributed/device_communicators/shm_broadcast.py", line=802),
        Frame(name="dequeue", file="vllm/distributed/device_communicators/shm_broadcast.py", line=880),
    )
    return InstanceView(
        observed_at="2026-11-30T22:31:00Z",
        window_s=3.0,
        vllm_version="0.32.0",
        model="tiny",
        node="gpu-17",
        port=8000,
        members=(
            _member(2839, "APIServer", "S", 0, 760, 510, cpu=0.01, doing="serves HTTP"),
            _member(2845, "ResourceTracker", "S", 1, 12, 4),
            _member(2852, "EngineCore", "S", 1, 700, 420, cpu=0.02, doing="waits for the reply of its workers"),
            _member(2862, "Worker_TP0", "R", 2, 1800, 1300, cpu=1.0, doing="in all_reduce"),
            _member(2863, "Worker_TP1", "T", 2, 1800, 1290, cpu=0.0, doing="stopped", abnormal=True),
        ),
        rings=(
            RingView(
                segment="psm_cafe0001",
                queue="response ring",
                geometry=Geometry(chunks=10, chunk_bytes=24 * MIB, n_readers=1),
                writer=TP0,
                readers=(ReaderView(index=0, party=CORE),),
                last=response,
                motion="idle",
                summary="every message read",
                rate=0.0,
                still_s=3.0,
                polls=2950,
                polled_s=3.0,
            ),
            RingView(
                segment="psm_cafe0000",
                queue="broadcast ring",
                geometry=Geometry(chunks=10, chunk_bytes=16 * MIB, n_readers=2),
                geometry_known_by="version 0.32.0",
                writer=CORE,
                readers=(
                    ReaderView(index=0, party=TP0),
                    ReaderView(index=1, party=TP1, lag=1, unread_s=3.0),
                ),
                last=ring,
                motion="stuck",
                summary="slot 5 unread by Worker_TP1 for at least 3.0 s",
                rate=0.0,
                still_s=3.0,
                polls=2950,
                polled_s=3.0,
                overflow_slots=(1,),
                peeked=(PeekedSlot(slot=5, method="execute_model", length=607, overflow=False),),
            ),
        ),
        segments=(
            SegmentView(
                name="psm_cafe0000",
                kind="broadcast ring",
                size=167772190,
                resident=40960,
                holders=(CORE, TP0, TP1),
            ),
            SegmentView(
                name="psm_dead0001",
                kind="response ring",
                size=251658260,
                resident=90112,
                age_s=86400.0,
                orphan=True,
                removable=True,
                why="no process has it open or mapped",
            ),
            SegmentView(
                name="psm_dead0002",
                kind="other",
                size=4096,
                resident=4096,
                age_s=90000.0,
                orphan=True,
                why="no process has it open or mapped; not known to be vLLM's",
            ),
        ),
        mounts=(MountView(path="/dev/shm", size=64 * MIB, free=2 * MIB, seen_by=(API, CORE, TP0, TP1)),),
        endpoints=(
            EndpointView(
                name="engine input",
                address="ipc:///tmp/1f0c",
                pattern="ROUTER <- DEALER",
                binder=API,
                path_exists=True,
                connections=(ConnectionView(peer=CORE, to_peer=49152, stuck=True),),
                probe=ZmtpProbe(
                    endpoint="ipc:///tmp/1f0c",
                    inode=1,
                    owner=2839,
                    outcome="ready",
                    socket_type="ROUTER",
                    identity_length=0,
                    version="3.1",
                    took_s=0.0004,
                ),
            ),
            EndpointView(
                name="ring notify",
                address="ipc:///tmp/2b7e",
                pattern="PUB <- SUB",
                binder=CORE,
                path_exists=False,
                connections=(ConnectionView(peer=TP0), ConnectionView(peer=TP1)),
                probe=ZmtpProbe(
                    endpoint="ipc:///tmp/2b7e",
                    inode=2,
                    owner=2852,
                    outcome="gone",
                    took_s=0.0001,
                    reason="the file is not there",
                ),
            ),
            EndpointView(
                name="unknown",
                address="tcp://127.0.0.1:5557",
                binder=CORE,
                waiting=3,
                backlog=100,
                expected=(Party(label="Worker_TP2"),),
                probe=ZmtpProbe(
                    endpoint="tcp://127.0.0.1:5557",
                    inode=3,
                    owner=2852,
                    outcome="gated",
                    reason="3 connections wait to be accepted already",
                    next="vllmdiag diagnose",
                ),
            ),
        ),
        stale_ipc_paths=tuple(f"/tmp/{n}f2c1d7e-0000-4000-8000-000000000000" for n in range(7)),
        clients=(
            ClientView(
                port=8000,
                servers=(API,),
                connections=(
                    HttpConnectionView(remote="10.0.0.7:51234", server=API, send_q=2516582, stuck=True),
                    HttpConnectionView(remote="10.0.0.8:40000", server=API),
                    HttpConnectionView(remote="10.0.0.9:40001", state="FIN-WAIT-1", send_q=10),
                ),
                probes=(
                    HttpProbe(
                        t=3.0,
                        port=8000,
                        path="/health",
                        status=200,
                        connect_s=0.0001,
                        first_byte_s=0.002,
                        total_s=0.0021,
                    ),
                    HttpProbe(t=3.0, port=8000, path="/metrics", status=None, error="timeout", connect_s=0.0001),
                ),
                counters=(
                    CounterView(name="num_requests_running", engine="0", first=1, last=1, gauge=True),
                    CounterView(name="generation_tokens_total", engine="0", first=1200, last=1200),
                    CounterView(name="prompt_tokens_total", engine="0", first=100, last=1350),
                ),
            ),
        ),
        stacks=(
            StackView(
                pid=2852,
                label="EngineCore",
                thread="MainThread",
                main=True,
                dumps=3,
                same=3,
                frames=core_stack,
                meaning="waits for the reply of its workers",
                cpu=0.02,
            ),
            *(
                StackView(
                    pid=2862 + rank,
                    label=f"Worker_TP{rank}",
                    thread="MainThread",
                    main=True,
                    dumps=3,
                    same=3,
                    frames=(Frame(name="all_reduce", file="vllm/distributed/parallel_state.py", line=513),),
                    meaning="in a collective",
                    on_cpu=True,
                    cpu=1.0 - rank / 10,
                )
                for rank in (0, 2, 3)
            ),
            StackView(pid=2852, label="EngineCore", thread="Thread-1", dumps=3, same=3),
        ),
        missing=(
            Missing(what="stacks of pid 2863", why="py-spy gave no frame", next="vllmdiag stacks 2863 --window 10"),
        ),
    )


def parted() -> InstanceView:
    """Eight ranks in a collective, and one that is elsewhere."""
    loop = Frame(name="worker_busy_loop", file="vllm/v1/executor/multiproc_executor.py", line=981)
    step = Frame(name="execute_model", file="vllm/v1/worker/gpu_worker.py", line=612)
    reduce = Frame(name="all_reduce", file="vllm/distributed/parallel_state.py", line=513)
    sample = Frame(name="sample", file="vllm/v1/sample/sampler.py", line=88)
    ranks = tuple(
        StackView(
            pid=2862 + rank,
            label=f"Worker_TP{rank}",
            thread="MainThread",
            main=True,
            dumps=3,
            same=3,
            frames=(sample if rank == 5 else reduce, step, loop),
            meaning="" if rank == 5 else "in a collective",
        )
        for rank in range(9)
    )
    return msgspec.structs.replace(instance(), stacks=(*instance().stacks[:1], *ranks))


def leftovers() -> InstanceView:
    """No vLLM runs any more, and something of it is left in /dev/shm."""
    orphans = tuple(segment for segment in instance().segments if segment.orphan)
    return InstanceView(window_s=0.2, node="gpu-17", segments=orphans, mounts=instance().mounts)


def instances() -> tuple[InstanceLine, ...]:
    """Two instances on one host."""
    return (
        InstanceLine(pid=2839, role="APIServer", port=8000, members=5, vllm_version="0.32.0", model="tiny"),
        InstanceLine(pid=4100, role="EngineCore", members=2, vllm_version="0.12.0", abnormal=("Worker_TP1 stopped",)),
    )


def _member(
    pid: int,
    label: str,
    state: str,
    depth: int,
    rss: int,
    pss: int,
    *,
    cpu: float = 0.0,
    doing: str = "",
    abnormal: bool = False,
) -> MemberView:
    return MemberView(
        pid=pid,
        role=label.partition("_")[0],
        label=label,
        state=state,
        doing=doing,
        abnormal=abnormal,
        known_by="title",
        depth=depth,
        cpu=cpu,
        threads=20,
        age_s=3700.0,
        rss=rss * MIB,
        pss=pss * MIB,
        shmem=MIB // 2,
    )
