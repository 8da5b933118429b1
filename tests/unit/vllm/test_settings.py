from __future__ import annotations

import pytest

from vllmdiag.vllm.settings import ENVIRON_ALLOWED, default, settings


@pytest.mark.parametrize(
    "name", ["VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY"]
)
def test_a_secret_is_known_and_not_allowed(name: str) -> None:
    assert settings()[name].secret
    assert name not in ENVIRON_ALLOWED


def test_no_variable_that_sounds_like_a_secret_is_allowed() -> None:
    words = ("TOKEN", "SECRET", "PASSW", "KEY", "CREDENTIAL")
    assert [name for name in ENVIRON_ALLOWED if any(word in name for word in words)] == ["TOKENIZERS_PARALLELISM"]


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


def test_every_setting_says_what_it_does_and_where_that_is_from() -> None:
    assert [s.name for s in settings().values() if not s.meaning or not s.source] == []
