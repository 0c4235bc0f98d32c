"""Finding the processes of a command: its session, its group, and all their descendants.

Read from /proc, so that a process that left the group or the session is found as long as its
parents exist. A process is identified by pid and start time, never by pid alone.
"""

import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

_MAX_ROUNDS = 50
"""Processes that fork faster than /proc is read are killed as far as they are found."""
_MAX_LISTINGS = 20


class ProcessIdentity(NamedTuple):
    """A process, distinct from others that had the same pid."""

    pid: int
    started: int


def _read_stat(pid: int) -> tuple[int, int, int, int] | None:
    """Return parent, group, session and start time of a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19])


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks, or `None` if there is none."""
    found = _read_stat(pid)
    return None if found is None else found[3]


def find_members(leader: int, seen: Collection[ProcessIdentity] = ()) -> set[ProcessIdentity]:
    """Return all processes that belong to a leader, which may have ended itself.

    Processes `seen` before belong to it too, even if they have left its session.
    """
    return _find(leader, seen, (), stop=False)


def _find(
    leader: int, seen: Collection[ProcessIdentity], sessions: Collection[int], *, stop: bool
) -> set[ProcessIdentity]:
    """Return the members of a leader, and all processes of these sessions.

    `stop` stops each process as soon as it is found. That catches a chain of forks too: a process
    that ended before it was read has forked the next one, which is in the next listing.
    """
    children: dict[int, list[int]] = defaultdict(list)
    starts: dict[int, int] = {}
    found: set[int] = set()
    listed: set[int] = set()
    for _ in range(_MAX_LISTINGS):
        unread = {int(name) for name in os.listdir("/proc") if name.isdigit()} - listed
        listed |= unread
        if not unread:
            break
        for pid in sorted(unread, reverse=stop):  # youngest first: they end soonest
            if (found_stat := _read_stat(pid)) is None:
                continue
            parent, group, session, started = found_stat
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
    """Kill all processes that belong to a leader, and those that they fork meanwhile.

    They are stopped first, until no new one is found: a shell whose child is killed would start
    the next. A fork that has begun completes even in a stopped process, so /proc is read again
    after the kill, until no new process is found.
    """
    stopped: set[ProcessIdentity] = set()
    killed: set[ProcessIdentity] = set()
    for _ in range(_MAX_ROUNDS):
        # A process that has just lost its parent is still in the session of one of these.
        sessions = {known.pid for known in stopped}
        new = _find(leader, {*seen, *stopped}, sessions, stop=True) - stopped
        if new:
            signal_all(new, signal.SIGSTOP)
            stopped |= new
        elif stopped == killed:
            return
        else:
            signal_all(stopped - killed, signal.SIGKILL)
            killed |= stopped
    signal_all(stopped - killed, signal.SIGKILL)


def signal_all(targets: set[ProcessIdentity], number: int) -> None:
    """Signal exactly these processes; those that have ended are no error."""
    for target in targets:
        if start_time(target.pid) == target.started:
            _signal(target.pid, number)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
