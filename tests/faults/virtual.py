"""An event loop with virtual time: every run from one seed is identical.

Nothing of the machine reaches what runs here: no clock, no other thread, no garbage collector, no
order of addresses or hashes. `replayable` runs a scenario this way and keeps a trace: one line per
event, with its time. Two runs of a seed have the same digest.
"""

import asyncio
import contextlib
import contextvars
import gc
import hashlib
import itertools
import random
import uuid
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from paddock.kit import ids


class Trace:
    """The events, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, *facts: object) -> None:
        now = asyncio.get_running_loop().time()
        self.lines.append(f"{now:.6f} " + " ".join(map(str, facts)))

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:16]

    def write(self, path: Path) -> None:
        path.write_text("\n".join(self.lines) + "\n")


class Process:
    """A process that is stopped and resumed as one, as by SIGSTOP: all that runs in its context.

    Its timers fire late, and all at once; what it was sent meanwhile waits.
    """

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)
        self.is_stopped = False
        self.awake_since = 0.0
        self._due: list[Callable[[], object]] = []

    def stop(self) -> None:
        self.is_stopped = True

    def resume(self) -> None:
        if not self.is_stopped:
            return
        self.is_stopped, self.awake_since = False, asyncio.get_running_loop().time()
        due, self._due = self._due, []
        for step in due:
            step()

    def after_resume(self, step: Callable[[], object]) -> None:
        self._due.append(step)


_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def outside() -> contextvars.Context:
    """Return the context of work that continues while its caller is stopped."""
    context = contextvars.copy_context()
    context.run(_PROCESS.set, None)
    return context


class VirtualLoop(asyncio.SelectorEventLoop):
    """Advances to the next timer at once when nothing is runnable."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        numbers = itertools.count()
        self.set_task_factory(lambda loop, work, **named: _Task(next(numbers), work, loop, **named))
        self._selector.select = self._skip  # pyright: ignore[reportAttributeAccessIssue]

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        context = contextvars.copy_context() if context is None else context
        step = _Step(self, callback, args, context)
        step.handle = super().call_soon(step, context=context)
        return step.handle

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        context = contextvars.copy_context() if context is None else context
        step = _Step(self, callback, args, context)
        step.handle = timer = super().call_at(when, step, context=context)
        return timer

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """Call it at once: the end of a thread would not come at a virtual time."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def _skip(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("everybody waits, and nothing is left that could happen")
        self._now += max(0.0, timeout)
        return []


class _Task(asyncio.Task[Any]):
    """A task with a number: sets of tasks are processed in that order, not by address."""

    def __init__(self, number: int, work: Any, loop: VirtualLoop, **named: Any) -> None:
        self._number = number
        super().__init__(work, loop=loop, **named)

    def __hash__(self) -> int:
        return self._number


class _Step:
    """One due call: made now, or when its process is resumed."""

    def __init__(
        self, loop: VirtualLoop, callback: Any, args: tuple[Any, ...], context: contextvars.Context
    ) -> None:
        self.handle: asyncio.Handle | None = None
        self._loop = loop
        self._callback = callback
        self._args = args
        self._context = context

    def __call__(self) -> None:
        process = _PROCESS.get()
        if process is not None and process.is_stopped:
            process.after_resume(self._again)
            return
        # The garbage collector is off, and each of these is a reference cycle.
        handle, self.handle = self.handle, None
        if handle is None or not handle.cancelled():
            self._callback(*self._args)

    def _again(self) -> None:
        # Not by our `call_soon`: the caller can cancel the first handle only.
        asyncio.BaseEventLoop.call_soon(self._loop, self, context=self._context)


class _Drawn:
    """The random source of `kit.ids`, from a seed: ids are the same in every replay."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def choice(self, letters: str) -> str:
        return self._dice.choice(letters)

    def token_bytes(self, size: int = 32) -> bytes:
        return self._dice.randbytes(size)

    def token_hex(self, size: int = 32) -> str:
        return self._dice.randbytes(size).hex()

    def uuid4(self) -> uuid.UUID:
        return uuid.UUID(bytes=self._dice.randbytes(16), version=4)


@contextlib.contextmanager
def _one_order(seed: int) -> Generator[None]:
    """Seed all randomness, and disable the garbage collector."""
    drawn, before = _Drawn(seed), random.getstate()
    gc.collect()
    gc.disable()
    random.seed(seed)  # Jitter of backoffs uses the global generator.
    try:
        with patch.object(ids, "secrets", drawn), patch.object(ids, "uuid", drawn):
            yield
    finally:
        random.setstate(before)
        gc.enable()


def replayable(
    seed: int,
    scenario: Callable[[int, Trace], Coroutine[Any, Any, None]],
    trace: Trace | None = None,
) -> Trace:
    """Run a scenario from a seed; no task may be left when it ends."""
    trace = Trace() if trace is None else trace

    async def run() -> None:
        try:
            await scenario(seed, trace)
        except BaseException as error:
            error.add_note(f"seed {seed} replays this: {len(trace.lines)} steps, {trace.digest}")
            raise
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {sorted(map(repr, left))}"

    with _one_order(seed), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
    return trace
