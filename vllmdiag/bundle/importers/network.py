"""Names and addresses: /etc/hosts, ip addr (long and -br), ifconfig; and what Ray says of its nodes and actors."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from vllmdiag.bundle.draft import Draft
from vllmdiag.model.startup import HostName, Interface, RayStatus
from vllmdiag.vllm.titles import is_ray_worker

from .format import Context, block

_IP = r"(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]*:[0-9a-fA-F:]+)"
_BRIEF = re.compile(
    rf"^\s*(?P<name>[\w@.-]+)\s+(?P<state>UP|DOWN|UNKNOWN|LOWERLAYERDOWN)\b(?P<rest>(?:\s+{_IP}/\d+\S*)*)(?:\s+\S+)*\s*$"
)
_LONG = re.compile(r"^\s*\d+:\s+(?P<name>[\w.-]+)(?:@\S+)?:\s+<(?P<flags>[A-Z_,0-9]*)>.*?(?:state\s+(?P<state>\w+))?")
_LONG_STATE = re.compile(r"\bstate\s+(\w+)")
_INET = re.compile(rf"^\s+inet6?\s+(?:addr:)?(?P<address>{_IP})(?:/\d+)?\b")
_LONG_MORE = re.compile(
    r"^\s+(?:link/|inet6?\s|valid_lft|altname|ether\s|RX |TX |loop\s|UP |Link encap|collisions|\w+ errors)"
)
_IFCONFIG = re.compile(r"^(?P<name>[a-z][\w.-]*)(?::\s+flags=\d+<(?P<flags>[A-Z,_]*)>|\s+Link encap:)")


def _opens_ip(line: str, _context: Context) -> bool:
    return any(rule.match(line) for rule in (_BRIEF, _LONG, _IFCONFIG))


def _goes_on_ip(line: str, context: Context) -> bool:
    return not line.strip() or _opens_ip(line, context) or _LONG_MORE.match(line) is not None


def _read_ip(lines: Sequence[str], context: Context, draft: Draft) -> None:
    found: dict[str, tuple[list[str], bool | None]] = {}
    name = ""
    for line in lines:
        brief, long, old, inet = _BRIEF.match(line), _LONG.match(line), _IFCONFIG.match(line), _INET.match(line)
        if brief is not None:
            addresses = [word.partition("/")[0] for word in brief["rest"].split()]
            up = {"UP": True, "DOWN": False, "LOWERLAYERDOWN": False}.get(brief["state"])
            found[brief["name"].partition("@")[0]] = (addresses, up)
        elif long is not None:
            name = long["name"]
            state = _LONG_STATE.search(line)
            up = {"UP": True, "DOWN": False}.get(state[1]) if state else "UP" in long["flags"].split(",")
            found[name] = ([], up)
        elif old is not None:
            name = old["name"].rstrip(":")
            found[name] = ([], "UP" in (old["flags"] or "UP").split(","))
        elif inet is not None and name in found:
            found[name][0].append(inet["address"])
    draft.interfaces(context, [Interface(name=n, addresses=tuple(a), up=up) for n, (a, up) in found.items()])


_HOST = re.compile(rf"^\s*(?P<address>{_IP})\s+(?P<names>[A-Za-z][\w.-]*(?:\s+[\w.-]+)*)\s*(?:#.*)?$")


def _read_hosts(lines: Sequence[str], context: Context, draft: Draft) -> None:
    for line in lines:
        row = _HOST.match(line)
        if row is not None:
            draft.add(
                "host_names",
                *(HostName(node=context.node, name=n, address=row["address"]) for n in row["names"].split()),
            )


_RAY = re.compile(
    r"^\s*(?:=+ Autoscaler status|Node status|Active:|Resources\s*$|(?:Total )?Usage:|(?:Total )?Demands:|Pending:"
    r"|Recent failures:)"
)
_RAY_NODE = re.compile(rf"^\s*(?:\d+\s+)?(?:node[_:]\s*)?(?P<id>[\w-]*)\s*\(?(?P<address>{_IP})\)?\s*$")
_RAY_NODE_ID = re.compile(r"^\s*\d+\s+(?P<id>node_\w+)")
_RAY_USE = re.compile(r"^\s*(?P<used>[\d.]+)/(?P<total>[\d.]+)\s+(?P<what>\S+)(?:\s+\(.*\))?\s*$")
_RAY_DEMAND = re.compile(r"^\s*\{.*\}.*(?:pending|demand|request)", re.IGNORECASE)
_RAY_MORE = re.compile(r"^\s*(?:-{3,}|\(no |\S*/\S* \w|Idle:|Constraints:|Total Constraints:|Node:|Autoscaler)")
_NODE_RESOURCE = re.compile(rf"node:(?P<address>{_IP})")


def _goes_on_ray(line: str, _context: Context) -> bool:
    if not line.strip():
        return True
    return any(rule.match(line) for rule in (_RAY, _RAY_NODE, _RAY_NODE_ID, _RAY_USE, _RAY_DEMAND, _RAY_MORE))


def _read_ray(lines: Sequence[str], _context: Context, draft: Draft) -> None:
    nodes: list[str] = []
    used = total = None
    demands: list[str] = []
    for line in lines:
        node, use = _RAY_NODE.match(line), _RAY_USE.match(line)
        if node is not None:
            nodes.append(node["address"])
        elif named := _RAY_NODE_ID.match(line):
            nodes += re.findall(_IP, line) or [named["id"]]
        elif use is not None and use["what"] == "GPU":
            used, total = float(use["used"]), float(use["total"])
        elif use is not None:
            nodes += _NODE_RESOURCE.findall(line)
        elif _RAY_DEMAND.match(line):
            demands.append(line.strip()[:200])
    told = {"nodes": tuple(dict.fromkeys(nodes)), "gpus_used": used, "gpus_total": total, "pending": tuple(demands)}
    draft.single["ray"] = msgspec.structs.replace(draft.single.get("ray", RayStatus()), **told)


_ACTORS = re.compile(r"^\s*(?:\d+\s+)?ACTOR_ID\s+CLASS_NAME\b.*\bSTATE\b")
_ACTOR = re.compile(r"^\s*(?:\d+\s+)?(?P<id>[0-9a-fA-F]\w*)\s+(?P<name>[A-Z]\w+)\s+(?P<state>[A-Z_]{4,})\b")


def _read_actors(lines: Sequence[str], _context: Context, draft: Draft) -> None:
    rows = [found for line in lines if (found := _ACTOR.match(line))]
    states = [row["state"] for row in rows if is_ray_worker(row["name"])]
    told = {"workers_alive": len(states) - states.count("DEAD"), "workers_dead": states.count("DEAD")}
    draft.single["ray"] = msgspec.structs.replace(draft.single.get("ray", RayStatus()), **told)


FORMATS = (
    block("ray status", lambda line, _: _RAY.match(line) is not None, _goes_on_ray, _read_ray, names=("ray",)),
    block(
        "ray list actors",
        lambda line, _: _ACTORS.match(line) is not None,
        lambda line, _: not line.strip() or _ACTOR.match(line) is not None,
        _read_actors,
        names=("ray", "actors"),
    ),
    block("interfaces", _opens_ip, _goes_on_ip, _read_ip, names=("ip", "ifconfig")),
    block(
        "/etc/hosts",
        lambda line, _: _HOST.match(line) is not None,
        lambda line, _: _HOST.match(line) is not None,
        _read_hosts,
        names=("hosts",),
    ),
)
