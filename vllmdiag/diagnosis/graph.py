"""The wait-for graph as people look at it: actors of one role that do the same folded into one node, the root marked.

The edges are those that the rules judge by (`waits`), and the steps of the verdict's chain, which leads further in two
directions: to the client, and to a root that has no pid (a rank that is gone, a node out of sight).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from itertools import pairwise

from vllmdiag.model.diagnosis import Diagnosis, Subject
from vllmdiag.model.report import GraphEdge, GraphNode, WaitGraph

from .case import Case
from .waits import waits_of

_MOST_NODES = 24
"""More than this and nobody sees anything: what they do is then left out of the fold."""

Actor = tuple[str, int | None, str]
"""(role, pid, label): the identity of an actor."""
_Edge = tuple[Actor, Actor, str, int]


def wait_graph(case: Case, diagnosis: Diagnosis) -> WaitGraph:
    """Everybody that waits or is waited for; empty where nobody waits.

    Args:
        case: the instance under judgement.
        diagnosis: its diagnosis, for the chain and the root.
    """
    edges = [
        (_actor(case.scene.subject(w.waiter)), _actor(case.scene.subject(w.on)), w.why, w.layer) for w in waits_of(case)
    ]
    doing = {_actor(case.scene.subject(pid)): act.doing for pid, act in case.acts.items()}
    known = {(waiter, on) for waiter, on, _, _ in edges}
    for waiter, on in pairwise(diagnosis.verdict.chain):
        pair = (_actor(waiter.subject), _actor(on.subject))
        doing.setdefault(pair[0], "" if waiter.subject.role == "Client" else waiter.doing)
        doing.setdefault(pair[1], on.doing)
        if pair not in known and pair[0] != pair[1]:
            edges.append((*pair, waiter.doing, 0))
    fault = diagnosis.verdict.status in ("warning", "critical")
    root = _actor(diagnosis.verdict.subject) if fault else None
    return folded(_around(edges, root) if root else edges, doing, root)


def _around(edges: list[_Edge], root: Actor) -> list[_Edge]:
    """The waits that are connected with the root, over any number of steps: who idles elsewhere is no part."""
    near: dict[Actor, set[Actor]] = defaultdict(set)
    for waiter, on, _, _ in edges:
        near[waiter].add(on)
        near[on].add(waiter)
    seen, left = {root}, [root]
    while left:
        fresh = near[left.pop()] - seen
        seen |= fresh
        left += fresh
    return [edge for edge in edges if edge[0] in seen]


def folded(edges: Iterable[_Edge], doing: dict[Actor, str], root: Actor | None) -> WaitGraph:
    """Fold actors of one role that do the same, and the waits between them.

    Args:
        edges: (waiter, on, why, layer).
        doing: what each actor does, in a few words.
        root: the actor that is never folded with another.
    """
    edges = list(edges)
    actors = list(dict.fromkeys([*([root] if root else []), *(a for edge in edges for a in edge[:2])]))
    fine = _groups(actors, lambda a: (a[0], doing.get(a, ""), a == root))
    groups = fine if len(fine) <= _MOST_NODES else _groups(actors, lambda a: (a[0], a == root))
    nodes = tuple(_node(i, group, doing, root) for i, group in enumerate(groups))
    place = {actor: i for i, group in enumerate(groups) for actor in group}
    joined: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    for waiter, on, why, layer in edges:
        # Of a fold, those that wait for others like themselves show nothing that can be drawn.
        if place[waiter] != place[on]:
            joined[place[waiter], place[on]].append((why, layer))
    return WaitGraph(
        nodes=nodes,
        edges=tuple(
            GraphEdge(waiter=a, on=b, why=waits[0][0], layer=waits[0][1], count=len(waits))
            for (a, b), waits in joined.items()
        ),
    )


def _actor(subject: Subject) -> Actor:
    return (subject.role, subject.pid, subject.label or subject.role)


def _groups(actors: Iterable[Actor], key: Callable[[Actor], Hashable]) -> list[list[Actor]]:
    groups: dict[Hashable, list[Actor]] = defaultdict(list)
    for actor in actors:
        groups[key(actor)].append(actor)
    return list(groups.values())


def _node(number: int, group: list[Actor], doing: dict[Actor, str], root: Actor | None) -> GraphNode:
    words = {doing.get(actor, "") for actor in group}
    return GraphNode(
        id=number,
        role=group[0][0],
        labels=tuple(actor[2] for actor in group),
        pids=tuple(actor[1] for actor in group if actor[1] is not None),
        doing=next(iter(words)) if len(words) == 1 else "different things",
        root=root in group,
    )
