"""A signal ends a command as Ctrl-C does: what it has begun is ended."""

import os
import signal
from collections.abc import Iterator

import pytest

from paddock.cli.termination import exit_on_signals

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def handlers() -> Iterator[dict[signal.Signals, signal.Handlers]]:
    """The default handlers, also if the tests were started by `nohup`."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield dict.fromkeys(SIGNALS, signal.SIG_DFL)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_and_a_second_one_does_not_disturb_the_cleanup(
    number: signal.Signals, handlers: dict[signal.Signals, signal.Handlers]
) -> None:
    before, cleaned = handlers[number], []

    def work() -> None:
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            cleaned.append(True)

    with pytest.raises(SystemExit) as raised, exit_on_signals():
        work()
    assert raised.value.code == 128 + number
    assert cleaned == [True]
    assert signal.getsignal(number) is before


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with exit_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
