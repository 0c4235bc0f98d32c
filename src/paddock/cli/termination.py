"""Signals that end a command: they let it end what it has begun, as Ctrl-C does."""

import signal
from collections.abc import Generator
from contextlib import contextmanager

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def exit_on_signals() -> Generator[None]:
    """Raise `SystemExit` on SIGTERM and SIGHUP. Further ones do not disturb what follows.

    A signal that was ignored before (`nohup`) stays so.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    caught = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def end(number: int, _frame: object) -> None:
        for one in caught:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in caught:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])
