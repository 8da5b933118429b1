"""`fleet diagnose` over real processes: three nodes, one with a stopped rank, reached in each of the ways there are."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import zipapp
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.lab.pidnodes import PidNode, pid_nodes

pytestmark = [pytest.mark.needs("root", "unshare", "nsenter"), pytest.mark.timeout(300)]
REMOTE = f"{sys.executable} -m vllmdiag"


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, PidNode]]:
    with pid_nodes(n1=None, n2="worker-stopped", n3=None) as three:
        yield three


def diagnose(*args: str, path: Path | None = None, **env: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the document and stderr."""
    command = [sys.executable, "-m", "vllmdiag", "fleet", "diagnose", "--window", "1", "--format", "json", *args]
    environ = {**os.environ, **env, "PATH": f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def outcomes(fleet: dict[str, Any]) -> dict[str, str]:
    return {n["node"]: n["outcome"] for n in fleet["nodes"]}


def assert_one_verdict_on_n2(code: int, fleet: dict[str, Any]) -> None:
    verdict = fleet["verdict"]
    assert (code, verdict["cause"], verdict["subject"]["node"]) == (2, "process-stopped", "n2")
    assert verdict["subject"]["label"] == "Worker_TP1"
    status = {n["node"]: n["status"] for n in fleet["nodes"]}
    assert (status["n1"], status["n2"], status["n3"]) == ("ok", "critical", "ok")


# -- ssh ---------------------------------------------------------------------------------------------------------------


class Ssh:
    """Daemons of ssh on loopback, and the configuration of a client that knows them by name."""

    def __init__(self, work: Path, ends: ExitStack) -> None:
        self.work, self.ends, self.config = work, ends, work / "config"
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(work / key)], check=True)
        (work / "authorized").write_text((work / "user.pub").read_text())
        Path("/run/sshd").mkdir(exist_ok=True)
        self.config.write_text(
            f"IdentityFile {work}/user\nIdentitiesOnly yes\nUserKnownHostsFile /dev/null\n"
            "StrictHostKeyChecking no\nLogLevel ERROR\nHostName 127.0.0.1\n"
        )

    def listen(self, name: str, node: PidNode | None = None, instead: str = "") -> None:
        """A daemon for that name, within a node; `instead` of what the client asks for it runs this."""
        port = free_port()
        options = [f"ListenAddress=127.0.0.1:{port}", f"HostKey={self.work}/host", "PidFile=none", "UsePAM=no"]
        options += [f"AuthorizedKeysFile={self.work}/authorized", "StrictModes=no", "PermitRootLogin=yes"]
        options += [f"ForceCommand={instead}"] if instead else []
        words = ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", *(w for o in options for w in ("-o", o))]
        daemon = subprocess.Popen(node.inside(*words) if node else words, stderr=subprocess.PIPE, text=True)
        assert daemon.stderr is not None
        self.ends.callback(daemon.stderr.close)
        self.ends.callback(daemon.wait)
        self.ends.callback(daemon.terminate)
        assert any("Server listening" in line for line in daemon.stderr)
        self.know(name, port)

    def know(self, name: str, port: int) -> None:
        """The client will look for that name on this port."""
        with self.config.open("a") as file:
            file.write(f"Host {name}\n  Port {port}\n")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def ssh(nodes: dict[str, PidNode], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ssh]:
    with ExitStack() as ends:
        made = Ssh(tmp_path_factory.mktemp("ssh"), ends)
        for name, node in nodes.items():
            made.listen(name, node)
        yield made


def over_ssh(ssh: Ssh, names: str, *args: str) -> tuple[int, dict[str, Any], str]:
    common = ("--engine", "ssh", "--nodes", names, f"--ssh-option=-F{ssh.config}")
    return diagnose(*common, *args)


@pytest.mark.needs("sshd", "ssh", "ssh-keygen")
def test_over_ssh_the_stopped_rank_is_found_on_its_node(ssh: Ssh) -> None:
    code, fleet, _ = over_ssh(ssh, "n[1-3]", "--remote-command", REMOTE)
    assert_one_verdict_on_n2(code, fleet)
    assert outcomes(fleet) == dict.fromkeys(("n1", "n2", "n3"), "answered")
    assert all(abs(n["skew_s"]) <= n["skew_within_s"] for n in fleet["nodes"]), "one machine has one clock"


@pytest.mark.needs("sshd", "ssh", "ssh-keygen")
def test_nodes_that_refuse_hang_or_babble_are_named_and_the_rest_is_judged(ssh: Ssh) -> None:
    ssh.know("closed", free_port())
    ssh.listen("hangs", instead="sleep 600")
    ssh.listen("babbles", instead='echo \'{"this": "is something else"}\'')
    ssh.listen("bare", instead="no-such-program")
    names = "n1,n2,n3,closed,hangs,babbles,bare"
    code, fleet, err = over_ssh(ssh, names, "--remote-command", REMOTE, "--deadline", "25")
    assert_one_verdict_on_n2(code, fleet)
    odd = {name: outcome for name, outcome in outcomes(fleet).items() if outcome != "answered"}
    assert odd == {"closed": "refused", "hangs": "silent", "babbles": "garbage", "bare": "refused"}
    told = {n["node"]: n["summary"] for n in fleet["nodes"]}
    assert "refused" in told["closed"]
    assert "25 s" in told["hangs"]
    assert "--ship" in told["bare"]
    assert all(name in err for name in odd)


@pytest.mark.needs("sshd", "ssh", "ssh-keygen")
def test_a_program_that_is_sent_along_runs_there_from_memory(ssh: Ssh, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "__main__.py").write_text("from vllmdiag.cli.main import main\nraise SystemExit(main())\n")
    zipapp.create_archive(source, tmp_path / "vllmdiag.pyz")
    before = set(os.listdir("/tmp"))
    ship = ("--ship", str(tmp_path / "vllmdiag.pyz"), "--remote-command", sys.executable)
    code, fleet, _ = over_ssh(ssh, "n1,n2,n3", *ship)
    assert_one_verdict_on_n2(code, fleet)
    assert not [name for name in set(os.listdir("/tmp")) - before if "vllmdiag" in name and "node" not in name]


# -- programs that speak the command line of an engine -----------------------------------------------------------------


def program(directory: Path, name: str, code: str) -> None:
    """An executable in Python."""
    file = directory / name
    head = "import json, os, sys\nargs = sys.argv[1:]\nPLACES = json.loads(os.environ['PLACES'])\n"
    file.write_text(f"#!{sys.executable}\n{head}{code}")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


_ENTER = """
def enter(pid, command):
    os.execvp("nsenter", ["nsenter", "--target", str(pid), "--pid", "--mount", "--", *command])
"""
_KUBECTL = (
    _ENTER
    + """
if args == ["get", "pods", "--namespace", "serving", "--selector", "app=vllm", "--output", "json"]:
    pods = [{"metadata": {"name": name, "namespace": "serving"}, "status": {"phase": "Running"}} for name in PLACES]
    pods.append({"metadata": {"name": "n9"}, "status": {"phase": "Pending"}})
    print(json.dumps({"items": pods}))
elif args[:4] == ["exec", "--stdin", "--namespace", "serving"] and args[5:8] == ["--container", "engine", "--"]:
    enter(PLACES[args[4]], args[8:])
else:
    sys.exit(f"unknown command: {args}")
"""
)
_SCONTROL = """
if args[:2] != ["show", "hostnames"] or args[2] != "n[1-3]":
    sys.exit(f"unknown command: {args}")
print("\\n".join(PLACES))
"""
_SQUEUE = """
if args != ["--noheader", "--jobs", "4711", "--format", "%N"]:
    sys.exit(f"unknown command: {args}")
print("n[1-3]")
"""
_SRUN = (
    _ENTER
    + """
wanted = ["--jobid=4711", "--overlap", "--nodes=1", "--ntasks=1", "--quiet"]
if args[:5] != wanted or not args[5].startswith("--nodelist="):
    sys.exit(f"unknown command: {args}")
enter(PLACES[args[5].partition("=")[2]], args[6:])
"""
)


def places(nodes: dict[str, PidNode]) -> str:
    return json.dumps({name: node.pid for name, node in nodes.items()})


def test_through_kubectl_the_running_pods_of_a_selector_are_asked(nodes: dict[str, PidNode], tmp_path: Path) -> None:
    program(tmp_path, "kubectl", _KUBECTL)
    words = ("--engine", "kubectl", "-l", "app=vllm", "-n", "serving", "-c", "engine", "--remote-command", REMOTE)
    code, fleet, _ = diagnose(*words, path=tmp_path, PLACES=places(nodes))
    assert_one_verdict_on_n2(code, fleet)
    assert set(outcomes(fleet)) == {"n1", "n2", "n3"}


@pytest.mark.parametrize("inside", [True, False], ids=["within the job", "from outside"])
def test_through_srun_every_node_of_the_job_is_asked(nodes: dict[str, PidNode], tmp_path: Path, inside: bool) -> None:
    for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL), ("squeue", _SQUEUE)):
        program(tmp_path, name, text)
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-3]"} if inside else {}
    words = ("--engine", "slurm", "--remote-command", REMOTE, *(() if inside else ("--job", "4711")))
    code, fleet, _ = diagnose(*words, path=tmp_path, PLACES=places(nodes), **job)
    assert_one_verdict_on_n2(code, fleet)


def test_answers_that_were_written_to_files_are_judged_as_those_that_come(
    nodes: dict[str, PidNode], tmp_path: Path
) -> None:
    for name, node in nodes.items():
        with (tmp_path / f"{name}.jsonl").open("wb") as file:
            command = node.inside(sys.executable, "-m", "vllmdiag", "fleet", "node", "--window", "1")
            subprocess.run(command, stdout=file, check=True)
    code, fleet, _ = diagnose(str(tmp_path))
    assert (code, fleet["verdict"]["cause"], fleet["verdict"]["subject"]["node"]) == (2, "process-stopped", "n2")
