"""Tokens that stand for what was taken out: the same value gives the same token, and only the key leads back to it.

A token of an address is an address (so that a program that reads addresses still can), in ranges that no machine has:
240.0.0.0/4 and 2001:db8::/32.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_DIGITS = 10
_TOKEN = re.compile(r"(?:host|net|user|name|secret|id|mac)-[0-9a-f]{4,10}")
_ADDRESS_TOKEN = re.compile(r"(?<![\d.])2(?:4\d|5[0-5])(?:\.\d{1,3}){3}|2001:db8:")
_RESERVED: dict[int, ipaddress.IPv4Network | ipaddress.IPv6Network] = {
    4: ipaddress.IPv4Network("240.0.0.0/4"),
    6: ipaddress.IPv6Network("2001:db8::/32"),
}


class Tokens:
    """Tokens under one key. Every method gives back unchanged what is a token already."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def _bits(self, kind: str, value: str) -> str:
        return hmac.new(self._key, f"{kind}\0{value}".encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()

    def _token(self, kind: str, value: str) -> str:
        return value if is_token(value) else f"{kind}-{self._bits(kind, value)[:_DIGITS]}"

    @property
    def key_id(self) -> str:
        """Fingerprint of the key."""
        return self._bits("key", "")[:_DIGITS]

    def host(self, name: str) -> str:
        """Of a host name, whatever its case. The first label and the domain have tokens of their own."""
        first, dot, domain = name.lower().rstrip(".").partition(".")
        return self._token("host", first) + (f".{self._token('net', domain)}" if dot and domain else "")

    def user(self, name: str) -> str:
        """Of a user."""
        return self._token("user", name)

    def name(self, name: str) -> str:
        """Of a file or directory."""
        return self._token("name", name)

    def secret(self, value: str) -> str:
        """Of a key, token or password."""
        return self._token("secret", value)

    def identifier(self, value: str) -> str:
        """Of a long number that may be a key, and may be the name of a container or of a blob."""
        return self._token("id", value)

    def mac(self, address: str) -> str:
        """Of a hardware address."""
        return self._token("mac", address.lower().replace("-", ":"))

    def address(self, text: str, address: Address) -> str:
        """Of an IP address as it was written. Loopback, unspecified, broadcast and net masks stay: they name nobody."""
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            old = str(address.ipv4_mapped)
            new = self.address(old, address.ipv4_mapped)
            return text if new == old else f"::ffff:{new}"
        this_network = address.version == 4 and address.packed[0] == 0
        if address.is_loopback or address.is_unspecified or this_network or address in _RESERVED[address.version]:
            return text
        base, digits = _RESERVED[address.version].network_address, {4: 7, 6: 24}[address.version]
        return str(type(address)(int(base) | int(self._bits("ip", str(address))[:digits], 16)))


def is_token(value: str) -> bool:
    """Whether a value is a token: what was redacted once is not redacted again."""
    return all(_TOKEN.fullmatch(part.rstrip("-")) for part in value.split("."))


def holds_token(text: str) -> bool:
    """Whether there is a token, or an address that stands for one, anywhere in a text."""
    return _TOKEN.search(text) is not None or _ADDRESS_TOKEN.search(text) is not None
