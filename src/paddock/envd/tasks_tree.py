"""Which processes belong to a command: its session, its group, and all their descendants.

Read from /proc, so that a process that left the group or the session is still found as long as
its parents are there. A process is known by its pid and its start, never by its pid alone.
"""

import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

_LOOKS = 50
"""A swarm that forks faster than we look is killed as far as it is known."""


class Known(NamedTuple):
    """One process, told from any other that ever had its pid."""

    pid: int
    started: int


def _look(pid: int) -> tuple[int, int, int, int] | None:
    """Give parent, group, session and start of a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19])


def start_of(pid: int) -> int | None:
    """Give when a process started, in the kernel's ticks; `None` where there is none."""
    found = _look(pid)
    return None if found is None else found[3]


def members(leader: int, seen: Collection[Known] = ()) -> set[Known]:
    """Find everything that belongs to a leader now, whether or not it still lives itself.

    What was `seen` before belongs to it too, though it may have strayed since.
    """
    children: dict[int, list[int]] = defaultdict(list)
    starts: dict[int, int] = {}
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit() or (looks := _look(int(name))) is None:
            continue
        pid = int(name)
        parent, group, session, started = looks
        starts[pid] = started
        children[parent].append(pid)
        if leader in (pid, group, session) or Known(pid, started) in seen:
            found.add(pid)
    waiting = list(found)
    while waiting:
        for child in children[waiting.pop()]:
            if child not in found:
                found.add(child)
                waiting.append(child)
    return {Known(pid, starts[pid]) for pid in found}


def kill_all(leader: int, seen: Collection[Known] = ()) -> None:
    """Kill everything that belongs to a leader, and whatever it forks meanwhile.

    Stopped first, until a look finds nobody new: a shell whose child is killed starts the next.
    """
    held: set[Known] = set()
    for _ in range(_LOOKS):
        new = members(leader, {*seen, *held}) - held
        if not new:
            break
        signal_all(new, signal.SIGSTOP)
        held |= new
    signal_all(held, signal.SIGKILL)


def signal_all(targets: set[Known], number: int) -> None:
    """Signal these very processes; those that are gone are no error."""
    for target in targets:
        if start_of(target.pid) == target.started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(target.pid, number)
