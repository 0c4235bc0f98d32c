"""The entry point of the zygote: `python -m paddock.envd.zygote.start`, options as in `server.py`.

Some modules of the standard library (`threading`, `logging`, `random`, `concurrent.futures`)
register fork handlers that renew locks and drop other threads. The zygote forks with one thread and
without locks held, and envds do not use the generator that `random` shares; yet these handlers
would copy a tenth of an envd's private memory. So they are not registered, which must be arranged
before any of these modules is imported.
"""

import os
import sys
from collections.abc import Callable


def ignore_fork_handlers() -> None:
    """Make `os.register_at_fork` do nothing."""

    def register(
        *,
        before: Callable[[], object] | None = None,
        after_in_parent: Callable[[], object] | None = None,
        after_in_child: Callable[[], object] | None = None,
    ) -> None:
        return

    os.__dict__["register_at_fork"] = register


def main() -> int:
    """Import and run the zygote; report a failure to the parent."""
    ignore_fork_handlers()
    try:
        from paddock.envd.zygote import server

        return server.main()
    except Exception as problem:  # noqa: BLE001 - the root of a process; it ends here
        sys.excepthook(type(problem), problem, problem.__traceback__)
        _report_failure(f"{type(problem).__name__}: {problem}")
        return 1


def _report_failure(why: str) -> None:
    """Send a `broken` message without importing anything: imports may be what fails."""
    plain = "".join(each if each.isprintable() and each not in '"\\' else " " for each in why)
    try:
        fd = int(sys.argv[sys.argv.index("--fd") + 1])
        os.write(fd, f'{{"op":"broken","error":"{plain}"}}'.encode())
    except (ValueError, IndexError, OSError):
        return  # with --socket there is no peer


if __name__ == "__main__":
    raise SystemExit(main())
