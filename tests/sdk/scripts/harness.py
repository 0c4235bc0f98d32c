"""Runs checks with a client of its own interpreter and prints one JSON line for each.

`@check` marks a check; `@check(newer=True)` one that only the newest client can do. Checks run a
few at a time: each makes the sandboxes that it needs.
"""

import asyncio
import contextlib
import gc
import json
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

AT_ONCE = 3
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
        assert time.monotonic() < deadline, "it did not become so"
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def ending(*boxes):
    try:
        yield
    finally:
        for box in boxes:
            box.kill()


def _tell(function, started, problem):
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
    _tell(function, started, problem)


def _chosen(is_newest):
    """The checks that this client can do; those named on the command line alone, if any are."""
    able = [function for function, newer in CHECKS if is_newest or not newer]
    return [item for item in able if not sys.argv[1:] or item.__name__ in sys.argv[1:]]


def main(is_newest):
    # The older client's connection pool locks itself up when threads share it, or when the
    # collector closes one of its streams while it holds its own lock.
    if not is_newest:
        gc.disable()
    with ThreadPoolExecutor(AT_ONCE if is_newest else 1) as pool:
        list(pool.map(_one, _chosen(is_newest)))


async def main_async(is_newest):
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(function):
        async with gate:
            started = time.monotonic()
            problem = None
            try:
                await asyncio.wait_for(function(), 120)
            except BaseException:
                problem = traceback.format_exc()
            _tell(function, started, problem)

    await asyncio.gather(*(one(function) for function in _chosen(is_newest)))
