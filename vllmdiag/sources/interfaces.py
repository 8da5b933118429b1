"""Interfaces, addresses and routes as a process sees them, from /proc/PID/net (readable to all).

The tables are those of the network namespace of the process. Formats: proc(5), fib_trie.c, addrconf.c.
"""

from __future__ import annotations

import ipaddress
import re
import sys
from collections.abc import Iterable

from vllmdiag.model.process import Process
from vllmdiag.model.startup import Interface, Network, Route

from . import procfs
from .netns import netns_key, netns_of

_UP = 0x1
_LEAF = re.compile(r"\|-- (\d+\.\d+\.\d+\.\d+)\s*$")


def networks(processes: Iterable[Process], root: str = "/") -> tuple[Network, ...]:
    """One value for each network namespace of the processes. Never raises: what is not readable is left out."""
    spaces: dict[int, list[int]] = {}
    for process in processes:
        # A recording holds one namespace; of a process that is gone there is none.
        if key := netns_key(process.pid) if root == "/" else -1:
            spaces.setdefault(key, []).append(process.pid)
    found = [_network(pids, root) for pids in spaces.values()]
    return tuple(network for network in found if network is not None)


def _network(pids: list[int], root: str) -> Network | None:
    pid = pids[0]
    try:
        names = parse_dev(procfs.text(procfs.proc(root, pid, "net", "dev")))
        routes = parse_route(procfs.text(procfs.proc(root, pid, "net", "route")))
        local = parse_fib_trie(procfs.text(procfs.proc(root, pid, "net", "fib_trie")))
    except OSError:
        return None
    try:
        six = parse_if_inet6(procfs.text(procfs.proc(root, pid, "net", "if_inet6")))
    except OSError:  # a kernel without IPv6
        six = []
    addresses: dict[str, list[str]] = {name: [] for name in names}
    for address in local:
        addresses.setdefault(_interface_of(address, routes), []).append(address)
    for name, address in six:
        addresses.setdefault(name, []).append(address)
    return Network(
        netns=netns_of(pid) if root == "/" else 0,
        pids=tuple(pids),
        interfaces=tuple(Interface(name=name, addresses=tuple(found)) for name, found in addresses.items()),
        routes=tuple(routes),
    )


def _interface_of(address: str, routes: list[Route]) -> str:
    """The interface whose network on the link holds the address: fib_trie does not name it. Empty where none does."""
    ip = ipaddress.ip_address(address)
    if ip.is_loopback:
        return "lo"
    fitting = [(net.prefixlen, r.interface) for r in routes if not r.gateway and ip in (net := _net(r.network))]
    return max(fitting)[1] if fitting else ""


def _net(text: str) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network(text)


def parse_dev(text: str) -> list[str]:
    """Names of the interfaces in /proc/net/dev."""
    return [line.partition(":")[0].strip() for line in text.splitlines() if ":" in line]


def parse_route(text: str) -> list[Route]:
    """Routes of /proc/net/route that are up; a line of another form is passed over."""
    routes = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        try:
            name, network, gateway, flags, mask = fields[0], fields[1], fields[2], int(fields[3], 16), fields[7]
            length = int(mask, 16).bit_count()
            net = ipaddress.IPv4Network((_address(network), length), strict=False)
        except (IndexError, ValueError):
            continue
        if flags & _UP:
            routes.append(
                Route(network=str(net), interface=name, gateway="" if int(gateway, 16) == 0 else _address(gateway))
            )
    return routes


def _address(word: str) -> str:
    """The table prints the address as a number in the byte order of the machine that wrote it."""
    return str(ipaddress.IPv4Address(int(word, 16).to_bytes(4, sys.byteorder)))


def parse_fib_trie(text: str) -> list[str]:
    """IPv4 addresses of the namespace itself in /proc/net/fib_trie, ascending."""
    found, last = set(), ""
    for line in text.splitlines():
        leaf = _LEAF.search(line)
        if leaf is not None:
            last = leaf[1]
        elif "/32 host LOCAL" in line and last:
            found.add(last)
    return sorted(found, key=lambda address: int(ipaddress.IPv4Address(address)))


def parse_if_inet6(text: str) -> list[tuple[str, str]]:
    """(interface, address) of each line of /proc/net/if_inet6; a line of another form is passed over."""
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == 6 and re.fullmatch(r"[0-9a-f]{32}", fields[0]):
            found.append((fields[5], str(ipaddress.IPv6Address(int(fields[0], 16)))))
    return found
