"""The ranks of workers that do not say them: by the order of start, or because only their place is left.

The executor starts workers in rank order (vllm/v1/executor/multiproc_executor.py). A dead worker shows nothing but its
comm, which is cut before the rank: its place in the order tells only where all are there; where some are gone already,
it is the rank that nobody else has, if there is one such.
"""

from __future__ import annotations

from collections.abc import Sequence


def unsaid_numbers(
    ranks: Sequence[dict[str, int]], dead: Sequence[bool], *, first: int, local: int, tp: int
) -> dict[int, int]:
    """Numbers of the workers that have no ranks, by their index.

    Args:
        ranks: of the workers in the order of their start; empty where not said.
        dead: whether each of them shows its comm only.
        first: number of the first worker of this machine.
        local: how many workers this machine should have; 0 where not known.
        tp: tensor-parallel size; 0 where not known.
    """
    unsaid = [i for i, said in enumerate(ranks) if not said]
    taken = {said.get("pp", 0) * max(tp, 1) + said.get("tp", 0) for said in ranks if said}
    free = [number for number in range(first, first + local) if number not in taken]
    if len(free) == len(unsaid):
        return dict(zip(unsaid, free, strict=True))
    if local and any(dead[i] for i in unsaid):
        return {}
    return {i: first + i for i in unsaid}


def ranks_of(number: int, tp: int, pp: int) -> dict[str, int]:
    """``{"pp": 1, "tp": 0}`` for a worker's number within its engine."""
    if pp <= 1 or tp <= 0:
        return {"tp": number}
    return {"pp": number} if tp == 1 else {"pp": number // tp, "tp": number % tp}
