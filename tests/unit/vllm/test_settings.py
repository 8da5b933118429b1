from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.vllm.settings import ENVIRON_ALLOWED, SET, collected, default, settings


@pytest.mark.parametrize(
    "name", ["VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY"]
)
def test_a_secret_is_never_collected(name: str) -> None:
    assert settings()[name].secret
    assert name not in ENVIRON_ALLOWED
    assert collected({name: "hunter2"}) == {}


def test_no_variable_that_sounds_like_a_secret_is_allowed() -> None:
    words = ("TOKEN", "SECRET", "PASSW", "KEY", "CREDENTIAL")
    assert [name for name in ENVIRON_ALLOWED if any(word in name for word in words)] == ["TOKENIZERS_PARALLELISM"]


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "HTTPS_PROXY", "no_proxy", "ALL_PROXY"])
def test_of_a_proxy_only_the_presence_is_told(name: str) -> None:
    assert collected({name: "http://user:hunter2@proxy:3128"}) == {name: SET}


def test_what_is_not_in_the_table_is_not_collected() -> None:
    assert collected({"MY_SECRET": "x", "PATH": "/bin", "NCCL_DEBUG": "INFO"}) == {"NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("name", "version", "value"),
    [
        ("VLLM_MQ_MAX_CHUNK_BYTES_MB", "0.8.5", None),
        ("VLLM_MQ_MAX_CHUNK_BYTES_MB", "0.32.0", "16"),
        ("VLLM_ENGINE_READY_TIMEOUT_S", "0.13.0", None),
        ("VLLM_ENGINE_READY_TIMEOUT_S", None, "600"),
        ("VLLM_ALLREDUCE_USE_SYMM_MEM", "0.10.2", "0"),
        ("VLLM_ALLREDUCE_USE_SYMM_MEM", "0.11.0", "1"),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", "0.11.0", "5557"),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", "0.12.0", "5600"),
        ("VLLM_RPC_TIMEOUT", "0.23.0", None),
        ("NOT_A_SETTING", None, None),
    ],
)
def test_a_default_depends_on_the_version(name: str, version: str | None, value: str | None) -> None:
    assert default(name, version) == value


@given(st.dictionaries(st.sampled_from(sorted(settings())) | st.text(), st.text().map(lambda v: "secret" + v)))
def test_only_allowed_names_come_out(environ: dict[str, str]) -> None:
    kept = collected(environ)
    assert set(kept) <= ENVIRON_ALLOWED
    assert all(value in (SET, environ[name]) for name, value in kept.items())
