"""Nothing of what must not leave the host is in a redacted bundle, in whatever field of whatever evidence it stood."""

from __future__ import annotations

import gzip
import ipaddress
import string
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.diagnosis.scenario import Server
from tests.unit.diagnosis.test_causes import FAULTS, LOOK_ALIKES
from vllmdiag.bundle.pack import pack
from vllmdiag.bundle.redact import ACCOUNTS, Redactor
from vllmdiag.bundle.redact_shapes import LOCAL_NAMES
from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.model.base import Missing
from vllmdiag.model.diagnosis import Diagnosis
from vllmdiag.model.process import Process
from vllmdiag.model.snapshot import Node, Snapshot
from vllmdiag.vllm.tables import vocabulary

REDACTOR = Redactor(b"a key that stays on the host 1234")
LETTERS = string.ascii_lowercase
ALNUM = string.ascii_letters + string.digits


# -- one value of every kind of evidence ---------------------------------------------------------------------------


def instances(kind: Any, text: str) -> Any:
    """A value of a type of the model, with `text` in every string and nothing else in it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        rest = [a for a in arguments if a is not type(None) and a is not Missing]
        return instances(rest[0] if rest else Missing, text)
    if origin is tuple:
        return (instances(arguments[0], text),)
    if origin is dict:
        return {instances(arguments[0], text): instances(arguments[1], text)}
    if origin is typing.Literal:
        return arguments[0]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return filled(kind, text)
    plain: dict[Any, Any] = {str: text, int: 7, float: 7.0, bool: True, bytes: b"\0\1" * 4}
    return plain[kind]


def filled(kind: type[msgspec.Struct], text: str) -> Any:
    return kind(**{f.name: instances(f.type, text) for f in msgspec.structs.fields(kind) if f.name != "schema"})


def strings_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            yield from strings_of(getattr(value, field))
    elif isinstance(value, tuple):
        for item in value:
            yield from strings_of(item)
    elif isinstance(value, dict):
        yield from strings_of((*value, *value.values()))


def evidence(text: str) -> Snapshot:
    """A snapshot in which every string of every struct is `text`; of a process, a host and a key more is known."""
    snapshot: Snapshot = filled(Snapshot, text)
    return snapshot


def packed(*snapshots: Snapshot) -> bytes:
    """Everything that is in the archive, unpacked."""
    return gzip.decompress(pack(snapshots, REDACTOR))


@cache
def said_anyway() -> bytes:
    """What is in an archive whatever was seen: a secret that is a piece of it cannot be told from it."""
    return packed(evidence("x y")) + packed(Snapshot(processes=(Process(pid=9),), target_pids=(9,)))


def assert_gone(secret: str, archive: bytes) -> None:
    for form in {secret, msgspec.json.encode(secret).decode()[1:-1]}:
        assert form.encode("utf-8") not in archive or form.encode("utf-8") in said_anyway()


def test_every_kind_of_evidence_is_among_those_that_are_filled() -> None:
    whole = evidence("x y")
    assert len(list(strings_of(whole))) > 150
    assert not [f for f in whole.__struct_fields__ if getattr(whole, f) in ((), "", None)]
    assert not [f for f in whole.processes[0].__struct_fields__ if getattr(whole.processes[0], f) in ((), "", None)]


# -- what is planted -----------------------------------------------------------------------------------------------

KEPT = vocabulary() | ACCOUNTS | LOCAL_NAMES
"""Words that name nobody: of vLLM itself, accounts that every machine has, ``localhost`` and its like."""
words = st.text(LETTERS, min_size=6, max_size=12).filter(lambda w: w not in KEPT)
hex_words = st.text("0123456789abcdef", min_size=4, max_size=8)


def names_somebody(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Loopback, unspecified, net masks and what tokens are made of name nobody."""
    if isinstance(address, ipaddress.IPv4Address):
        return not address.is_loopback and address.packed[0] not in (0, *range(240, 256))
    if address.ipv4_mapped is not None:
        return names_somebody(address.ipv4_mapped)
    reserved = ipaddress.ip_network("2001:db8::/32")
    return not address.is_loopback and not address.is_unspecified and address not in reserved


v4 = st.ip_addresses(v=4).filter(names_somebody)
v6 = st.ip_addresses(v=6).filter(names_somebody)
AROUND = ["{}", "at {}: refused", "({})", "x={}, y", "'{}'", '"{}"', "<{}>", "from {} to it", "{}\n", "[{}]"]
HOST_AROUND = ["{}", "tcp://{}:29500", "http://{}/v1?x=1", "connect to [{}]:1234", "me@{}", "({}, 1)", "host={}"]


@st.composite
def public_names(draw: st.DrawFn) -> str:
    labels = [*draw(st.lists(words, min_size=1, max_size=2)), draw(words)]
    return ".".join([*labels, draw(st.sampled_from(["com", "internal", "org", "example.net", "corp"]))])


def tells(value: str) -> bool:
    return not value.isdigit() and value.lower() not in KEPT


@st.composite
def secrets(draw: st.DrawFn) -> tuple[str, str]:
    """(the secret, the text in which it stands)."""
    value = draw(st.text(ALNUM, min_size=8, max_size=40).filter(tells))
    long = draw(st.text(ALNUM, min_size=34, max_size=40))
    forms = [
        (value, f"--api-key {value}"),
        (value, f"--api-key={value} --port 1"),
        (value, f"vllm serve m --hf-token {value} --port 8000"),
        (value, f"HF_TOKEN={value} vllm serve"),
        (value, f"Authorization: Bearer {value}"),
        (value, f"curl -H 'authorization: Bearer {value}' x"),
        (value, f'{{"api_key": "{value}", "n": 1}}'),
        (value, f"{{'password': '{value}'}}"),
        (value, f"https://someone:{value}@registry/x"),
        (value, f"https://x/?a=1&token={value}&b=2"),
        (f"hf_{long}", f"hf_{long}"),
        (f"sk-{long}", f"key sk-{long}."),
        (f"ghp_{long}", f"(ghp_{long})"),
        (f"AKIA{long.upper()}", f"AKIA{long.upper()}"),
    ]
    return draw(st.sampled_from(forms))


@given(v4, st.sampled_from([*AROUND, "{}:8000", "tcp://{}:80", "{}/24", "::ffff:{}", "inet {} peer"]))
@settings(max_examples=25)
def test_no_ipv4_address_is_left(address: ipaddress.IPv4Address, around: str) -> None:
    assert_gone(str(address), packed(evidence(around.format(address))))


@given(v6, st.sampled_from([*AROUND, "[{}]:8000", "tcp://[{}]:80", "{}/64", "{}%eth0", "inet6 addr:{} scope"]))
@settings(max_examples=25)
def test_no_ipv6_address_is_left(address: ipaddress.IPv6Address, around: str) -> None:
    assert_gone(str(address), packed(evidence(around.format(address))))


@pytest.mark.parametrize("address", ["64:ff9b::a00:5", "fe80::1", "fd00::7", "::ffff:10.0.0.5", "::2"])
def test_addresses_that_begin_with_zeros_or_hold_another_one_are_not_left(address: str) -> None:
    assert_gone(address, packed(evidence(f"to [{address}]:80")))


@given(public_names(), st.sampled_from(HOST_AROUND))
@settings(max_examples=25)
def test_no_full_host_name_is_left(name: str, around: str) -> None:
    assert_gone(name, packed(evidence(around.format(name))))


@given(words, hex_words, st.sampled_from([*AROUND, *HOST_AROUND]))
@settings(max_examples=25)
def test_no_name_of_a_host_of_the_evidence_is_left_anywhere(word: str, number: str, around: str) -> None:
    name = f"{word}-{number}"
    snapshot = msgspec.structs.replace(evidence(around.format(name)), node=Node(hostname=f"{name}.rack7.example.org"))
    archive = packed(snapshot)
    assert_gone(name, archive)
    assert_gone("rack7.example.org", archive)


@given(words, words, st.sampled_from(["/home/{}/{}.txt", "file:///home/{}/{}", "in /Users/{}/a/{}: gone", "~{}/{}"]))
@settings(max_examples=25)
def test_no_user_and_no_path_below_a_home_is_left(user: str, name: str, around: str) -> None:
    snapshot = evidence(around.format(user, name))
    also = msgspec.structs.replace(snapshot, processes=(*snapshot.processes, Process(pid=9, comm=f"of {user}")))
    archive = packed(also)
    assert_gone(user, archive)
    assert_gone(name, archive)


@given(words, words)
@settings(max_examples=10)
def test_the_home_of_an_environment_is_one_wherever_it_lies(user: str, name: str) -> None:
    process = Process(pid=9, environ={"HOME": f"/scratch/{user}"}, cmdline=("python", f"/scratch/{user}/{name}.py"))
    archive = packed(Snapshot(processes=(process,), log_lines=(), target_pids=(9,)))
    assert_gone(user, archive)
    assert_gone(name, archive)


@given(secrets(), st.sampled_from(["{}", "ran: {}", "{}\n"]))
@settings(max_examples=25)
def test_no_secret_is_left(secret: tuple[str, str], around: str) -> None:
    value, text = secret
    assert_gone(value, packed(evidence(around.format(text))))


@given(st.text(ALNUM + "/+=", min_size=8, max_size=30).filter(lambda v: not v.isdigit()), st.booleans())
@settings(max_examples=25)
def test_the_value_of_a_secret_option_is_left_nowhere(value: str, joined: bool) -> None:
    option = (f"--api-key={value}",) if joined else ("--api-key", "first-one", value)
    process = Process(pid=9, cmdline=("/v/bin/vllm", "serve", "m", *option, "--port", "8000"), wchan=value)
    snapshot = Snapshot(processes=(process,), target_pids=(9,))
    if value.lower() not in KEPT:
        assert_gone(value, packed(snapshot))
    assert "--port" in REDACTOR.snapshots([snapshot])[0].processes[0].title.split()


@given(st.text(min_size=4, max_size=60).filter(lambda t: t.strip() == t and len(set(t)) > 3 and t.isprintable()))
@settings(max_examples=25)
def test_no_prompt_is_left_where_vllm_writes_one(prompt: str) -> None:
    for text in (
        f"Received request cmpl-1: prompt: {prompt!r}, params: SamplingParams(n=1), prompt_token_ids: [11, 22, 33]",
        f'{{"messages": [{{"role": "user", "content": {msgspec.json.encode(prompt).decode()}}}]}}',
        f"generated_text={prompt!r}",
    ):
        archive = packed(evidence(text))
        left = text.replace(prompt, "")
        if prompt not in left and prompt not in _everything_else():
            assert_gone(prompt, archive)
        assert b"11, 22, 33" not in archive


@cache
def _everything_else() -> str:
    return packed(evidence("")).decode("utf-8", "replace") + packed(evidence("prompt: 'z'")).decode("utf-8", "replace")


# -- what stays ----------------------------------------------------------------------------------------------------


def judged(diagnosis: Diagnosis) -> object:
    """What a verdict says, without the names of clients and addresses in its words."""
    verdict = diagnosis.verdict
    who = verdict.subject
    return (
        (verdict.status, verdict.cause, verdict.layer, verdict.confidence, verdict.since_s),
        (who.role, who.pid, who.rank, who.label if who.role != "Client" else ""),
        [(link.subject.role, link.subject.pid) for link in verdict.chain],
        [(layer.layer, layer.status) for layer in diagnosis.layers],
        [(f.cause, f.severity, f.confidence, f.folded_into, f.subject.pid) for f in diagnosis.findings],
        [len(f.evidence) for f in diagnosis.findings],
    )


@pytest.mark.parametrize(
    "change", [change for _, change, *_ in (*FAULTS, *LOOK_ALIKES)], ids=lambda change: change.__name__
)
def test_the_verdict_is_the_same_before_and_after(change: Callable[[Server], None]) -> None:
    server = Server()
    change(server)
    snapshot = server.snapshot()
    (redacted,) = REDACTOR.snapshots([snapshot])
    assert judged(diagnose(redacted)) == judged(diagnose(snapshot))
    assert REDACTOR.snapshots([redacted]) == (redacted,)


@given(v4, words, words)
@settings(max_examples=10)
def test_the_same_value_has_the_same_token_in_every_bundle_of_a_host_and_another_elsewhere(
    address: ipaddress.IPv4Address, user: str, host: str
) -> None:
    text = f"{user}@{host}.example.com /home/{user}/x {address}"
    first, second = (REDACTOR.snapshots([evidence(t)])[0].tool for t in (text, text))
    assert first == second
    assert Redactor(b"the key of another host").snapshots([evidence(text)])[0].tool != first


def test_what_names_nobody_stays() -> None:
    texts = (
        "127.0.0.1:8000",
        "[::1]:8000",
        "0.0.0.0:80 :: *:8000 [::]:22",
        "tcp://localhost:5557 ipc:///tmp/0c3f8b08-ad40-4181-a440-f3ed62f150bb",
        "VLLM::Worker_TP1 ray::RayWorkerWrapper std::vector<c10::Half> c10d::ProcessGroupNCCL",
        "meta-llama/Llama-3.1-8B-Instruct Qwen2_5_VLForConditionalGeneration",
        "libnvrtc.so.12.4.5.8 libzmq-a4c1e1e4.so.5.2.5 0.32.0 12:30:01",
        "max_tokens=512 num_tokens: 5 eos_token='<|im_end|>' --max-num-batched-tokens 8192 --skip-tokenizer-init",
        "threading.local asyncio.run vllm.v1.engine.core torch.distributed (/usr/lib/python3.11/x.py:3)",
        f"/{'root'}/.cache/huggingface/hub/models--org--m/model-00001-of-00004.safetensors",
        "NVRM: Xid (PCI:0000:61:00): 79, pid=123, name=python",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    )
    for text in texts:
        assert REDACTOR.snapshots([Snapshot(tool=text)])[0].tool == text
