"""vllmdiag: names the first blocker of a vLLM server that does not answer, from outside, read-only."""

__version__ = "0.1.0"
