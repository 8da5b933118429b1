"""A tree of processes with the titles of vLLM whose workers have a libnccl mapped and speak RAS, as a program.

``vllm serve model --port N --sample NAME --workers K --directory D``: D holds a file libnccl.so.2 to map; the port of
RAS is in NCCL_RAS_ADDR. Each worker answers with the sample, in which the pids are those of the workers. With
``--listen 0`` nobody speaks RAS.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, os.environ["FAKE_RAS_DIRECTORY"])
import fake_ras  # type: ignore[import-not-found]

PR_SET_PDEATHSIG = 1


def title(text: str) -> None:
    """Write over argv, as setproctitle does."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text.encode(), len(text))


def child(name: str) -> int:
    """Fork; returns 0 in the child, which has the title and dies with its parent."""
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        title(name)
    return pid


class Worker:
    """Answers with the sample; the pids are read when it is asked, for they are known only then."""

    def __init__(self, sample: str, directory: Path) -> None:
        self.sample, self.directory = sample, directory

    def __call__(self, link: socket.socket) -> None:
        """Send the report."""
        pids = json.loads((self.directory / "workers.json").read_text())
        report = json.loads((fake_ras.SAMPLES / f"{self.sample}.json").read_text())
        for communicator in report["communicators"]:
            for rank in (*communicator["ranks"], *communicator["missing_ranks"]):
                rank["pid"] = pids[rank["rank"]]
        link.sendall(json.dumps(report).encode())


def main() -> None:
    """Start the tree, print its pids (server, engine, workers) and wait to be killed."""
    options = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=True))
    directory = Path(options["--directory"])
    reader, writer = os.pipe()
    if child("VLLM::EngineCore") == 0:
        os.write(writer, f"{os.getpid()} ".encode())
        for rank in range(int(options["--workers"])):
            pid = child(f"VLLM::Worker_TP{rank}")
            if pid == 0:
                library = open(directory / "libnccl.so.2", "rb")  # noqa: SIM115  kept for as long as it runs
                mapped = mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ)
                if options.get("--listen") != "0":
                    body = Worker(options["--sample"], directory)
                    port = int(os.environ["NCCL_RAS_ADDR"].rpartition(":")[2])
                    fake_ras.Server(fake_ras.Ras(options["--sample"], body=body), port)
                os.write(writer, f"{os.getpid()} ".encode())
                while mapped:
                    time.sleep(3600)
        while True:
            time.sleep(3600)
    said = b""
    while len(said.split()) < 1 + int(options["--workers"]) or not said.endswith(b" "):
        said += os.read(reader, 4096)
    engine, *workers = (int(word) for word in said.split())
    by_rank = sorted(workers)
    (directory / "workers.json").write_text(json.dumps(by_rank))
    server = socket.socket()
    server.bind(("127.0.0.1", int(options["--port"])))
    server.listen()
    print(json.dumps([os.getpid(), engine, *by_rank]), flush=True)
    while True:
        server.accept()[0].close()


if __name__ == "__main__":
    main()
