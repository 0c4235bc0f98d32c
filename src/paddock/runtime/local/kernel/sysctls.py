"""What all sandboxes of a machine take from one store of the kernel's, made too large to use up.

The kernel counts watches of files for whoever made the user namespace, which is the node: all
sandboxes and the machine's own root share one count, and its default is meant for one desktop.
Asynchronous requests are counted for the whole machine. Whatever count one sandbox can reach
leaves none to the others, so these are raised until memory is the wall, which is counted against
each sandbox's own limit. Process numbers are counted for the machine too, and each sandbox has
a limit of its own.
"""

import logging
from pathlib import Path

from paddock.kit.logs import fields

log = logging.getLogger(__name__)

_LEAST = {
    # A watch takes some ninety bytes of memory: this is as far as the kernel counts.
    "fs/inotify/max_user_instances": (1 << 31) - 1,
    "fs/inotify/max_user_watches": (1 << 31) - 1,
    # A request takes 64 bytes.
    "fs/aio-max-nr": (1 << 63) - 1,
    # The kernel has no more numbers.
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
