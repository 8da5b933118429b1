"""What a process sees of the network: our own namespace, another one, and tables of any form."""

from __future__ import annotations

import ipaddress
import os
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.model.process import Process
from vllmdiag.sources.interfaces import networks, parse_dev, parse_fib_trie, parse_if_inet6, parse_route

SLEEP = "import sys; print('up',flush=True); sys.stdin.read()"


def test_our_own_namespace_has_loopback() -> None:
    (network,) = networks([Process(pid=os.getpid()), Process(pid=os.getppid())])
    assert network.pids == (os.getpid(), os.getppid())
    assert network.netns == os.stat("/proc/self/ns/net").st_ino
    (loopback,) = [i for i in network.interfaces if i.name == "lo"]
    assert "127.0.0.1" in loopback.addresses


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a namespace of its own")
def test_another_namespace_is_another_value_without_our_addresses(children: Any) -> None:
    pid, _ = children.python(SLEEP, under=("unshare", "--net"))
    ours, theirs = networks([Process(pid=os.getpid()), Process(pid=pid)])
    assert (ours.pids, theirs.pids) == ((os.getpid(),), (pid,))
    assert ours.netns != theirs.netns
    assert [a for i in theirs.interfaces for a in i.addresses] == []


def test_a_process_that_is_gone_has_no_network() -> None:
    assert networks([Process(pid=2**22 + 1)]) == ()


def _word(address: str) -> str:
    return f"{int.from_bytes(ipaddress.IPv4Address(address).packed, sys.byteorder):08X}"


@given(st.ip_addresses(v=4), st.integers(0, 32), st.booleans())
def test_routes_are_read_in_the_byte_order_of_the_machine(
    address: ipaddress.IPv4Address, length: int, up: bool
) -> None:
    net = ipaddress.IPv4Network((address, length), strict=False)
    flags = "0001" if up else "0000"
    line = f"eth0\t{_word(str(net[0]))}\t{_word('0.0.0.0')}\t{flags}\t0\t0\t0\t{_word(str(net.netmask))}\t0\t0\t0"
    found = parse_route(f"Iface\tDestination ...\n{line}\n")
    assert [(r.network, r.interface, r.gateway) for r in found] == ([(str(net), "eth0", "")] if up else [])


def test_the_gateway_of_the_default_route_is_told() -> None:
    line = f"eth0\t00000000\t{_word('10.0.0.1')}\t0003\t0\t0\t0\t00000000\t0\t0\t0"
    (route,) = parse_route(f"header\n{line}\n")
    assert (route.network, route.gateway) == ("0.0.0.0/0", "10.0.0.1")


def test_local_addresses_are_told_from_broadcast_ones() -> None:
    trie = (
        "Local:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.0.0.5\n        /32 host LOCAL\n"
        "     |-- 10.0.0.255\n        /32 link BROADCAST\n     |-- 127.0.0.1\n        /32 host LOCAL\n"
    )
    assert parse_fib_trie(trie) == ["10.0.0.5", "127.0.0.1"]


def test_addresses_of_ipv6_come_with_their_interface() -> None:
    assert parse_if_inet6("00000000000000000000000000000001 01 80 10 80       lo\n") == [("lo", "::1")]


@given(st.text())
def test_any_text_is_read_without_an_error(text: str) -> None:
    for parse in (parse_route, parse_fib_trie, parse_if_inet6, parse_dev):
        assert isinstance(parse(text), list)
