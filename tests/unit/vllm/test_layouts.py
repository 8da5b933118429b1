from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.vllm.layouts import MIB, candidates, classify_file


def shapes(size: int, version: str | None = None, chunk_mib: int | None = None) -> list[tuple[str, int, int, int]]:
    return [(c.queue, c.chunks, c.chunk_bytes // MIB, c.n_readers) for c in candidates(size, version, chunk_mib)]


@pytest.mark.parametrize(
    ("size", "first"),
    [
        (167772190, ("broadcast", 10, 16, 2)),
        (167772180, ("broadcast", 10, 16, 1)),
        (251658260, ("response", 10, 24, 1)),
        (25165836, ("group", 6, 4, 1)),
        (25165854, ("group", 6, 4, 4)),
        (104857620, ("response", 10, 10, 1)),
        (104857630, ("broadcast", 10, 10, 2)),
    ],
)
def test_a_size_seen_on_a_real_server_is_recognised(size: int, first: tuple[str, int, int, int]) -> None:
    assert shapes(size)[0] == first


def test_every_reading_of_an_ambiguous_size_is_given() -> None:
    assert shapes(25165836) == [("group", 6, 4, 1), ("remote_response", 6, 4, 1)]
    assert shapes(251658260) == [("response", 10, 24, 1), ("broadcast", 10, 24, 1)]
    assert shapes(104857620) == [("response", 10, 10, 1), ("broadcast", 10, 10, 1)]


def test_the_version_narrows_the_reading() -> None:
    assert shapes(104857620, "0.8.5") == [("response", 10, 10, 1), ("broadcast", 10, 10, 1)]
    assert shapes(104857620, "0.11.0")[0] == ("response", 10, 10, 1)
    assert shapes(104857630, "0.8.5") == [("broadcast", 10, 10, 2)]
    assert shapes(104857620, "0.12.0") == [("broadcast", 10, 10, 1)]
    assert shapes(251658260, "0.11.0") == [("broadcast", 10, 24, 1)]
    assert shapes(25165836, "0.10.2") == [("group", 6, 4, 1)]


def test_a_chunk_size_set_by_the_user_is_found() -> None:
    size = 10 * (64 * MIB + 1 + 8)
    assert shapes(size) == [("broadcast", 10, 64, 8)]
    assert shapes(size, chunk_mib=64) == [("broadcast", 10, 64, 8)]
    assert shapes(size, chunk_mib=16) == []


def test_a_known_chunk_size_rules_the_default_out() -> None:
    assert shapes(167772190, chunk_mib=32) == []
    assert shapes(251658260, chunk_mib=16) == [("response", 10, 24, 1)]


@pytest.mark.parametrize("size", [0, -1, 1, 4096, 1 << 20, 2147483672, 4194560, 160 * MIB])
def test_other_sizes_are_no_ring(size: int) -> None:
    assert candidates(size) == ()


@given(st.sampled_from([(10, 16), (10, 10), (6, 4), (10, 1), (10, 512)]), st.integers(1, 128))
def test_every_ring_vllm_makes_is_among_the_candidates(shape: tuple[int, int], n_readers: int) -> None:
    chunks, chunk_mib = shape
    size = chunks * (chunk_mib * MIB + 1 + n_readers)
    found = candidates(size)
    assert (chunks, chunk_mib * MIB, n_readers) in {(c.chunks, c.chunk_bytes, c.n_readers) for c in found}
    assert all(c.geometry.size == size for c in found)


@given(st.integers(-(1 << 40), 1 << 40))
def test_a_candidate_has_exactly_the_size_asked_for(size: int) -> None:
    assert all(c.geometry.size == size for c in candidates(size))


@pytest.mark.parametrize(
    ("name", "size", "is_vllm", "ring"),
    [
        ("psm_2e0ba35c", 167772190, "maybe", True),
        ("psm_2e0ba35c", 4096, "maybe", False),
        ("psm_2e0ba35c", 2147483672, "yes", False),
        ("vllm_dist_2decd4408d364d03beef58f05fd55009-tp:0-[0-1]-cpushm_0", 4194560, "yes", False),
        ("vllm_offload_0af3.mmap", 1 << 30, "yes", False),
        ("VLLM_OBJECT_STORAGE_SHM_BUFFER_4c1d", 1 << 30, "yes", False),
        ("sem.mp-h3cdefbp", 32, "maybe", False),
        ("pym-4310-x8a_q1", 4096, "maybe", False),
        ("torch_4310_2222_0", 64, "maybe", False),
        ("nccl-a1B2c3", 9637888, "maybe", False),
        ("plasma_store", 1 << 30, "no", False),
        ("PostgreSQL.1804289383", 26976, "no", False),
        ("hsakmt_shared_mem", 4096, "no", False),
        ("something-else", 1, "maybe", False),
    ],
)
def test_a_file_is_told_by_name_and_size(name: str, size: int, is_vllm: str, ring: bool) -> None:
    kind = classify_file(name, size)
    assert (kind.is_vllm, kind.ring) == (is_vllm, ring)


def test_the_arena_is_told_from_a_ring() -> None:
    assert "arena" in classify_file("psm_0", 8 * (256 * MIB + 1 + 2)).what
    assert "arena" not in classify_file("psm_0", 8 * 256 * MIB).what


@given(st.text(), st.integers(-1, 1 << 50))
def test_any_file_is_something(name: str, size: int) -> None:
    assert classify_file(name, size).what
