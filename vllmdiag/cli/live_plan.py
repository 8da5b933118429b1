"""The topology of a live server, for the verbs that do arithmetic on it."""

from __future__ import annotations

from vllmdiag.diagnosis.scene import Scene, scene_of
from vllmdiag.model.errors import TargetError
from vllmdiag.model.plan import Topology
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.plan.asked import topology_of

_SETTINGS = ("VLLM_MQ_MAX_CHUNK_BYTES_MB", "VLLM_RPC_BASE_PATH", "TMPDIR")


def topology_of_live(seen: Snapshot) -> tuple[Scene, Topology]:
    """Who is who, and how it was started.

    Raises:
        TargetError: no `vllm serve` command line could be read.
    """
    scene = scene_of(seen)
    if scene is None or scene.options is None:
        raise TargetError(
            "how this server was started is not known",
            why="no `vllm serve` command line could be read of it",
            next="say it: vllmdiag plan --tp N --dp N",
        )
    executor = None
    if scene.options.world_size == 1 and scene.engines:
        executor = "mp" if scene.workers else "uni"
    environ = {name: value for name in _SETTINGS if (value := scene.environ(name)) is not None}
    return scene, topology_of(scene.options, environ, version=scene.version, executor=executor)
