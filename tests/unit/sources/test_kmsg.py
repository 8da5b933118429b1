from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllmdiag.model.base import Missing
from vllmdiag.model.snapshot import KernelLine
from vllmdiag.sources.kmsg import kernel_lines

LOG = """\
6,1,0,-;Kernel command line: quiet nvidia.xid=1 token=secret rcupdate.rcu_cpu_stall_cputime=1
6,2,50000000,-;Out of memory: Killed process 11 (old)
6,3,900000000,-;usb 1-1: new device
 SUBSYSTEM=usb
4,4,910500000,-;python3[77]: segfault at 0 ip 00007f sp 00007f error 4 in libfoo.so
3,5,920000000,-;Memory cgroup out of memory: Killed process 4310 (VLLM::Worker_TP) total-vm:1kB
4,6,930000000,c;NVRM: Xid (PCI:0000:3b:00): 79, pid=4310, GPU has fallen off the bus.
3,7,940000000,-;INFO: task python3:4310 blocked for more than 120 seconds.
"""


def recorded(root: Path, text: str = LOG) -> str:
    (root / "dev").mkdir()
    (root / "dev" / "kmsg").write_text(text)
    (root / "proc").mkdir()
    (root / "proc" / "uptime").write_text("1000.00 1.0\n")
    return str(root)


def test_only_lines_that_explain_a_death_are_kept_with_their_time(tmp_path: Path) -> None:
    lines = kernel_lines(recorded(tmp_path), since_s=500)
    assert isinstance(lines, tuple)
    assert [line.t for line in lines] == [910.5, 920.0, 930.0, 940.0]
    assert lines[2] == KernelLine(t=930.0, text="NVRM: Xid (PCI:0000:3b:00): 79, pid=4310, GPU has fallen off the bus.")


def test_older_lines_come_with_a_longer_look_back_and_the_command_line_never(tmp_path: Path) -> None:
    lines = kernel_lines(recorded(tmp_path), since_s=2000)
    assert isinstance(lines, tuple)
    assert lines[0].text == "Out of memory: Killed process 11 (old)"
    assert not any("token" in line.text for line in lines)


def test_without_a_kernel_log_the_fact_is_missing(tmp_path: Path) -> None:
    hole = kernel_lines(str(tmp_path))
    assert isinstance(hole, Missing)
    assert hole.why.startswith("ENOENT")


@pytest.mark.needs("root")
def test_a_log_that_may_not_be_read_is_missing_with_the_next_step(tmp_path: Path, as_nobody: Any) -> None:
    root = recorded(tmp_path)
    (tmp_path / "dev" / "kmsg").chmod(0)
    hole = as_nobody(lambda: kernel_lines(root))
    assert isinstance(hole, Missing)
    assert hole.why.startswith("EACCES")
    assert "dmesg" in hole.next


def test_the_log_of_this_machine_is_read_to_its_end() -> None:
    assert isinstance(kernel_lines(since_s=1e9), tuple | Missing)
