"""A context: one kernel with a working directory and variables, which runs one code at a time.

The kernel starts with the first run. One that has ended is replaced, and so is one that does not
obey an interrupt; the next run says that its variables are gone.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from code_interpreter.kernels.event_queue import EventQueue
from code_interpreter.kernels.events import Ended, Failure, KernelDiedError, KernelError, Output
from code_interpreter.kernels.kernel import Kernel
from code_interpreter.kernels.kernel_state import KernelState
from code_interpreter.kernels.languages import Language
from code_interpreter.kernels.process import explain, memory_of_sandbox
from code_interpreter.kernels.run import Run, RunRequest

log = logging.getLogger(__name__)

DETACHED_SECONDS = 60.0
"""A run without a caller may keep others waiting for so long."""
_REPEAT_SECONDS = 1.0
"""An interrupt that has had no effect so long is repeated."""
_RESTARTED = Failure("ContextRestarting", "the context was restarted while the code ran")
_REMOVED = Failure("ContextRemoved", "the context was removed while the code ran")


class Context:
    """Runs code of one language and keeps its state."""

    def __init__(
        self,
        context_id: str,
        language: Language,
        cwd: str,
        *,
        new_kernel: Callable[[], Kernel],
        initial: Mapping[str, str],
        max_output_bytes: int,
        interrupt_seconds: float,
        detached_seconds: float = DETACHED_SECONDS,
    ) -> None:
        self.id = context_id
        self.language = language
        self.cwd = cwd
        self._new_kernel = new_kernel
        self._initial = initial
        self._max_output_bytes = max_output_bytes
        self._interrupt_seconds = interrupt_seconds
        self._detached_seconds = detached_seconds
        self._kernel: Kernel | None = None
        self._starting = asyncio.Lock()
        self._turn = asyncio.Lock()
        self._current: Run | None = None
        self._reason: Failure | None = None
        """Why the kernel is ended during a run; None: by itself."""
        self._note = ""
        """What the next run has to say about the end of an earlier kernel."""
        self._state = KernelState(language, initial)
        """Of the present kernel."""
        self._waiting = 0
        """Runs that wait for their turn."""
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_started(self) -> bool:
        """Whether the kernel runs."""
        return self._kernel is not None and self._kernel.end is None

    async def start(self) -> Kernel:
        """Return the kernel; start it if there is none. `KernelError` if it cannot start."""
        async with self._starting:
            if self._is_closed:
                # Nobody would end the kernel.
                raise KernelError(_REMOVED.value)
            if self._kernel is not None and self._kernel.end is not None:
                await self._discard_ended(self._kernel)
            if self._kernel is None:
                self.language.require_installed()
                kernel = self._new_kernel()
                await kernel.start()
                self._kernel = kernel
                self._state = KernelState(self.language, self._initial)
            return self._kernel

    def run(self, request: RunRequest) -> Run:
        """Begin a run; it waits for those before it."""
        run = Run(EventQueue(self._max_output_bytes))
        run.task = self._spawn(self._perform(run, request), "run")
        run.task.add_done_callback(lambda task: _end_events(run, task))
        return run

    async def _perform(self, run: Run, request: RunRequest) -> None:
        self._waiting += 1
        self._limit_detached()
        try:
            try:
                await self._turn.acquire()
            finally:
                self._waiting -= 1
            try:
                if self._is_closed:
                    run.queue.put(_REMOVED)
                elif not run.is_abandoned:
                    await self._execute(run, request)
            finally:
                self._turn.release()
        except KernelError as problem:
            run.queue.put(Failure("KernelError", str(problem)))

    async def _execute(self, run: Run, request: RunRequest) -> None:
        queue = run.queue
        kernel = await self.start()
        state = self._state
        prepared = await state.prepare(request)
        while self._kernel is not kernel:
            # The context was restarted meanwhile.
            kernel = await self.start()
            state = self._state
            prepared = await state.prepare(request)
        if run.is_abandoned:
            return
        if self._note:
            queue.put(Output("stderr", self._note + "\n"))
            self._note = ""
        queue.on_limit = lambda: self._begin_interrupt(run)
        self._current, self._reason = run, None
        self._limit_detached()
        try:
            await kernel.execute(
                request.code,
                queue,
                before=prepared.before,
                after=prepared.after,
                on_prepared=lambda: state.keep(prepared),
            )
        except KernelDiedError as problem:
            queue.put(self._reason or Failure("KernelDied", str(problem)))
        finally:
            self._current = None
        if queue.is_over_limit:
            queue.put(_over_limit(self._max_output_bytes))
        if kernel.end is not None:
            # This run has reported it; the next one need not.
            await self._forget(kernel)
            self._spawn(self._start_again(), "start")

    def abandon(self, run: Run) -> None:
        """Drop the events of a run and interrupt it: its caller is gone."""
        run.is_abandoned = True
        run.queue.discard()
        self._begin_interrupt(run)

    def detach(self, run: Run) -> None:
        """Drop the events of a run that goes on without its caller.

        It is interrupted if it keeps other runs waiting for long.
        """
        run.is_detached = True
        run.queue.discard()
        self._limit_detached()

    def _limit_detached(self) -> None:
        run = self._current
        if run is not None and run.is_detached and self._waiting and not run.is_limited:
            run.is_limited = True
            self._spawn(self._interrupt_later(run), "limit")

    async def _interrupt_later(self, run: Run) -> None:
        if run.task is not None:
            await asyncio.wait({run.task}, timeout=self._detached_seconds)
        run.is_limited = False
        if self._waiting:
            self._begin_interrupt(run)

    def _begin_interrupt(self, run: Run) -> None:
        if run is self._current:
            self._spawn(self._interrupt(run), "interrupt")

    async def _interrupt(self, run: Run) -> None:
        """Interrupt a run; replace the kernel if it goes on."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._interrupt_seconds
        is_repeated = False
        while run is self._current and loop.time() < deadline:
            kernel = self._kernel
            if kernel is None:
                return
            await kernel.interrupt(is_repeated=is_repeated)
            is_repeated = True
            if run.task is not None:
                await asyncio.wait({run.task}, timeout=_REPEAT_SECONDS)
        if run is self._current and self._kernel is not None:
            seconds = f"{self._interrupt_seconds:.0f} s"
            self._reason = Failure(
                "KernelDied", f"the kernel was ended: it ran on for {seconds} after an interrupt"
            )
            self._note = f"the kernel was replaced because it did not stop within {seconds}"
            await self._kernel.stop()

    async def restart(self) -> None:
        """End the kernel, with the run that is under way, and start another."""
        self._reason = _RESTARTED
        async with self._starting:
            await self._end()
        self._note = ""
        await self.start()

    async def close(self) -> None:
        """End the kernel and all runs."""
        self._is_closed = True
        self._reason = _REMOVED
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        async with self._starting:
            await self._end()

    async def _end(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            await kernel.stop()

    async def _discard_ended(self, kernel: Kernel) -> None:
        """Remove a kernel that ended while no code ran, and note it for the next run."""
        if kernel.end is not None and not self._note:
            why = explain(kernel.end, memory_of_sandbox())
            self._note = f"{why} and was started again: its variables are gone"
        await self._forget(kernel)

    async def _forget(self, kernel: Kernel) -> None:
        await kernel.stop()
        if self._kernel is kernel:
            self._kernel = None

    async def _start_again(self) -> None:
        try:
            await self.start()
        except KernelError as problem:
            # The next run tries again and reports it.
            log.warning("a kernel could not be started again: %s", problem)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"{name} of {self.id}")
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_name(), exc_info=task.exception())


def _end_events(run: Run, task: asyncio.Task[None]) -> None:
    """Complete the events of a run, however it ended."""
    if task.cancelled():
        run.queue.put(_REMOVED)
    elif (problem := task.exception()) is not None:
        run.queue.put(Failure("InternalError", f"the code interpreter failed: {problem!r}"))
    run.queue.put(Ended())


def _over_limit(limit: int) -> Failure:
    return Failure(
        "OutputLimitExceeded", f"the code was interrupted after {limit >> 20} MiB of output"
    )
