"""The kernel log as `dmesg`, `journalctl -k` or a syslog shows it: only lines that matter are kept."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vllmdiag.bundle.draft import Draft
from vllmdiag.model.snapshot import KernelLine
from vllmdiag.sources.kmsg import matters

from .format import Context, block

_STAMP = re.compile(
    r"^\s*(?:<\d+>)?(?:\[\s*(?P<t>\d+\.\d+)\]|\[[A-Z][a-z]{2} [A-Z][a-z]{2}\s+\d+ [\d:]+ \d{4}\]"
    r"|(?:[A-Z][a-z]{2}\s+\d+ [\d:]+|\d{4}-\d\d-\d\dT\S+) \S+ kernel:(?: \[\s*(?P<t2>\d+\.\d+)\])?)\s*"
)
_BARE = re.compile(r"^\s*NVRM: |^\s*(?:SXid|Xid) \(PCI:")
_MOST = 2000


def _opens(line: str, _context: Context) -> bool:
    return (_STAMP.match(line) is not None or _BARE.match(line) is not None) and matters(line)


def _goes_on(line: str, _context: Context) -> bool:
    return _STAMP.match(line) is not None or _BARE.match(line) is not None


def _read(lines: Sequence[str], _context: Context, draft: Draft) -> None:
    kept = []
    for line in lines:
        if matters(line):
            stamp = _STAMP.match(line)
            told = (stamp["t"] or stamp["t2"]) if stamp is not None else None
            text = line[stamp.end() :] if stamp is not None else line
            kept.append(KernelLine(t=float(told) if told else None, text=text.strip()))
    draft.add("kernel_lines", *kept[-_MOST:])


FORMATS = (block("kernel log", _opens, _goes_on, _read, ("dmesg", "kern", "kmsg", "journal")),)
