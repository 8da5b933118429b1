"""Whatever bytes stand in /proc, the parsers take them apart as the kernel put them together, and never raise."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.sources import kmsg
from vllmdiag.sources.observe import _environ, _libraries, _limits, _memory
from vllmdiag.sources.proc import parse_cmdline, parse_fields, parse_stat
from vllmdiag.sources.viewer import decode_capabilities

NUMBER = st.integers(0, 2**40)
WORD = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(lambda word: word.strip(" "))


@given(st.binary(max_size=15).filter(lambda name: b"\0" not in name), st.lists(NUMBER, min_size=21, max_size=50))
def test_a_stat_line_is_read_whatever_the_name_holds(comm: bytes, numbers: list[int]) -> None:
    line = b"42 (" + comm + b") S " + " ".join(map(str, numbers)).encode() + b"\n"
    stat = parse_stat(line)
    assert stat is not None
    assert stat.comm == comm.decode("utf-8", "replace")
    assert (stat.state, stat.ppid, stat.pgid, stat.sid) == ("S", *numbers[:3])
    assert (stat.majflt, stat.starttime) == (numbers[8], numbers[18])


LOOKALIKE = st.from_regex(rb"(?:[0-9a-f-]* [rwsp-]* [0-9]* :? ?/?[a-z/.]*\n|[A-Za-z_ ]*:?\t? *[0-9]* ?k?B?\n|\0|=)*")


@given(st.binary() | LOOKALIKE)
def test_no_bytes_make_a_parser_raise(data: bytes) -> None:
    parse_stat(data)
    parse_cmdline(data)
    parse_fields(data)
    kmsg.parse(data.decode("utf-8", "replace"))
    _environ(data, {"A"})
    _libraries(data)
    _limits(data.decode("utf-8", "replace"))
    _memory(data)


@given(st.lists(WORD, min_size=1).filter(lambda words: words[-1] == words[-1].rstrip(" ")), st.integers(1, 9))
def test_a_command_line_is_split_at_its_nuls_and_loses_its_padding(words: list[str], padding: int) -> None:
    assert parse_cmdline("\0".join(words).encode() + b"\0" * padding) == tuple(words)


NAMES = st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ_", min_size=1)


@given(st.dictionaries(NAMES, st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1))
def test_an_environment_comes_back_without_what_was_not_asked_for(variables: dict[str, str]) -> None:
    data = "".join(f"{name}={value}\0" for name, value in variables.items()).encode()
    asked = set(list(variables)[::2])
    found, complete = _environ(data, asked)
    assert complete
    assert found == {
        name: "set" if name.lower().endswith("_proxy") else value for name, value in variables.items() if name in asked
    }


@given(st.integers(0, 2**64 - 1))
def test_every_capability_bit_has_one_name(mask: int) -> None:
    names = decode_capabilities(mask)
    assert len(set(names)) == len(names) == mask.bit_count()
    assert ("CAP_SYS_PTRACE" in names) == bool(mask >> 19 & 1)
    assert ("CAP_CHECKPOINT_RESTORE" in names) == bool(mask >> 40 & 1)
