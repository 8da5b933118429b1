"""``vllm VERB``: only ``serve``."""

from __future__ import annotations

import logging
import sys

from vllmdiag.lab import lifeline
from vllmdiag.lab.vllm.config import parse
from vllmdiag.lab.vllm.entrypoints.cli.serve import ServeSubcommand


def main() -> int:
    """Run the command line of this process."""
    lifeline.hang_on()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s")
    verb, *arguments = sys.argv[1:] or [""]
    if verb != "serve":
        raise SystemExit("the miniature knows only: vllm serve")
    ServeSubcommand.cmd(parse(arguments))
    return 0
