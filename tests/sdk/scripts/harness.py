"""Runs checks with the client of this interpreter and prints one JSON line for each.

`@check` marks a check, `@check(newer=True)` one that only the newest client supports. A few checks
run concurrently; each creates its own sandboxes.
"""

import asyncio
import contextlib
import gc
import json
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

CONCURRENCY = 3
CHECKS = []


def check(function=None, *, newer=False):
    def mark(wanted):
        CHECKS.append((wanted, newer))
        return wanted

    return mark(function) if function is not None else mark


def expect(kind, action, *args, **options):
    try:
        action(*args, **options)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def ending(*boxes):
    try:
        yield
    finally:
        for box in boxes:
            box.kill()


def _print(function, started, problem):
    seconds = round(time.monotonic() - started, 2)
    line = {"check": function.__name__, "problem": problem, "seconds": seconds}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _one(function):
    started = time.monotonic()
    problem = None
    try:
        function()
    except BaseException:
        problem = traceback.format_exc()
    _print(function, started, problem)


def _leave():
    """End the process at once.

    The newest client has threads of its own (pyqwest). One that needs the interpreter while it is
    finalized aborts the process: SIGABRT, without a message, after all checks have passed.
    """
    sys.stdout.flush()
    os._exit(0)


def _selected(is_newest):
    """Return the checks that this client supports, or of these the ones on the command line."""
    supported = [function for function, newer in CHECKS if is_newest or not newer]
    return [item for item in supported if not sys.argv[1:] or item.__name__ in sys.argv[1:]]


def main(is_newest):
    # The connection pool of the older client deadlocks when threads share it, or when the garbage
    # collector closes one of its streams while it holds its own lock.
    if not is_newest:
        gc.disable()
    with ThreadPoolExecutor(CONCURRENCY if is_newest else 1) as pool:
        list(pool.map(_one, _selected(is_newest)))
    _leave()


async def main_async(is_newest):
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(function):
        async with gate:
            started = time.monotonic()
            problem = None
            try:
                await asyncio.wait_for(function(), 120)
            except BaseException:
                problem = traceback.format_exc()
            _print(function, started, problem)

    await asyncio.gather(*(one(function) for function in _selected(is_newest)))
    _leave()
