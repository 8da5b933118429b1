"""One end of a message queue, ours or vLLM's: ``python queue_peer.py ours|installed|PATH < one line of JSON``.

PATH is the file ``shm_broadcast.py`` of a release that is not installed: it is run with the little that it needs of
torch and vLLM put in its place. The line says which version's dialect to speak, and ``"write": [readers, local]`` or
``"read": handle`` (always ours, as JSON). Answers are lines of JSON too: the handle of a writer, and at the end the
digests of all messages.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import socket
import sys
import tempfile
import time
import types
import uuid
from pickle import PickleBuffer
from typing import Any

CHUNK = 24 << 20
MIB = 1 << 20
TIMEOUT_S = 120
IDLE_S = 1.5
"""Longer than a reader spins: the next message has to wake it."""


def messages() -> list[Any]:
    """Fewer than a ring has slots: before 0.32 what vLLM's reader returns may lie in its slot."""
    return [
        ("execute_model", ({"req_id": "cmpl-1", "ids": [65, 66]},), {}, 0),
        b"",
        PickleBuffer(_bytes(8 * MIB)),
        [PickleBuffer(_bytes(MIB + more)) for more in (-1, 0, 1)],
        _bytes(CHUNK - 7 - 100),
        _bytes(CHUNK + 1),
        PickleBuffer(_bytes(CHUNK + MIB)),
        list(range(1000)),
        ("shutdown", (), {}, None),
    ]


def _bytes(size: int) -> bytearray:
    return bytearray((bytes(range(251)) * (size // 251 + 1))[:size])


def digest(obj: Any) -> str:
    """Equal for equal messages, whatever kind of buffer bytes came back as."""
    if isinstance(obj, (list, tuple)):
        return repr([digest(item) for item in obj])
    if obj is None or isinstance(obj, (str, int, dict)):
        return repr(obj)
    return hashlib.sha256(memoryview(obj)).hexdigest()


def _stub(name: str, **attributes: Any) -> None:
    module = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update(attributes)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stub_everything() -> None:
    class Zeroes:
        """What the file does with torch: fill the flags with zeroes."""

        def __init__(self, buffer: memoryview, **_: Any) -> None:
            self.buffer = buffer

        def fill_(self, value: int) -> None:
            self.buffer[:] = bytes([value]) * len(self.buffer)

    functions = {
        "get_ip": lambda: "127.0.0.1",
        "get_open_port": _free_port,
        "get_open_zmq_ipc_path": lambda: f"ipc://{tempfile.gettempdir()}/{uuid.uuid4()}",
        "get_open_zmq_inproc_path": lambda: f"inproc://{uuid.uuid4()}",
        "is_valid_ipv6_address": lambda _: False,
    }
    kind = type("NotHere", (), {})
    _stub("torch", frombuffer=Zeroes, uint8=None, Tensor=kind)
    _stub("torch.distributed", ProcessGroup=kind)
    _stub("vllm")
    _stub("vllm.envs", VLLM_RINGBUFFER_WARNING_INTERVAL=60, VLLM_SLEEP_WHEN_IDLE=False)
    _stub("vllm.distributed")
    _stub("vllm.distributed.utils", StatelessProcessGroup=kind, sched_yield=os.sched_yield)
    _stub("vllm.logger", init_logger=logging.getLogger)
    _stub("vllm.platforms", current_platform=None)
    _stub("vllm.utils", **functions)
    _stub("vllm.utils.network_utils", **functions)


def _load(which: str) -> Any:
    """The module that has `MessageQueue` and `Handle`."""
    if which == "ours":
        import vllmdiag.refqueue

        return vllmdiag.refqueue
    if which == "installed":
        return importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    _stub_everything()
    spec = importlib.util.spec_from_file_location("shm_broadcast", which)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["shm_broadcast"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Do what the line says."""
    import msgspec

    from vllmdiag.refqueue import Dialect, Handle

    module = _load(sys.argv[1])
    job = json.loads(sys.stdin.readline())
    ours = sys.argv[1] == "ours"
    speak = {"dialect": Dialect.of(job["version"])} if ours else {}
    if "write" in job:
        queue = module.MessageQueue(*job["write"], max_chunk_bytes=CHUNK, connect_ip="127.0.0.1", **speak)
        handle = queue.export_handle()
        exported = handle if ours else Handle.from_vllm(handle)
        print(msgspec.json.encode(exported).decode(), flush=True)
        queue.wait_until_ready()
        digests = []
        for number, message in enumerate(messages()):
            if number in {1, 7}:
                time.sleep(IDLE_S)
            queue.enqueue(message, timeout=TIMEOUT_S)
            digests.append(digest(message))
        sys.stdin.readline()  # the readers are done
    else:
        handle = msgspec.convert(job["read"], Handle)
        native = handle if ours else handle.to_vllm(module.Handle)
        queue = module.MessageQueue.create_from_handle(native, job["rank"], **speak)
        queue.wait_until_ready()
        digests = [digest(queue.dequeue(timeout=TIMEOUT_S)) for _ in messages()]
    print(json.dumps(digests), flush=True)


if __name__ == "__main__":
    main()
