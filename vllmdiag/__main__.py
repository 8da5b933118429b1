"""`python -m vllmdiag`, for where the console script is not on PATH."""

from __future__ import annotations

import sys

from vllmdiag.cli.main import main

sys.exit(main())
