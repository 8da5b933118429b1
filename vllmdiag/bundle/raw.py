"""The facts of a (redacted) snapshot as the text that people know from their tools; never read beside the snapshot."""

from __future__ import annotations

from collections.abc import Iterator

from vllmdiag.model.snapshot import Snapshot


def raw_texts(snapshot: Snapshot) -> Iterator[tuple[str, str, str]]:
    """(file name, what it holds, text) of each source that gave something."""
    if snapshot.kernel_lines:
        text = "".join(f"[{line.t or 0:13.6f}] {line.text}\n" for line in snapshot.kernel_lines)
        yield "dmesg.txt", "lines of the kernel log that matter", text
