"""What the usual tools print is read for what it says, whatever options they were given."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from vllmdiag.bundle.triage import Triage, triage
from vllmdiag.model.base import Missing, known
from vllmdiag.model.process import Limits, Process, StackDump, ThreadStack
from vllmdiag.model.snapshot import Snapshot


def told(text: str) -> Triage:
    return triage(["-"], io.BytesIO(text.encode()))


def read(text: str) -> Snapshot:
    """The snapshot of a text of which every line is understood."""
    done = told(text)
    assert done.unknown == []
    return done.snapshot()


def process(snapshot: Snapshot, pid: int) -> Process:
    found = snapshot.process(pid)
    assert found is not None
    return found


def threads(dump: StackDump) -> tuple[ThreadStack, ...]:
    assert not isinstance(dump.threads, Missing)
    return dump.threads


TABLES = {
    "ps aux": """USER  PID %CPU %MEM    VSZ   RSS TTY STAT START   TIME COMMAND
svc    90  9.9  0.5 900000 80000 ?   Tl   Mar03  10:07 VLLM::Worker_TP1
""",
    "ps -ef": """UID   PID  PPID  C STIME TTY          TIME CMD
svc    90    50  9 Mar03 ?        00:10:07 VLLM::Worker_TP1
""",
    "ps -eo, comm and args": """  PID  PPID STAT ELAPSED COMMAND         WCHAN                  COMMAND
   90    50 Tl      8990 VLLM::Worker_TP do_signal_stop         VLLM::Worker_TP1
""",
    "ps -eo with lstart": """  PID  PPID STAT                  STARTED COMMAND
   90    50 Tl   Tue Mar  3 10:00:00 2026 VLLM::Worker_TP1
""",
    "ps -el": """F S   UID   PID  PPID  C PRI  NI ADDR SZ WCHAN  TTY          TIME CMD
4 T  1000    90    50  9  80   0 - 900000 do_sig ?       00:10:07 VLLM::Worker_TP1
""",
    "rows of ps -ef behind a grep": "svc    90    50  9 Mar03 ?        00:10:07 VLLM::Worker_TP1\n",
    "rows of ps aux behind a grep": "svc    90  9.9  0.5 900000 80000 ?   Tl   Mar03  10:07 VLLM::Worker_TP1\n",
    "docker top": """UID         PID         PPID        C           STIME       TTY         TIME        CMD
root        90          50          9           10:00       ?           00:10:07    VLLM::Worker_TP1
""",
}


@pytest.mark.parametrize("table", TABLES)
def test_a_process_of_a_table(table: str) -> None:
    found = process(read(TABLES[table]), 90)
    assert found.title == "VLLM::Worker_TP1"
    if "PPID" in TABLES[table]:
        assert found.ppid == 50
    if "STAT" in TABLES[table] or "F S" in TABLES[table]:
        assert found.state == "T"
    if "10:07" in TABLES[table]:
        assert found.samples[0].utime == 607


def test_a_forest_tells_parents_without_a_column_for_them() -> None:
    found = read("""USER  PID %CPU %MEM    VSZ   RSS TTY STAT START   TIME COMMAND
svc    10  0.0  0.1 900000 80000 ?   Ss   Mar03   0:07 /usr/bin/vllm serve org/model -tp 2
svc    50  0.0  0.1 900000 80000 ?   Sl   Mar03   0:07  \\_ VLLM::EngineCore
svc    90  9.9  0.5 900000 80000 ?   Rl   Mar03  10:07  |   \\_ VLLM::Worker_TP0
svc    91  9.9  0.5 900000 80000 ?   Rl   Mar03  10:07  |   \\_ VLLM::Worker_TP1
svc    51  0.0  0.0  90000  8000 ?   S    Mar03   0:00  \\_ python3 -c from multiprocessing.resource_tracker import main
""")
    assert {p.pid: p.ppid for p in found.processes} == {10: 0, 50: 10, 90: 50, 91: 50, 51: 10}


def test_a_zombie_has_no_command_line() -> None:
    found = process(read("  PID  PPID STAT COMMAND\n   90    50 Z    [VLLM::Worker_TP] <defunct>\n"), 90)
    assert (found.state, found.cmdline, found.comm) == ("Z", (), "VLLM::Worker_TP")


def test_threads_of_top_tell_what_each_used() -> None:
    found = process(
        read("""# top -H -p 96
Threads:   2 total,   1 running,   1 sleeping
    PID USER      PR  NI    VIRT    RES    SHR S  %CPU  %MEM     TIME+ COMMAND
     97 root      20   0   29.1g   2.1g   1.1g R  99.9   0.4  10:00.12 VLLM::EngineCor
     96 root      20   0   29.1g   2.1g   1.1g S   0.0   0.4   1:00.12 VLLM::EngineCor
"""),
        96,
    )
    used = {t.tid: t.samples[-1].utime - t.samples[0].utime for t in found.threads}
    assert used == {96: 0.0, 97: pytest.approx(9.99)}


PY_SPY = """Process 7: VLLM::EngineCore
Python v3.12.3 (/usr/bin/python3.12)

Thread 7 (idle): "MainThread"
    wait (threading.py:355)
    EngineCoreProc.run_busy_loop (vllm/v1/engine/core.py:1227)
Thread 0x7F2B (active+gil): "Thread-1 (process_input_sockets)"
    c10d::ProcessGroupNCCL::WorkNCCL::wait (libtorch_cuda.so)
    0x7f21c33d1a2b (libcuda.so.580.95.05)
    <lambda> (vllm/x.py:3)
"""


def test_py_spy_text() -> None:
    main, other = threads(process(read(PY_SPY), 7).stacks[0])
    assert (main.tid, main.active) == (7, False)
    assert (main.frames[1].name, main.frames[1].line) == ("EngineCoreProc.run_busy_loop", 1227)
    assert (other.name, other.tid, other.owns_gil) == ("Thread-1 (process_input_sockets)", None, True)
    assert [(f.name, f.file) for f in other.frames] == [
        ("c10d::ProcessGroupNCCL::WorkNCCL::wait", "libtorch_cuda.so"),
        ("0x7f21c33d1a2b", "libcuda.so.580.95.05"),
        ("<lambda>", "vllm/x.py"),
    ]


def test_py_spy_json() -> None:
    frame = {"name": "wait", "filename": "/usr/lib/threading.py", "short_filename": "threading.py", "line": 355}
    thread = {"pid": 7, "thread_name": "MainThread", "os_thread_id": 7, "active": False, "frames": [frame]}
    for text in (json.dumps([thread]), json.dumps([thread], indent=2)):
        (main,) = threads(process(read(text), 7).stacks[0])
        assert (main.name, main.tid, main.frames[0].file) == ("MainThread", 7, "threading.py")


def test_pystack_is_turned_round() -> None:
    found = read("""Traceback for thread 9 (VLLM::EngineCor) [] (most recent call last):
    (Python) File "/usr/lib/python3.12/threading.py", line 1032, in _bootstrap
        self._bootstrap_inner()
    (Python) File "/opt/venv/lib/python3.12/site-packages/vllm/v1/engine/core.py", line 1557, in process_input_sockets
        poller.poll()
Traceback for thread 7 (VLLM::EngineCor) [Has the GIL] (most recent call last):
    (Python) File "<string>", line 1, in <module>
    (Python) File "/usr/lib/python3.12/queue.py", line 171, in get
        self.not_empty.wait()
""")
    main, other = threads(process(found, 7).stacks[0])
    assert [f.name for f in main.frames] == ["get", "<module>"]
    assert main.owns_gil
    assert [f.file for f in other.frames] == ["vllm/v1/engine/core.py", "threading.py"]


def test_a_second_dump_of_a_process_is_a_second_look() -> None:
    assert [d.t for d in process(read(PY_SPY + "\n30 s later\n\n" + PY_SPY), 7).stacks] == [0.0, 30.0]


def test_ss_of_unix_sockets_joins_both_ends() -> None:
    found = read("""Netid State  Recv-Q Send-Q        Local Address:Port  Peer Address:Port Process
u_str ESTAB  77     0      /tmp/0b1f-4c55-9a34 123456            * 123457   users:(("vllm",pid=10,fd=33))
u_str ESTAB  0      0                        * 123457            * 123456   users:(("VLLM::EngineCor",pid=40,fd=12))
""")
    accepted, connecting = found.sockets
    assert (accepted.local, accepted.peer_inode) == ("/tmp/0b1f-4c55-9a34", 123457)
    assert (accepted.recv_q, accepted.pids) == (77, (10,))
    assert (connecting.inode, connecting.pids) == (123457, (40,))


def test_ss_with_every_option() -> None:
    found = read("""State    Recv-Q Send-Q Local Address:Port  Peer Address:Port Process
LISTEN   0      2048   *:8000              *:*               users:(("vllm",pid=10,fd=30)) ino:555 sk:1 v6only:0 <->
\t cubic cwnd:10
ESTAB    0      9      [::ffff:10.1.0.4]:8000 [::ffff:10.1.9.9]:51020 users:(("vllm",pid=10,fd=44)) uid:0 ino:777 <->
\t ts sack cubic wscale:7,7 rto:204 rtt:0.05/0.02 bytes_sent:1234 bytes_acked:1234 lastsnd:240
""")
    listener, client = found.sockets
    assert (listener.port, listener.state, listener.inode) == (8000, "LISTEN", 555)
    assert (client.remote_port, client.send_q, client.inode) == (51020, 9, 777)


def test_netstat() -> None:
    found = read("""Active Internet connections (servers and established)
Proto Recv-Q Send-Q Local Address           Foreign Address         State       PID/Program name
tcp        0      1 10.0.0.4:40022          10.0.0.5:14215          SYN_SENT    88/VLLM::Worker_TP
tcp6       0      0 :::8000                 :::*                    LISTEN      10/python3
udp        0      0 0.0.0.0:68              0.0.0.0:*                           700/dhclient
Active UNIX domain sockets (servers and established)
Proto RefCnt Flags       Type       State         I-Node   PID/Program name     Path
unix  2      [ ACC ]     STREAM     LISTENING     12345    10/python3           /tmp/0b1f-4c55
""")
    assert [(s.state, s.port, s.pids) for s in found.sockets] == [
        ("SYN-SENT", 40022, (88,)),
        ("LISTEN", 8000, (10,)),
        ("LISTEN", None, (10,)),
    ]


def test_a_table_that_comes_twice_shows_what_did_not_move() -> None:
    table = 'ESTAB 0 2565 10.1.0.4:8000 10.1.9.9:51020 users:(("vllm",pid=10,fd=44))\n'
    heading = "State Recv-Q Send-Q Local Address:Port Peer Address:Port Process\n"
    (sock,) = read(f"{heading}{table}# 10 s later\n{table}").sockets
    assert [(s.t, s.send_q) for s in sock.samples] == [(0.0, 2565), (10.0, 2565)]


def test_files_of_proc_after_the_commands_that_show_them() -> None:
    found = process(
        read("""$ cat /proc/42/status
Name:\tVLLM::Worker_TP
State:\tD (disk sleep)
PPid:\t41
SigPnd:\t0000000000000000
ShdPnd:\t0000000000000100
$ cat /proc/42/limits
Limit                     Soft Limit           Hard Limit           Units
Max locked memory         8388608              8388608              bytes
Max open files            1024                 524288               files
Max nice priority         0                    0
$ sudo cat /proc/42/stack
[<0>] rpc_wait_bit_killable+0x1e/0xa0 [sunrpc]
[<0>] __x64_sys_read+0x1a/0x20
$ cat /proc/42/wchan
rpc_wait_bit_killable
$ cat /proc/42/io
rchar: 100
read_bytes: 200
$ sleep 10; cat /proc/42/io   # 10 s later
rchar: 300
read_bytes: 400
$ ls -l /proc/42/fd
lrwx------ 1 root root 64 Mar  3 10:00 20 -> 'socket:[777]'
lrwx------ 1 root root 64 Mar  3 10:00 21 -> '/dev/shm/psm_1a2b (deleted)'
lrwx------ 1 root root 64 Mar  3 10:00 22 -> /dev/nvidia0
"""),
        42,
    )
    assert (found.comm, found.ppid, found.state, found.sigkill_pending) == ("VLLM::Worker_TP", 41, "D", True)
    assert found.limits == Limits(memlock=8388608, nofile=1024)
    assert found.kernel_stack == ("rpc_wait_bit_killable [sunrpc]", "__x64_sys_read")
    assert found.wchan == "rpc_wait_bit_killable"
    assert [(s.t, s.read_bytes) for s in found.samples] == [(0.0, 200), (10.0, 400)]
    assert (found.n_fds, found.socket_inodes, found.device_files) == (3, (777,), ("/dev/nvidia0",))


def test_a_control_group_file_by_file() -> None:
    found = process(
        read("""# cgroup of pid 42
$ cat /sys/fs/cgroup/pids.max
4096
$ cat /sys/fs/cgroup/pids.current
4096
$ cat /sys/fs/cgroup/memory.events
low 0
max 12
oom_kill 3
$ grep . /sys/fs/cgroup/memory.max
/sys/fs/cgroup/memory.max:34359738368
"""),
        42,
    )
    group = known(found.cgroup)
    assert group is not None
    assert (group.pids_max, group.pids_current, group.oom_kill, group.memory_max) == (4096, 4096, 3, 32 << 30)


@pytest.mark.parametrize(
    "table",
    [
        "# df -B1 /dev/shm\ntmpfs 67108864 20971520 46137344 32% /dev/shm\n",
        "Filesystem 1K-blocks  Used Available Use% Mounted on\nshm 65536 20480 45056  32% /dev/shm\n",
        "Filesystem      Size  Used Avail Use% Mounted on\nshm              64M   20M   44M  32% /dev/shm\n",
        "# /proc/88/mountinfo\n1201 1190 0:88 / /dev/shm rw,nosuid - tmpfs shm rw,size=65536k\n",
        "shm on /dev/shm type tmpfs (rw,nosuid,nodev,noexec,relatime,size=65536k)\n",
    ],
)
def test_the_size_of_shared_memory(table: str) -> None:
    assert [m.size for m in read(table).shm_mounts] == [64 << 20]


def test_the_mounts_of_the_shell_are_not_those_of_the_server() -> None:
    done = told("# /proc/self/mountinfo\n1201 1190 0:88 / /dev/shm rw - tmpfs shm rw,size=20g\n" + TABLES["ps aux"])
    assert done.snapshot().shm_mounts == ()


def test_who_holds_a_file_of_shared_memory() -> None:
    found = read("""$ ls -l /dev/shm
total 20
-rw------- 1 root root 104857620 Mar  3 10:00 psm_5cc1e2f0
-rw------- 1 root root 104857620 Mar  3 10:00 psm_77777777
$ fuser /dev/shm/*
/dev/shm/psm_5cc1e2f0:  70m  77m
""")
    held, free = found.segments
    assert [h.pid for h in held.holders] == [70, 77]
    assert (free.holders, free.holders_complete, free.size) == ((), True, 104857620)


def test_two_scrapes_in_one_text_are_two_looks() -> None:
    page = (
        '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{engine="0"}} {}\n'
        'vllm:generation_tokens_total{{engine="0"}} 5\n'
    )
    found = read(page.format(1) + page.format(2)).metrics
    assert [m.values["num_requests_running"]["0"] for m in found] == [1.0, 2.0]


HTTP = {
    "GET /health 200 in 3 ms": ("GET", "/health", 200, ""),
    "POST /v1/completions: no byte in 60 s": ("POST", "/v1/completions", None, "timeout"),
    "GET http://10.0.0.4:8000/health -> refused": ("GET", "/health", None, "refused"),
    "$ curl -i localhost:8000/health\nHTTP/1.1 503 Service Unavailable\nserver: uvicorn": ("GET", "/health", 503, ""),
    "$ curl -m 5 http://localhost:8000/health\n"
    "curl: (28) Operation timed out after 5001 milliseconds with 0 bytes received": ("GET", "/health", None, "timeout"),
    "* Connected to x (10.0.0.1) port 8000\n> POST /v1/chat/completions HTTP/1.1\n> Host: x\n>\n"
    "< HTTP/1.1 200 OK\n< server: uvicorn\n<": ("POST", "/v1/chat/completions", 200, ""),
}


@pytest.mark.parametrize("text", HTTP)
def test_a_request(text: str) -> None:
    (probe,) = read(text + "\n").http
    assert (probe.method, probe.path, probe.status, probe.error) == HTTP[text]


def test_the_addresses_of_a_machine() -> None:
    long = """1: lo: <LOOPBACK,UP,LOWER_UP> mtu 65536 qdisc noqueue state UNKNOWN group default qlen 1000
    inet 127.0.0.1/8 scope host lo
       valid_lft forever preferred_lft forever
2: eth0@if12: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 1500 qdisc noqueue state UP group default
    inet 172.17.0.2/16 brd 172.17.255.255 scope global eth0
"""
    brief = "lo               UNKNOWN        127.0.0.1/8\neth0@if12        UP             172.17.0.2/16\n"
    for text in (long, brief):
        (network,) = read(text).networks
        assert [(i.name, i.addresses) for i in network.interfaces] == [
            ("lo", ("127.0.0.1",)),
            ("eth0", ("172.17.0.2",)),
        ]
    (name,) = read(brief + "\n127.0.1.1 node-b\n").host_names
    assert (name.name, name.address) == ("node-b", "127.0.1.1")


def test_ray_status() -> None:
    ray = read("""======== Autoscaler status: 2026-03-03 10:00:00.123456 ========
Node status
---------------------------------------------------------------
Active:
 1 node_3f1a2b
Pending:
 (no pending nodes)
Resources
---------------------------------------------------------------
Usage:
 1.0/2.0 GPU (1.0 used of 1.0 reserved in placement groups)
 0B/80.00GiB object_store_memory
Demands:
 {'GPU': 1.0} * 1 (PACK): 1+ pending placement groups
""").ray
    assert ray is not None
    assert (ray.nodes, ray.gpus_used, ray.gpus_total, len(ray.pending)) == (("node_3f1a2b",), 1.0, 2.0, 1)


def test_a_ring_says_who_is_who() -> None:
    found = read("""ring psm_a n_reader=2 chunk=16777216 slots=2 role=request writer_pid=41 reader_pids=50,51
slot 0: 1 1 0
slot 1: 0 0 0
""")
    (segment,) = found.segments
    assert (segment.size, segment.states[0].tail) == (2 * (16777216 + 3), bytes([1, 1, 0, 0, 0, 0]))
    assert {p.pid: p.told_role for p in found.processes} == {41: "EngineCore", 50: "Worker", 51: "Worker"}


@pytest.mark.parametrize(
    "line", ["vllm 0.21.0", "vLLM Version: 0.21.0", "vllm==0.21.0", "- vLLM: v0.21.0", "vllm      0.21.0"]
)
def test_the_version_in_words(line: str) -> None:
    assert process(read(f"{line}\n{TABLES['ps aux']}"), 90).vllm_version == "0.21.0"


def test_two_machines_may_use_the_same_pid() -> None:
    dump = 'Process 7: VLLM::Worker_TP{}\nThread 7 (idle): "MainThread"\n    wait (threading.py:355)\n'
    found = read(f"### node-a\n{dump.format(0)}\n### node-b\n{dump.format(8)}")
    assert [(p.node, p.title) for p in found.processes] == [
        ("node-a", "VLLM::Worker_TP0"),
        ("node-b", "VLLM::Worker_TP8"),
    ]


def test_a_file_that_is_named_after_a_machine_is_of_no_other(tmp_path: Path) -> None:
    for name, rank in (("stacks.txt", 0), ("stacks_node_b.txt", 4)):
        dump = f'Process 310: VLLM::Worker_TP{rank}\nThread 310 (idle): "MainThread"\n    wait (threading.py:355)\n'
        (tmp_path / name).write_text(dump)
    found = triage([str(tmp_path)], io.BytesIO()).snapshot()
    by_node = {p.node: p.title for p in found.processes}
    assert by_node == {"": "VLLM::Worker_TP0", "node-b": "VLLM::Worker_TP4"}


def test_a_server_is_told_in_a_sentence() -> None:
    (server,) = read("I ran `vllm serve org/model -tp 4 --port 9000` as usual.\n").processes
    assert server.title == "vllm serve org/model -tp 4 --port 9000"
