"""What gives itself away by its shape or by the name before it: keys, prompts, addresses, host names, mail addresses.

One pass over one text, in an order in which no step spoils what a later one looks for. Pure.
"""

from __future__ import annotations

import ipaddress
import re
import sys
from itertools import pairwise

from .redact_tokens import Tokens, is_token

PROMPT = "(left out)"

_NAMES = (
    r"api[-_]?keys?|access[-_]?keys?|secret[-_]?keys?|private[-_]?keys?|signing[-_]?keys?|license[-_]?keys?|secrets?"
    r"|token|passw(?:or)?d|passwd|pwd|passphrase|credentials?|authorization|auth|cookie|bearer"
)
SECRET_NAME = re.compile(rf"(?:.*[-_.])?(?:{_NAMES})", re.IGNORECASE)
"""Whole names of options and variables whose value is a secret (`token`, not `max-num-batched-tokens`)."""
_VALUE = r"(?P<value>\"(?:[^\"\\]|\\.)*\"?|'(?:[^'\\]|\\.)*'?|(?:bearer|basic|token)\s+[^\s\"',;]+|[^\s\"',;&)\]}]+)"
_ASSIGNED = re.compile(rf"(?P<name>(?<![\w.-])[\w.-]*?(?:{_NAMES})[\"']?\s*[=:]\s*)(?!//){_VALUE}", re.IGNORECASE)
_OPTION = re.compile(
    rf"(?P<name>(?<!\S)--?(?:[\w.-]*[-_.])?(?:{_NAMES})(?:=|\s+))(?P<values>(?!-)\S+(?:\s+(?!-)\S+)*)",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(r"(?:true|false|none|null|\d{1,6}|\*+|<\S*>|\$\{?\w+\}?|set|\[|\{)", re.IGNORECASE)
_SCHEME = re.compile(r"\b(?P<scheme>bearer|basic)\s+(?P<value>[A-Za-z0-9+/=._~-]{8,})", re.IGNORECASE)

_KEYS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?"  # JSON web tokens
    r"|(?<![A-Za-z0-9])(?:hf_|api_org_|sk-|sk_live_|rk_live_|pk_live_|gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|nvapi-"
    r"|dop_v1_|npm_|pypi-|r8_|gsk_|xai-|tgp_v1_|AIza|ya29\.|AKIA|ASIA|SG\.)[\w.-]{12,}",
    re.DOTALL,
)
_HEX = re.compile(r"(?<![\w])[0-9a-f]{32,}(?![\w])|(?<![\w])[0-9A-F]{32,}(?![\w])")
_DENSE = re.compile(r"(?<![\w/+.-])[A-Za-z0-9_+-]{24,}={0,2}(?![\w/.-])")

_QUOTED = r"(?:\"(?:[^\"\\]|\\.)*(?:\"|$)|'(?:[^'\\]|\\.)*(?:'|$))"
_PROMPT = re.compile(
    r"(?P<name>(?<![A-Za-z])(?:[\w-]*prompts?|input_text|generated_text|output_text|content|messages|text)[\"']?"
    rf"\s*[:=]\s*)(?P<value>{_QUOTED}|\[.*)"
    r"|(?P<ids>(?<![A-Za-z])\w*token_ids[\"']?\s*[:=]\s*)\[[^\]]*(?:\]|$)",
    re.IGNORECASE | re.DOTALL,
)

_URL = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)(?P<login>[^\s/@\"']+@)?"
    r"(?P<host>\[[^\]\s]*\](?::\d+)?|[^\s/?#\"'<>,;()\[\]]*)",
    re.IGNORECASE,
)
_MAIL = re.compile(r"(?<![\w.+-])(?P<user>[A-Za-z0-9_][\w.+-]*)@(?P<host>(?!sha256)[A-Za-z][\w.-]*\w)")
_MAC = re.compile(r"(?<![\w:-])(?:[0-9a-f]{2}[:-]){5,}[0-9a-f]{2}(?![\w:-])", re.IGNORECASE)
_V4 = re.compile(r"(?<!\d)(?<!\d\.)(?<!\.so\.)\d{1,3}(?:\.\d{1,3}){3}(?!\d)(?!\.\d)")
_V6_LONGEST = 45
_V6_RUN = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*")

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_SURE = (
    "com|net|org|edu|gov|mil|cloud|internal|intranet|corp|lan|localdomain|arpa|tech|xyz|info|biz|eu|de|fr|uk|jp|cn|kr|"
    "tw|ru|pl|nl|ch|cz|au|br|ca"
)
_PERHAPS = "io|ai|dev|local|home|test|example|invalid|svc|app|us|se|fi|it|es|in|sg|hk|il|at|be|no"
"""Words of programs too: the end of a host name only behind two labels, or behind one that looks like a machine's."""
_FQDN = re.compile(
    rf"(?<![\w.@-])(?P<name>(?:{_LABEL}\.)+(?:{_SURE})|(?:{_LABEL}\.){{2,}}(?:{_PERHAPS})"
    rf"|(?=[A-Za-z-]*[\d-]){_LABEL}\.(?:{_PERHAPS}))\.?(?![\w(-])(?:(?=\.(?:log|txt|out|err|pid)\b)|(?!\.\w))",
    re.IGNORECASE,
)
_CLOUD_HOST = re.compile(r"(?<![\w-])ip(?:-\d{1,3}){4}(?:\.[\w.-]*\w)?")
_PLACES = (
    re.compile(rf"(?P<before>\[)(?P<name>{_LABEL}(?:\.{_LABEL})*)(?=\]:\d{{2,5}})"),
    re.compile(
        rf"(?P<before>\b(?:host(?:_?name)?|node_?name|master_addr|server_name|peer_?host|HOSTNAME)[\"']?\s*=\s*[\"']?)"
        rf"(?P<name>{_LABEL}(?:\.{_LABEL})*)",
        re.IGNORECASE,
    ),
    re.compile(rf"(?P<before>\b(?:connect(?:ed|ing)?|connection)\s+to\s+)(?P<name>{_LABEL})(?=:\d)", re.IGNORECASE),
    re.compile(r"(?P<before>^[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d )(?P<name>[\w.-]+)(?= )"),  # syslog, journalctl
)
"""Where a bare word is the name of a host."""
_USER = re.compile(
    r"(?P<before>\b(?:user(?:_?name)?|LOGNAME|owner)[\"']?\s*=\s*[\"']?)(?P<name>[A-Za-z_][\w.-]*)", re.IGNORECASE
)
_RESTLESS = 0.42
"""Share of neighbours that are of another kind: random letters and digits have 0.62, CamelCase words about 0.3."""
_WITH_PORT = re.compile(r"(?P<host>[^:\s]+|\[[^\]]*\])(?P<port>:\d+)")
LOCAL_NAMES = frozenset(
    {"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback", "none", "null", "true", "false", "", "*"}
)
_PACKAGES = frozenset(sys.stdlib_module_names) | {
    *("torch", "vllm", "numpy", "ray", "zmq", "transformers", "uvicorn", "fastapi", "starlette", "triton", "flashinfer")
}


class Shapes:
    """The pass, under one set of tokens."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def secrets(self, text: str) -> str:
        """Prompts, and secrets that are known by their name or their shape."""
        text = _PROMPT.sub(lambda m: (m["name"] or m["ids"]) + PROMPT, text)
        text = _KEYS.sub(lambda m: self._tokens.secret(m[0]), text)
        text = _OPTION.sub(self._option, text)
        text = _ASSIGNED.sub(self._assigned, text)
        text = _SCHEME.sub(lambda m: f"{m['scheme']} {self._tokens.secret(m['value'])}", text)
        text = _HEX.sub(lambda m: self._tokens.identifier(m[0]), text)
        return _DENSE.sub(lambda m: self._tokens.secret(m[0]) if _random(m[0]) else m[0], text)

    def places(self, text: str) -> str:
        """Addresses, hosts and who is at them."""
        text = _MAC.sub(lambda m: self._tokens.mac(m[0]), text)
        text = _V6_RUN.sub(self._v6, text)
        text = _V4.sub(self._v4, text)
        text = _URL.sub(self._url, text)
        text = _MAIL.sub(lambda m: f"{self._tokens.user(m['user'])}@{self.host(m['host'])}", text)
        text = _CLOUD_HOST.sub(lambda m: self._tokens.host(m[0]), text)
        text = _FQDN.sub(self._fqdn, text)
        for place in _PLACES:
            text = place.sub(lambda m: m["before"] + self.host(m["name"]), text)
        return _USER.sub(lambda m: m["before"] + self._tokens.user(m["name"]), text)

    def host(self, name: str) -> str:
        """A name that is known to be that of a host, or an address; with a port or without."""
        if (found := _WITH_PORT.fullmatch(name)) is not None:
            return self.host(found["host"]) + found["port"]
        bare = name.strip("[]").partition("%")[0]
        try:
            address = ipaddress.ip_address(bare)
        except ValueError:
            return name if name.lower() in LOCAL_NAMES or is_token(name) else self._tokens.host(name)
        return name.replace(bare, self._tokens.address(bare, address))

    def _option(self, found: re.Match[str]) -> str:
        return found["name"] + " ".join(self._secret(value) for value in found["values"].split())

    def _assigned(self, found: re.Match[str]) -> str:
        return found["name"] + self._secret(found["value"])

    def _secret(self, value: str) -> str:
        quote = value[:1] if value[:1] in "\"'" else ""
        inner = value[1:].removesuffix(quote) if quote else value
        scheme, blank, rest = inner.partition(" ")
        if blank and scheme.lower() in {"bearer", "basic", "token"}:
            return f"{quote}{scheme} {self._tokens.secret(rest.strip())}{quote}"
        return value if not inner or _NO_SECRET.fullmatch(inner) else f"{quote}{self._tokens.secret(inner)}{quote}"

    def _v4(self, found: re.Match[str]) -> str:
        octets = [int(octet) for octet in found[0].split(".")]
        return found[0] if max(octets) > 255 else self._tokens.address(found[0], ipaddress.IPv4Address(bytes(octets)))

    def _v6(self, found: re.Match[str]) -> str:
        """The longest address in a run of hexadecimal digits and colons that is not the middle of a word."""
        run, text = found[0], found.string
        marks = [i for i, c in enumerate(run) if c in ":."]
        cuts = sorted({0, len(run), *marks, *(i + 1 for i in marks)})
        spans = sorted(((a, b) for a in cuts for b in cuts if 2 < b - a <= _V6_LONGEST), key=lambda ab: ab[0] - ab[1])
        for a, b in spans:
            begin, end = found.start() + a, found.start() + b
            if _word(text, begin - 1) or _word(text, end) or run.count(":", a, b) < 2:
                continue
            try:
                address = ipaddress.IPv6Address(run[a:b])
            except ValueError:
                continue
            return run[:a] + self._tokens.address(run[a:b], address) + run[b:]
        return run

    def _url(self, found: re.Match[str]) -> str:
        login = f"{self._tokens.secret(found['login'][:-1])}@" if found["login"] else ""
        host = found["host"]
        return found["scheme"] + login + (host if host.startswith("@") else self.host(host))

    def _fqdn(self, found: re.Match[str]) -> str:
        name = found["name"]
        first = name.partition(".")[0]
        ours = first.lower() in _PACKAGES or is_token(name) or name.lower() in LOCAL_NAMES
        return found[0] if ours else found[0].replace(name, self._tokens.host(name))


def _word(text: str, at: int) -> bool:
    return 0 <= at < len(text) and (text[at].isalnum() or text[at] == "_")


def _kind(character: str) -> str:
    return "d" if character.isdigit() else "l" if character.islower() else "u" if character.isupper() else "-"


def _random(word: str) -> bool:
    """Letters of both cases and digits change so often as they do in no name that people make."""
    kinds = [_kind(character) for character in word]
    changes = sum(a != b and "-" not in (a, b) for a, b in pairwise(kinds))
    return {"d", "l", "u"} <= set(kinds) and changes >= _RESTLESS * len(word)
