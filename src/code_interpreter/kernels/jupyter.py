"""A kernel that speaks the Jupyter protocol."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import zmq.asyncio

from code_interpreter.kernels.connection import Connection
from code_interpreter.kernels.event_queue import EventQueue, nothing
from code_interpreter.kernels.events import Failure, KernelDiedError, KernelError
from code_interpreter.kernels.languages import Language
from code_interpreter.kernels.pending import PendingRun
from code_interpreter.kernels.process import Exit, KernelProcess, explain, memory_of_sandbox
from code_interpreter.kernels.wire import Message, decode

log = logging.getLogger(__name__)

_ASK_AGAIN_SECONDS = 0.1
_LAST_WORDS_SECONDS = 0.05
"""Output of a dead kernel may still be on its way."""


class JupyterKernel:
    """The process of a kernel, its sockets, and the run that is under way."""

    def __init__(
        self,
        sockets: zmq.asyncio.Context,
        name: str,
        language: Language,
        *,
        runtime: Path,
        cwd: Path,
        environment: Mapping[str, str],
        start_seconds: float,
    ) -> None:
        self._sockets = sockets
        self._name = name
        self._language = language
        self._runtime = runtime
        self._cwd = cwd
        self._environment = environment
        self._start_seconds = start_seconds
        self._process: KernelProcess | None = None
        self._connection: Connection | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._run: PendingRun | None = None
        self._answered = asyncio.Event()

    @property
    def end(self) -> Exit | None:
        """How the process ended, or None while it runs."""
        if self._process is None or not self._process.exited.done():
            return None
        return self._process.exited.result()

    async def start(self) -> None:
        """Start the process and return once it answers. `KernelError` if it does not."""
        language = self._language
        self._connection = Connection(
            self._sockets,
            self._runtime,
            self._name,
            by_tcp=language.is_connected_by_tcp,
            loses_output=language.loses_output,
        )
        file = str(self._connection.file)
        try:
            self._process = KernelProcess(
                self._name,
                [part.replace("{connection}", file) for part in language.command],
                runtime=self._runtime,
                cwd=self._cwd,
                environment={**self._environment, **language.environment},
            )
        except (OSError, RuntimeError) as problem:
            await self.stop()
            raise KernelError(f"the {language.name} kernel cannot be started: {problem}") from None
        self._readers = [
            asyncio.create_task(self._read_published(self._connection), name="kernel output"),
            asyncio.create_task(self._read_replies(self._connection), name="kernel replies"),
        ]
        try:
            async with asyncio.timeout(self._start_seconds):
                await self._wait_until_it_answers(self._connection, self._process)
        except TimeoutError:
            await self.stop()
            raise KernelError(
                f"the {language.name} kernel did not answer within {self._start_seconds:.0f} s"
            ) from None
        except BaseException:
            await self.stop()
            raise

    async def _wait_until_it_answers(self, connection: Connection, process: KernelProcess) -> None:
        """Ask until the kernel publishes that it handles the question: then all can be heard."""
        while not self._answered.is_set():
            if process.exited.done():
                why = explain(process.exited.result(), memory_of_sandbox())
                raise KernelError(f"the {self._language.name} kernel did not start: {why}")
            await connection.send("kernel_info_request", {})
            await _first_of(self._answered.wait(), process.exited, seconds=_ASK_AGAIN_SECONDS)

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
        connection, process = self._connection, self._process
        if connection is None or process is None:
            raise KernelError("the kernel was not started")
        # The kernel runs requests in their order, so none has to wait for the one before.
        if before:
            await connection.send("execute_request", _request(before, is_silent=True))
        on_prepared()
        sent = await connection.send("execute_request", _request(code))
        run = self._run = PendingRun(sent, queue)
        if self._language.print_mark:
            mark = self._language.print_mark.format(mark=run.expect_mark())
            run.mark_request = await connection.send(
                "execute_request", _request(mark, is_silent=True)
            )
        # Only the kernel is stopped; servers that the code has started keep answering.
        queue.on_full = lambda: process.signal(signal.SIGSTOP)
        queue.on_low = lambda: process.signal(signal.SIGCONT)
        try:
            await _first_of(run.ended.wait(), process.exited)
            if process.exited.done() and not run.ended.is_set():
                await asyncio.sleep(_LAST_WORDS_SECONDS)
                raise KernelDiedError(explain(process.exited.result(), memory_of_sandbox()))
            if after:
                await connection.send("execute_request", _request(after, is_silent=True))
        finally:
            self._run = None
            queue.on_full = queue.on_low = nothing
            process.signal(signal.SIGCONT)

    async def interrupt(self, *, is_repeated: bool = False) -> None:
        """Interrupt the code that runs; if repeated, also the programs that it has started."""
        if self._process is None or self._connection is None:
            return
        self._process.signal(signal.SIGCONT)
        if self._language.is_interrupted_by_message:
            await self._connection.send_control("interrupt_request")
        else:
            self._process.signal(signal.SIGINT, to_group=is_repeated)

    async def stop(self) -> None:
        """End the process and remove its files."""
        if self._process is not None:
            await self._process.kill()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._readers = []
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _read_published(self, connection: Connection) -> None:
        while True:
            self._handle(await connection.receive(connection.iopub), self._take_published)

    async def _read_replies(self, connection: Connection) -> None:
        while True:
            self._handle(await connection.receive(connection.shell), self._take_reply)

    def _handle(self, frames: Sequence[bytes], take: Callable[[Message], None]) -> None:
        """Handle a message. Code can send any of its own: no reader may end by one."""
        try:
            message = decode(frames)
            if message is not None:
                take(message)
        except Exception as problem:
            log.exception("a message of a kernel cannot be handled")
            if self._run is not None:
                self._run.fail(
                    Failure("MalformedMessage", f"a message cannot be handled: {problem!r}")
                )

    def _take_published(self, message: Message) -> None:
        if message.kind == "status" and message.parent:
            self._answered.set()
        if self._run is not None:
            self._run.take(message)

    def _take_reply(self, message: Message) -> None:
        if message.kind != "execute_reply":
            return
        if self._run is not None and message.parent == self._run.id:
            self._run.take_reply(message)
        elif self._run is not None and message.parent == self._run.mark_request:
            self._run.take_reply_to_mark()
        elif message.content.get("status") == "error":
            log.warning("a kernel could not set variables: %s", message.content.get("evalue"))


def _request(code: str, *, is_silent: bool = False) -> Mapping[str, object]:
    return {
        "code": code,
        "silent": is_silent,
        "store_history": not is_silent,
        "user_expressions": {},
        "allow_stdin": False,
        "stop_on_error": False,
    }


async def _first_of(
    work: Awaitable[object], exited: asyncio.Future[Exit], seconds: float | None = None
) -> None:
    """Wait until the work is done, the process has ended or the time is over."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, exited}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
