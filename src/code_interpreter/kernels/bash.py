"""One persistent bash. It reads a line for each run; a second line reports the status.

The shell is interactive, although it has no terminal: only then an interrupt abandons the code and
keeps the shell. It reads commands from a pipe, and the code reads from /dev/null.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from code_interpreter.kernels.event_queue import EventQueue, nothing
from code_interpreter.kernels.events import Accepted, Failure, KernelDiedError, KernelError
from code_interpreter.kernels.languages import Language
from code_interpreter.kernels.pipes import OutputPipe, StatusPipe
from code_interpreter.kernels.process import Exit, KernelProcess, explain, memory_of_sandbox

_SETTINGS = (
    "PS1= PS2= PROMPT_COMMAND=; unset HISTFILE TMOUT; set +o history +H +m; shopt -s expand_aliases"
)
_ESCAPES = {ord("\\"): "\\\\", ord("'"): "\\'", ord("\n"): "\\n", ord("\r"): "\\r"}


def quoted(code: str) -> str:
    """Return a word of bash on one line that stands for the code."""
    return f"$'{code.translate(_ESCAPES)}'"


def command_lines(code: str, status: int) -> str:
    """Return what the shell reads to run code and write its status to a descriptor.

    An interrupt abandons the first line only. The code may have set a prompt, which would appear
    among the errors of the next run. The descriptor stays open for the code: closed by a
    redirection, it would stay closed after a syntax error, after which bash also knows no `{`.
    """
    return (
        f"eval {quoted(code)} </dev/null\n"
        f"builtin printf '%s\\0' \"$?\" >&{status}; PS1= PS2= PROMPT_COMMAND=\n"
    )


class BashKernel:
    """The process of a shell, and its pipes."""

    def __init__(
        self,
        name: str,
        language: Language,
        *,
        runtime: Path,
        cwd: Path,
        environment: Mapping[str, str],
        start_seconds: float,
    ) -> None:
        self._name = name
        self._language = language
        self._runtime = runtime
        self._cwd = cwd
        self._environment = environment
        self._start_seconds = start_seconds
        self._process: KernelProcess | None = None
        self._stdin = -1
        self._outputs: list[OutputPipe] = []
        self._status = StatusPipe()
        self._status_fd = -1
        """The number in the shell; the server has closed it."""
        self._count = 0

    @property
    def end(self) -> Exit | None:
        """How the process ended, or None while it runs."""
        if self._process is None or not self._process.exited.done():
            return None
        return self._process.exited.result()

    async def start(self) -> None:
        """Start the shell and return once it has read its profile."""
        stdin, self._stdin = os.pipe()
        os.set_blocking(self._stdin, False)
        self._status_fd = self._status.writer
        self._outputs = [OutputPipe("stdout"), OutputPipe("stderr")]
        out, err = self._outputs
        try:
            self._process = KernelProcess(
                self._name,
                [self._language.command[0], "--noediting", "-l", "-i"],
                runtime=self._runtime,
                cwd=self._cwd,
                environment={"TERM": "dumb", **self._environment},
                stdin=stdin,
                stdout=out.writer,
                stderr=err.writer,
                pass_fds=(self._status_fd,),
            )
        except (OSError, RuntimeError) as problem:
            await self.stop()
            raise KernelError(f"bash cannot be started: {problem}") from None
        finally:
            os.close(stdin)
            for pipe in (*self._outputs, self._status):
                pipe.start()
        try:
            async with asyncio.timeout(self._start_seconds):
                await self._run_silently(f"{_SETTINGS}; cd -- {quoted(str(self._cwd))}")
        except (TimeoutError, KernelDiedError) as problem:
            await self.stop()
            why = str(problem) or f"no answer within {self._start_seconds:.0f} s"
            raise KernelError(f"bash did not start: {why}") from None
        except BaseException:
            await self.stop()
            raise

    async def execute(
        self,
        code: str,
        queue: EventQueue,
        *,
        before: str = "",
        after: str = "",
        on_prepared: Callable[[], None] = nothing,
    ) -> None:
        """Run code and put its events into the queue."""
        if "\0" in code:
            queue.put(Failure("InvalidCode", "code of bash cannot contain NUL characters"))
            return
        if before:
            await self._run_silently(before)
        on_prepared()
        self._count += 1
        queue.put(Accepted(self._count))
        queue.on_full = self._pause
        queue.on_low = self._resume
        for pipe in self._outputs:
            pipe.queue = queue
        try:
            status = await self._run(code)
        finally:
            for pipe in self._outputs:
                pipe.finish()
            self._resume()
            queue.on_full = queue.on_low = nothing
        if status != "0":
            queue.put(Failure("ExitStatus", status))
        if after:
            await self._run_silently(after)

    async def interrupt(self, *, is_repeated: bool = False) -> None:
        """Interrupt the shell and the programs that it waits for."""
        if self._process is not None:
            self._process.signal(signal.SIGINT, to_group=True)

    async def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            await self._process.kill()
        for pipe in (*self._outputs, self._status):
            pipe.close()
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    async def _run_silently(self, code: str) -> None:
        await self._run(code)

    async def _run(self, code: str) -> str:
        """Run code; return its status. `KernelDiedError` if the shell ends without one."""
        if self._process is None:
            raise KernelError("the kernel was not started")
        exited = self._process.exited
        writing = asyncio.create_task(
            self._write(command_lines(code, self._status_fd).encode()), name="bash stdin"
        )
        status = asyncio.create_task(self._status.read(), name="bash status")
        try:
            await asyncio.wait({status, exited}, return_when=asyncio.FIRST_COMPLETED)
            if status.done():
                return status.result()
            end = exited.result()
            if end.status < 0:
                raise KernelDiedError(explain(end, memory_of_sandbox()))
            return str(end.status)  # the code has called `exit`
        finally:
            writing.cancel()
            status.cancel()

    async def _write(self, data: bytes) -> None:
        """Write to the shell, which reads as fast as it parses."""
        loop = asyncio.get_running_loop()
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                ready: asyncio.Future[None] = loop.create_future()
                loop.add_writer(self._stdin, _set, ready)
                try:
                    await ready
                finally:
                    loop.remove_writer(self._stdin)
            except BrokenPipeError:  # the shell has ended
                return

    def _pause(self) -> None:
        for pipe in self._outputs:
            pipe.pause()

    def _resume(self) -> None:
        for pipe in self._outputs:
            pipe.resume()


def _set(ready: asyncio.Future[None]) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):
        ready.set_result(None)
