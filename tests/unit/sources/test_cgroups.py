from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllmdiag.model.base import Missing
from vllmdiag.model.process import Cgroup
from vllmdiag.sources.cgroups import cgroup_of

V2 = "30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "".join(
    f"{n} 20 0:{n} / /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n"
    for n, name in enumerate(("memory", "pids", "cpu,cpuacct", "freezer"), start=31)
)
HYBRID = V1 + "38 20 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"


def process(root: Path, pid: int, cgroup: str, mounts: str, *, theirs: str = "") -> str:
    for who, text in (("self", mounts), (str(pid), theirs)):
        (root / "proc" / who).mkdir(parents=True, exist_ok=True)
        (root / "proc" / who / "mountinfo").write_text(text)
    (root / "proc" / str(pid) / "cgroup").write_text(cgroup)
    return str(root)


def group(root: Path, place: str, **files: str) -> None:
    directory = root / place
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text + "\n")


def known(pid: int, root: str) -> Cgroup:
    found = cgroup_of(pid, root)
    assert isinstance(found, Cgroup)
    return found


def test_version_2_tells_limits_kills_throttling_and_freezing(tmp_path: Path) -> None:
    group(
        tmp_path,
        "sys/fs/cgroup/pod/box",
        memory__max="1000",
        memory__current="400",
        memory__stat="anon 1\nshmem 77\nshmem_thp 5",
        memory__events="oom 2\noom_kill 3\noom_group_kill 0",
        pids__max="max",
        pids__current="9",
        cpu__stat="usage_usec 1\nnr_throttled 4\nthrottled_usec 2500000",
        cgroup__events="populated 1\nfrozen 1",
    )
    assert known(5, process(tmp_path, 5, "0::/pod/box\n", V2)) == Cgroup(
        path="/pod/box",
        version=2,
        frozen=True,
        memory_max=1000,
        memory_current=400,
        shmem=77,
        oom_kill=3,
        pids_max=None,
        pids_current=9,
        nr_throttled=4,
        throttled_s=2.5,
    )


def test_version_1_tells_the_same_in_its_own_files(tmp_path: Path) -> None:
    group(
        tmp_path,
        "sys/fs/cgroup/memory/box",
        memory__limit_in_bytes="9223372036854771712",
        memory__usage_in_bytes="400",
        memory__stat="cache 1\ntotal_shmem 77",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3",
    )
    group(tmp_path, "sys/fs/cgroup/pids/box", pids__max="100", pids__current="9")
    group(tmp_path, "sys/fs/cgroup/cpu,cpuacct/box", cpu__stat="nr_throttled 4\nthrottled_time 2500000000")
    group(tmp_path, "sys/fs/cgroup/freezer/cold", freezer__state="FROZEN")
    cgroup = "4:memory:/box\n3:pids:/box\n2:cpu,cpuacct:/box\n1:freezer:/cold\n"
    assert known(5, process(tmp_path, 5, cgroup, V1)) == Cgroup(
        path="/box",
        version=1,
        frozen=True,
        memory_max=None,
        memory_current=400,
        shmem=77,
        oom_kill=3,
        pids_max=100,
        pids_current=9,
        nr_throttled=4,
        throttled_s=2.5,
    )


def test_a_hybrid_takes_each_controller_from_where_it_is_mounted(tmp_path: Path) -> None:
    group(tmp_path, "sys/fs/cgroup/memory/a", memory__limit_in_bytes="500", memory__usage_in_bytes="100")
    group(tmp_path, "sys/fs/cgroup/unified/b", cgroup__events="frozen 1", pids__current="3", pids__max="8")
    found = known(5, process(tmp_path, 5, "4:memory:/a\n0::/b\n", HYBRID))
    assert (found.version, found.path, found.memory_max) == (1, "/a", 500)
    assert (found.frozen, found.pids_max, found.pids_current) == (True, 8, 3)


def test_the_ancestor_with_the_least_room_is_the_limit_in_force(tmp_path: Path) -> None:
    group(tmp_path, "sys/fs/cgroup/pod/box", memory__max="1000", memory__current="400", cpu__stat="nr_throttled 1")
    group(
        tmp_path,
        "sys/fs/cgroup/pod",
        memory__max="2000",
        memory__current="1990",
        cpu__stat="nr_throttled 9\nthrottled_usec 1000000",
    )
    found = known(5, process(tmp_path, 5, "0::/pod/box\n", V2))
    assert (found.memory_max, found.memory_current) == (2000, 1990)
    assert (found.nr_throttled, found.throttled_s) == (9, 1.0)


def test_a_mount_of_a_part_of_the_tree_is_followed_from_where_it_begins(tmp_path: Path) -> None:
    mounts = "30 20 0:26 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    group(tmp_path, "sys/fs/cgroup/inner", memory__max="10", memory__current="1")
    assert known(5, process(tmp_path, 5, "0::/docker/abc/inner\n", mounts)).memory_max == 10


def test_a_container_next_door_is_seen_through_its_own_mounts(tmp_path: Path) -> None:
    theirs = "30 20 0:26 /../next /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    group(tmp_path, "sys/fs/cgroup", memory__max="1", memory__current="1")
    group(tmp_path, "proc/5/root/sys/fs/cgroup", memory__max="30", memory__current="3")
    assert known(5, process(tmp_path, 5, "0::/../next\n", V2, theirs=theirs)).memory_max == 30


def test_a_hierarchy_that_is_not_mounted_is_missing(tmp_path: Path) -> None:
    hole = cgroup_of(5, process(tmp_path, 5, "0::/pod\n", "22 1 0:1 / /proc rw - proc proc rw\n"))
    assert isinstance(hole, Missing)
    assert "not mounted" in hole.why


def test_a_process_that_is_gone_has_a_missing_group(tmp_path: Path) -> None:
    hole = cgroup_of(6, str(tmp_path))
    assert isinstance(hole, Missing)
    assert hole.why.startswith("ENOENT")


@pytest.mark.needs("root")
def test_the_group_of_this_process_is_the_one_the_kernel_names() -> None:
    found = cgroup_of(os.getpid())
    paths = {line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    assert isinstance(found, Missing) or found.path in paths
