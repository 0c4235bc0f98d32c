"""Raises kernel limits that all sandboxes of a machine share.

The kernel counts inotify watches for the creator of the user namespace, which is the node: all
sandboxes and the machine's root share one count, with a default for one desktop. Open files and
pids are counted for the whole machine. One sandbox could exhaust these for all others, so they are
raised until a sandbox reaches its own memory or pids limit first. Compiled seccomp filters have one
pool, which is enlarged; `uncharged.py` bounds what sandboxes take of it.
"""

import logging
from pathlib import Path

from paddock.kit.logs import fields

log = logging.getLogger(__name__)

_MINIMUMS = {
    # A watch takes about ninety bytes of memory. This is the kernel's maximum.
    "fs/inotify/max_user_instances": (1 << 31) - 1,
    "fs/inotify/max_user_watches": (1 << 31) - 1,
    # An open file takes about 250 bytes, which are charged to the sandbox.
    "fs/file-max": (1 << 63) - 1,
    # The kernel's maximum.
    "kernel/pid_max": 1 << 22,
    # The maximum of x86-64, twice the default.
    "net/core/bpf_jit_limit": (1 << 30) - (16 << 20),
}


def raise_limits(settings: Path = Path("/proc/sys")) -> dict[str, int]:
    """Raise lower limits, never lower any; return the new values."""
    raised: dict[str, int] = {}
    for name, least in _MINIMUMS.items():
        path = settings / name
        try:
            if int(path.read_text()) >= least:
                continue
            path.write_text(f"{least}\n")
        except (OSError, ValueError) as problem:
            # They may be read-only in a container: sandboxes then share the existing limits.
            log.warning("kernel limit not raised", extra=fields(setting=name, reason=problem))
            continue
        raised[name] = least
    if raised:
        log.info("kernel limits raised", extra=fields(settings=", ".join(raised)))
    return raised
