"""What all sandboxes of a machine take from one store of the kernel's, made large enough for all.

The kernel counts watches of files for whoever made the user namespace, which is the node: all
sandboxes and the machine's own root share one count, and its default is meant for one desktop. One
sandbox could leave none to the others. Asynchronous requests and process numbers are counted for
the whole machine. What each of them takes in memory is counted against the sandbox's own limit,
and processes are limited as such: these counts need not be the wall.
"""

import logging
from pathlib import Path

from paddock.kit.logs import fields

log = logging.getLogger(__name__)

_LEAST = {
    "fs/inotify/max_user_instances": 1 << 20,
    "fs/inotify/max_user_watches": 1 << 22,
    "fs/aio-max-nr": 1 << 24,
    "kernel/pid_max": 1 << 22,
}


def widen(settings: Path = Path("/proc/sys")) -> dict[str, int]:
    """Raise what is lower, never lowering anything; gives what was changed."""
    raised: dict[str, int] = {}
    for name, least in _LEAST.items():
        path = settings / name
        try:
            if int(path.read_text()) >= least:
                continue
            path.write_text(f"{least}\n")
        except (OSError, ValueError) as problem:
            # In a container they may be closed: sandboxes then share what there is.
            log.warning("kernel limit not raised", extra=fields(setting=name, reason=problem))
            continue
        raised[name] = least
    if raised:
        log.info("kernel limits raised", extra=fields(settings=", ".join(raised)))
    return raised
