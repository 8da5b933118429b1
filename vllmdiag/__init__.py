"""vllmdiag: names the first blocker of a vLLM server that does not answer, from outside, read-only."""

__version__ = "0.1.0"

SCHEMAS = (
    "diagnosis/1",
    "check/1",
    "baseline/1",
    "event/1",
    "snapshot/1",
    "bundle/1",
    "estimate/1",
    "diff/1",
    "view/1",
    "stacks/1",
    "instances/1",
    "removals/1",
    "playbooks/1",
    "explanations/1",
    "fleet/1",
    "ledger/1",
    "plan/1",
    "plan-check/1",
)
"""The documents that `--format json` writes, each without the leading ``vllmdiag.``, as `vllmdiag schema` lists them.

They stand here too because `--version` tells them without importing anything; a test holds the two lists equal.
"""


def version_text() -> str:
    """What `vllmdiag --version` prints: the version of the program, then that of each document."""
    return f"vllmdiag {__version__}\nschemas: {' '.join(SCHEMAS)}"
