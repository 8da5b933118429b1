"""Which instance is meant: TARGET, --port, or the only one there is."""

from __future__ import annotations

from vllmdiag.model.errors import TargetError
from vllmdiag.model.process import Process
from vllmdiag.model.view import InstanceLine
from vllmdiag.vllm.instances import Instance, Member, find_instances

from . import proc, viewer

_UNHIDE = "run as root, or as the user that runs vLLM"


def running(root: str = "/") -> tuple[list[Process], tuple[Instance, ...]]:
    """Every process of the host, and the instances among them."""
    processes = proc.scan(root)
    return processes, find_instances(processes)


def choose(
    instances: tuple[Instance, ...], processes: list[Process], target: int | None, port: int | None, root: str = "/"
) -> Instance | None:
    """The instance that the user means; None where there is none at all and none was asked for.

    One of which only zombies are left, that nobody has reaped, is none any more, unless it is named.

    Raises:
        TargetError: the pid or port belongs to no instance, or there are several and none was named.
    """
    if target is not None:
        return _by_pid(instances, processes, target, root)
    if port is not None:
        found = [
            i for i in instances if i.options is not None and i.options.port == port and i.of("APIServer", "Launcher")
        ]
        if len(found) == 1:
            return found[0]
        raise TargetError(
            f"no vLLM instance serves port {port}" if not found else f"several instances claim port {port}",
            why=_list(instances, processes) or _hidden(root) or "no vLLM process is visible",
            next="give a pid: vllmdiag diagnose PID",
        )
    instances = living(instances, processes)
    if len(instances) > 1:
        raise TargetError(
            f"{len(instances)} vLLM instances run on this host",
            why=_list(instances, processes),
            next=f"name one by any of its pids: vllmdiag diagnose {instances[0].roots[0]}",
        )
    return instances[0] if instances else None


def living(instances: tuple[Instance, ...], processes: list[Process]) -> tuple[Instance, ...]:
    """Those of which something lives: zombies that nobody has reaped are no instance any more."""
    states = {p.pid: p.state for p in processes}
    return tuple(i for i in instances if any(states[pid] not in ("Z", "X") for pid in i.pids))


def nothing_found(root: str = "/") -> TargetError:
    """The error for a host on which no vLLM is visible, with the reason why some may be hidden."""
    if hidden := _hidden(root):
        return TargetError("no vLLM process is visible", why=hidden, next=_UNHIDE)
    return TargetError(
        "no vLLM process is running here",
        why="no process of this pid namespace has the command line, title or tree of vLLM",
        next="in a container run it inside, or on the host; see vllmdiag ps --help",
    )


def _hidden(root: str) -> str:
    """Why processes of other users may be hidden from us; empty where they are not."""
    option = viewer.hidepid(root)
    if not option or viewer.may_ptrace(root):
        return ""
    return f"/proc is mounted with hidepid={option}: processes of other users are hidden from you"


def _by_pid(instances: tuple[Instance, ...], processes: list[Process], target: int, root: str) -> Instance:
    for instance in instances:
        if target in instance.pids:
            return instance
    process = next((p for p in processes if p.pid == target), None)
    if process is None:
        if hidden := _hidden(root):
            raise TargetError(f"process {target} is not visible", why=hidden, next=_UNHIDE)
        raise TargetError(
            f"there is no process {target}",
            why=_list(instances, processes) or "it has ended, or lives in another pid namespace",
            next="vllmdiag ps",
        )
    raise TargetError(
        f"pid {target} is not part of a vLLM instance",
        why=f"it is: {process.title[:100]}" + (f"\n{listed}" if (listed := _list(instances, processes)) else ""),
        next="vllmdiag ps",
    )


def lines(instances: tuple[Instance, ...], processes: list[Process]) -> tuple[InstanceLine, ...]:
    """One line an instance, to choose from."""
    by_pid = {p.pid: p for p in processes}
    return tuple(_line(instance, by_pid) for instance in instances)


def _line(instance: Instance, by_pid: dict[int, Process]) -> InstanceLine:
    head = instance.members[0]
    options = instance.options
    return InstanceLine(
        pid=head.pid,
        role=head.role,
        port=options.port
        if options is not None and instance.of("APIServer", "Launcher") and not options.headless
        else None,
        members=len([m for m in instance.members if m.role not in ("Helper", "ResourceTracker")]),
        model=options.model if options is not None else None,
        abnormal=tuple(words for m in instance.members if (words := _abnormal(m, by_pid[m.pid]))),
    )


def _abnormal(member: Member, process: Process) -> str:
    words = {"T": "stopped", "t": "traced", "Z": "dead", "D": ""}.get(process.state, "")
    return f"{member.label} {words}" if words else ""


def _list(instances: tuple[Instance, ...], processes: list[Process]) -> str:
    rows = []
    for line in lines(instances, processes):
        port = f" port {line.port}" if line.port else ""
        model = f" {line.model}" if line.model else ""
        odd = f" ({', '.join(line.abnormal)})" if line.abnormal else ""
        rows.append(f"{line.role} {line.pid}{port}{model}, {line.members} processes{odd}")
    return "\n".join(rows)
