from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import pytest

from vllmdiag.sources.viewer import cpu_times, hidepid, node, sees_all_pids, viewer


def write(root: Path, name: str, text: str) -> None:
    path = root / "proc" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.needs("root")
def test_access_follows_from_capability_and_owner(as_nobody: Any) -> None:
    assert as_nobody(viewer).access == "same-uid"
    assert as_nobody(viewer).capabilities == ()
    assert as_nobody(lambda: viewer(target_uids=[65534])).access == "same-uid"
    assert as_nobody(lambda: viewer(target_uids=[0, 1000])).access == "observer"


def test_the_viewer_is_this_process() -> None:
    seen = viewer()
    assert (seen.pid, seen.uid) == (os.getpid(), os.geteuid())
    assert (seen.access == "full") == ("CAP_SYS_PTRACE" in seen.capabilities)
    assert seen.namespaces["pid"] == os.stat("/proc/self/ns/pid").st_ino


def test_capabilities_yama_and_hidepid_are_read_from_the_tree(tmp_path: Path) -> None:
    write(tmp_path, "self/status", "Uid:\t7\t8\t8\t8\nCapEff:\t0000010000280000\n")
    write(tmp_path, "sys/kernel/yama/ptrace_scope", "2\n")
    write(tmp_path, "self/mounts", "none /x proc rw,hidepid=1 0 0\nproc /proc proc rw,nosuid,hidepid=invisible 0 0\n")
    seen = viewer(str(tmp_path))
    assert (seen.uid, seen.yama_scope, seen.hidepid, seen.access) == (8, 2, 2, "full")
    assert seen.capabilities == ("CAP_SYS_PTRACE", "CAP_SYS_ADMIN", "CAP_CHECKPOINT_RESTORE")
    assert sees_all_pids(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "level", "sees_all"),
    [("rw", 0, True), ("rw,hidepid=1", 1, True), ("rw,hidepid=2", 2, False), ("rw,hidepid=ptraceable,gid=5", 4, False)],
)
def test_hidden_processes_are_known_to_be_hidden(tmp_path: Path, options: str, level: int, sees_all: bool) -> None:
    write(tmp_path, "self/status", "CapEff:\t0000000000000000\n")
    write(tmp_path, "self/mounts", f"proc /proc proc {options} 0 0\n")
    assert hidepid(str(tmp_path)) == level
    assert sees_all_pids(str(tmp_path)) == sees_all


def test_the_node_is_this_machine() -> None:
    seen = node()
    assert (seen.hostname, seen.kernel, seen.machine) == (platform.node(), platform.release(), platform.machine())
    assert seen.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert seen.n_cpus >= len(os.sched_getaffinity(0))
    assert seen.mem_total is not None
    assert seen.mem_available is not None
    assert 0 < seen.mem_available < seen.mem_total
    assert seen.load1 is not None


def test_an_empty_tree_gives_a_node_without_facts(tmp_path: Path) -> None:
    seen = node(str(tmp_path))
    assert (seen.hostname, seen.n_cpus, seen.load1, seen.mem_total) == ("", 0, None, None)


def test_the_share_of_the_kernel_is_that_of_the_time_between_two_looks(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "pressure").mkdir(parents=True)
    (proc / "pressure" / "cpu").write_text("some avg10=93.50 avg60=1.00 avg300=0.10 total=5\nfull avg10=0.00\n")
    (proc / "stat").write_text("cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 100 0 100 800 0 0 0 0 0 0\n")
    before = cpu_times(str(tmp_path))
    (proc / "stat").write_text("cpu  110 0 190 800 0 3 2 0 0 0\ncpu0 110 0 190 800 0 3 2 0 0 0\n")
    seen = node(str(tmp_path), before)
    assert seen.kernel_share == pytest.approx(95 / 105)
    assert seen.pressure_cpu == pytest.approx(0.935)
    assert node(str(tmp_path)).kernel_share is None


def test_this_machine_tells_how_its_processors_are_used() -> None:
    before = cpu_times()
    assert 0 < before.kernel < before.total
    shares = [node("/", before).kernel_share for _ in range(50)]
    assert all(share is None or 0 <= share <= 1 for share in shares)
