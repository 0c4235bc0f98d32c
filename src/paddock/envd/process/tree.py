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
_LISTINGS = 20


class ProcessIdentity(NamedTuple):
    """One process, told from any other that ever had its pid."""

    pid: int
    started: int


def _read_stat(pid: int) -> tuple[int, int, int, int] | None:
    """Give parent, group, session and start of a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19])


def start_time(pid: int) -> int | None:
    """Give when a process started, in the kernel's ticks; `None` where there is none."""
    found = _read_stat(pid)
    return None if found is None else found[3]


def find_members(leader: int, seen: Collection[ProcessIdentity] = ()) -> set[ProcessIdentity]:
    """Find everything that belongs to a leader now, whether or not it still lives itself.

    What was `seen` before belongs to it too, though it may have strayed since.
    """
    return _find(leader, seen, (), stop=False)


def _find(
    leader: int, seen: Collection[ProcessIdentity], sessions: Collection[int], *, stop: bool
) -> set[ProcessIdentity]:
    """Find the members, with whatever has one of these sessions.

    To `stop` them at sight catches also what is another process every moment: one that is gone
    when its turn comes has forked the next before, which the next listing has.
    """
    children: dict[int, list[int]] = defaultdict(list)
    starts: dict[int, int] = {}
    found: set[int] = set()
    listed: set[int] = set()
    for _ in range(_LISTINGS):
        unread = {int(name) for name in os.listdir("/proc") if name.isdigit()} - listed
        listed |= unread
        if not unread:
            break
        for pid in sorted(unread, reverse=stop):  # the youngest first, which are gone the soonest
            if (looks := _read_stat(pid)) is None:
                continue
            parent, group, session, started = looks
            starts[pid] = started
            children[parent].append(pid)
            known = ProcessIdentity(pid, started)
            if leader in (pid, group, session) or session in sessions or known in seen:
                found.add(pid)
                if stop and known not in seen:
                    _signal(pid, signal.SIGSTOP)
    waiting = list(found)
    while waiting:
        for child in children[waiting.pop()]:
            if child not in found:
                found.add(child)
                waiting.append(child)
    return {ProcessIdentity(pid, starts[pid]) for pid in found}


def kill_all(leader: int, seen: Collection[ProcessIdentity] = ()) -> None:
    """Kill everything that belongs to a leader, and whatever it forks meanwhile.

    Stopped first, until a look finds nobody new: a shell whose child is killed starts the next.
    A fork that has begun comes to its end in spite of that, and only a kill forbids it: so there
    is another look after the kill, and it is over when that finds nobody new.
    """
    held: set[ProcessIdentity] = set()
    killed: set[ProcessIdentity] = set()
    for _ in range(_LOOKS):
        # Whoever lost its parent just now is still in the session that one of these began.
        sessions = {known.pid for known in held}
        new = _find(leader, {*seen, *held}, sessions, stop=True) - held
        if new:
            signal_all(new, signal.SIGSTOP)
            held |= new
        elif held == killed:
            return
        else:
            signal_all(held - killed, signal.SIGKILL)
            killed |= held
    signal_all(held - killed, signal.SIGKILL)


def signal_all(targets: set[ProcessIdentity], number: int) -> None:
    """Signal these very processes; those that are gone are no error."""
    for target in targets:
        if start_time(target.pid) == target.started:
            _signal(target.pid, number)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
