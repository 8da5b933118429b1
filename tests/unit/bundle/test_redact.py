"""The key of a host, what is cut off, and what stays as long as it was."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from vllmdiag.bundle.redact import Redactor
from vllmdiag.bundle.redact_key import host_redactor, key_path
from vllmdiag.model.process import Process
from vllmdiag.model.shm import Segment, TailState
from vllmdiag.model.snapshot import Node, Snapshot
from vllmdiag.vllm.settings import ENVIRON_ALLOWED, settings

REDACTOR = Redactor(b"key")
HOME = "/" + "home"


def redacted(snapshot: Snapshot) -> Snapshot:
    return REDACTOR.snapshots([snapshot])[0]


def token_of(redactor: Redactor) -> str:
    return redactor.snapshots([Snapshot(node=Node(hostname="gpu-07"))])[0].node.hostname


# -- the key -------------------------------------------------------------------------------------------------------


def test_the_key_is_made_once_for_its_owner_alone_and_gives_the_same_tokens_ever_after(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    first, second = host_redactor(environ), host_redactor(environ)
    path = Path(key_path(environ))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    assert (first.account.key, first.account.note) == ("host", "")
    assert first.account == second.account
    assert token_of(first) == token_of(second)
    assert path.read_bytes().hex() not in first.account.key_id


def test_without_a_state_directory_of_its_own_the_key_lies_below_the_home() -> None:
    assert key_path({"HOME": "/h"}) == "/h/.local/state/vllmdiag/key"
    assert key_path({"HOME": "/h", "XDG_STATE_HOME": "relative"}) == "/h/.local/state/vllmdiag/key"


def _spoilt(path: Path, how: str) -> None:
    path.parent.mkdir(parents=True)
    if how == "link":
        (path.parent / "elsewhere").write_bytes(b"k" * 32)
        path.symlink_to(path.parent / "elsewhere")
        return
    path.write_bytes(b"k" * (3 if how == "short" else 32))
    path.chmod(0o644 if how == "open to all" else 0o600)


@pytest.mark.parametrize("how", ["link", "short", "open to all"])
def test_a_key_that_cannot_be_trusted_is_not_used_and_the_bundle_says_so(how: str, tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    _spoilt(Path(key_path(environ)), how)
    first, second = host_redactor(environ), host_redactor(environ)
    assert first.account.key == "ephemeral"
    assert "cannot be used" in first.account.note
    assert str(tmp_path) not in first.account.note
    assert token_of(first) != token_of(second)
    assert token_of(first).startswith("host-")


def test_where_no_key_can_be_kept_one_is_made_up_for_this_bundle(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    redactor = host_redactor({"XDG_STATE_HOME": str(tmp_path / "file")})
    assert redactor.account.key == "ephemeral"
    assert os.strerror(20) in redactor.account.note


# -- what is not even a token --------------------------------------------------------------------------------------


def test_no_secret_is_among_the_variables_that_are_collected() -> None:
    assert {"VLLM_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"} <= set(settings())
    assert not {name for name in ENVIRON_ALLOWED if settings()[name].secret}
    assert not {name for name in ENVIRON_ALLOWED if name.endswith(("_TOKEN", "_KEY", "PASSWORD", "_SECRET"))}


def test_the_command_of_a_bystander_is_cut_down_to_its_program() -> None:
    mine = Process(pid=1, cmdline=("/v/bin/vllm", "serve", "m", "--port", "8000"))
    script = Process(pid=2, cmdline=("/bin/bash", "/srv/start-customer.sh", "--for", "somebody"))
    line = Process(pid=3, cmdline=("/bin/bash /srv/start-customer.sh",))
    other = Process(pid=4, cmdline=("VLLM::EngineCore",))
    seen = redacted(Snapshot(target_pids=(1,), processes=(mine, script, line, other)))
    assert [p.cmdline for p in seen.processes] == [mine.cmdline, ("/bin/bash",), ("/bin/bash",), other.cmdline]


def test_of_the_tail_of_a_segment_only_flags_are_kept() -> None:
    tail = b"\x00\x01secret\x01\x00"
    segment = Segment(path="/dev/shm/psm_1", dev=1, ino=1, size=1, states=(TailState(t=0.0, tail=tail),))
    assert redacted(Snapshot(segments=(segment,))).segments[0].states[0].tail == b"\x00\x01" + b"\xff" * 6 + b"\x01\x00"


@pytest.mark.parametrize("home", [f"{HOME}/al", f"{HOME}/alexandrina", f"{HOME}/x/" + "deep/" * 16 + "er"])
@pytest.mark.parametrize("name", ["TMPDIR", "VLLM_RPC_BASE_PATH"])
def test_a_path_below_which_sockets_are_made_stays_as_long_as_it_was(name: str, home: str) -> None:
    (process,) = redacted(Snapshot(processes=(Process(pid=1, environ={name: home}),))).processes
    assert process.environ[name] != home
    assert len(process.environ[name]) == len(home)


# -- what stays equal ----------------------------------------------------------------------------------------------


def test_what_was_equal_stays_equal_wherever_it_stands() -> None:
    process = Process(
        pid=1, cmdline=("vllm", "serve", "m", "--master-addr", "gpu-07"), environ={"MASTER_ADDR": "gpu-07"}
    )
    seen = redacted(
        Snapshot(node=Node(hostname="gpu-07.rack.example.org"), processes=(process,), tool="to GPU-07:29500")
    )
    token = seen.node.hostname.partition(".")[0]
    assert token.startswith("host-")
    assert seen.processes[0].environ["MASTER_ADDR"] == token
    assert seen.processes[0].cmdline == ("vllm", "serve", "m", "--master-addr", token)
    assert seen.tool == f"to {token}:29500"


def test_a_host_or_user_that_is_called_as_something_of_vllm_does_not_change_what_the_rules_read() -> None:
    process = Process(
        pid=1, comm="worker", environ={"HOME": f"{HOME}/worker"}, cmdline=(f"{HOME}/core/bin/vllm", "serve", "m")
    )
    seen = redacted(Snapshot(node=Node(hostname="engine"), processes=(process,), tool="EngineCore engine core worker"))
    assert seen.tool == "EngineCore engine core worker"
    assert seen.node.hostname.startswith("host-")
    assert seen.processes[0].comm == "worker"


def test_packages_and_caches_keep_their_names_below_a_home() -> None:
    paths = {
        ".venv/lib/python3.11/site-packages/vllm/v1/core.py": "/.venv/lib/python3.11/site-packages/vllm/v1/core.py",
        ".cache/huggingface/hub/models--org--m/snapshots/model-00002-of-00004.safetensors": "/model-00002-of-00004.",
        ".cache/vllm/torch_compile_cache/rank_0_0/x.lock": "/.cache/vllm/torch_compile_cache/rank_0_0/",
    }
    for path, kept in paths.items():
        seen = redacted(Snapshot(tool=f"{HOME}/zoe/{path}")).tool
        assert kept in seen
        assert "zoe" not in seen


def test_tokens_are_the_same_in_a_series() -> None:
    snapshot = Snapshot(node=Node(hostname="gpu-07"), tool="at gpu-07")
    first, second = REDACTOR.snapshots([snapshot, msgspec.structs.replace(snapshot, node=Node())])
    assert first.tool == second.tool != "at gpu-07"
