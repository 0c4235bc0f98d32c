"""The last processes that a sandbox may have, kept from its own programs.

A group's limit stops a fork bomb, but then nothing more can be started, nor what would end the
bomb. So programs inside have a soft limit of their own a little below (`RLIMIT_NPROC`, which the
kernel counts for each user of each user namespace); init lets commands from outside pass over it.
It is no wall: a program may raise its soft limit, up to that of the group.
"""

import resource

_SHARE = 8
_MOST = 32


def reserve(pids: int) -> int:
    """Say how many of a limit's processes are kept."""
    return min(_MOST, pids // _SHARE)


def keep(pid: int, pids: int | None) -> None:
    """Keep the reserve from what a sandbox's init will start; without a limit there is none."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_NPROC)
    soft = pids - reserve(pids) if pids else hard
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.prlimit(pid, resource.RLIMIT_NPROC, (soft, hard))
