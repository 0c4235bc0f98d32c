"""A reserve of processes in each sandbox for commands from outside.

The pids limit of the cgroup stops a fork bomb, but then no command to kill the bomb can start
either. So programs inside get a soft `RLIMIT_NPROC` a little below it (the kernel counts it per
user and user namespace); init exempts commands from outside. It is no security boundary: a program
may raise its soft limit, up to the limit of the cgroup.
"""

import resource

_SHARE = 8
_MOST = 32


def reserve_size(pids: int) -> int:
    """Return the number of processes reserved of a pids limit."""
    return min(_MOST, pids // _SHARE)


def apply(pid: int, pids: int | None) -> None:
    """Set the soft limit of a sandbox's init; without a pids limit nothing is reserved."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_NPROC)
    soft = pids - reserve_size(pids) if pids else hard
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.prlimit(pid, resource.RLIMIT_NPROC, (soft, hard))
