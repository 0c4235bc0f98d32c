"""Where the zygote's process begins: `python -m paddock.envd.zygote.start`, options as `zygote`'s.

Modules of Python's own (`threading`, `logging`, `random`, `concurrent.futures`) ask to be called in
every forked child: they make locks anew and learn which threads are left. The zygote forks with one
thread and holds no lock, and envds draw nothing from the generator that `random` shares; yet these
calls would copy a tenth of all memory that an envd has of its own. So they are not registered,
which has to be arranged before any of these modules is imported.
"""

import os
import sys
from collections.abc import Callable


def ignore_fork_handlers() -> None:
    """From now on what modules ask to be called at a fork is not."""

    def register(
        *,
        before: Callable[[], object] | None = None,
        after_in_parent: Callable[[], object] | None = None,
        after_in_child: Callable[[], object] | None = None,
    ) -> None:
        return

    os.__dict__["register_at_fork"] = register


def main() -> int:
    """Import the zygote only now, and run it. What stops that is told to who waits for it."""
    ignore_fork_handlers()
    try:
        from paddock.envd.zygote import server

        return server.main()
    except Exception as problem:  # noqa: BLE001 - the root of a process; it ends here
        sys.excepthook(type(problem), problem, problem.__traceback__)
        _report_failure(f"{type(problem).__name__}: {problem}")
        return 1


def _report_failure(why: str) -> None:
    """Say it as the zygote would have, importing nothing: that may be what fails."""
    plain = "".join(each if each.isprintable() and each not in '"\\' else " " for each in why)
    try:
        fd = int(sys.argv[sys.argv.index("--fd") + 1])
        os.write(fd, f'{{"op":"broken","error":"{plain}"}}'.encode())
    except (ValueError, IndexError, OSError):
        return  # There is nobody to tell where it listens at a path.


if __name__ == "__main__":
    raise SystemExit(main())
