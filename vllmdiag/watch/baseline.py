"""The baseline of `check` on disk: what is known of an instance and no news."""

from __future__ import annotations

from pathlib import Path

import msgspec

from vllmdiag.model.check import BASELINE_SCHEMA, Baseline
from vllmdiag.model.errors import BadDataError, NotPermittedError, UsageError
from vllmdiag.render.document import to_json


def read_baseline(path: Path) -> Baseline:
    """Read a baseline. Raises BadDataError where there is none, or it is of another version."""
    try:
        baseline = msgspec.json.decode(path.read_bytes(), type=Baseline)
    except (OSError, msgspec.MsgspecError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise BadDataError(f"{path} is no baseline", why=why, next="--write-baseline") from None
    if baseline.schema != BASELINE_SCHEMA:
        raise BadDataError(f"{path} is {baseline.schema}", why=f"{BASELINE_SCHEMA} is read", next="--write-baseline")
    return baseline


def write(baseline: Baseline, path: Path) -> None:
    """Write a baseline. Raises NotPermittedError or UsageError where it cannot be."""
    try:
        path.write_text(to_json(baseline), encoding="utf-8")
    except PermissionError as error:
        raise NotPermittedError(f"cannot write {path}", why=str(error.strerror), next="--baseline FILE") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}", why=str(error.strerror), next="--baseline FILE") from None
