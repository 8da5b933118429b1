"""Structured output, as far as a fault needs it: a thread that makes a grammar and does not come to its end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from vllmdiag.lab import switches


class StructuredOutputManager:
    """Makes the grammars of requests beside the engine's loop. A request waits until its own is there."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(max_workers=1)

    def grammar_init(self) -> None:
        """Have the grammar of a request made."""
        self.executor.submit(self._create_grammar)

    def _create_grammar(self) -> None:
        switches.spin_while_on("grammar-busy")
