"""The RPC service `process.Process`, on top of the process registry.

Decides deadlines, users, environment and error codes. Pipes and exits are in `process/process.py`,
forking is in `process/spawner.py`.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping

from paddock.envd.process.events import Subscription
from paddock.envd.process.process import ManagedProcess, StdinError
from paddock.envd.process.registry import ProcessRegistry
from paddock.envd.process.spawner import Command, SandboxGoneError, SpawnError
from paddock.envd.rpc import messages as m
from paddock.envd.rpc.connect import ClientStream, Method, RpcCall, ServerStream, Stream, Unary
from paddock.envd.rpc.connect_frames import Code, ConnectError, printable
from paddock.envd.sandbox_context import SandboxContext

_SIGNALS = {m.Signal.TERM: signal.SIGTERM, m.Signal.KILL: signal.SIGKILL}
_DEFAULT_SIZE = (80, 24)


class ProcessService:
    """The RPC methods for processes."""

    def __init__(self, registry: ProcessRegistry, context: SandboxContext) -> None:
        self._registry = registry
        self._context = context

    def methods(self) -> Mapping[str, Method]:
        """Return the methods by path."""
        prefix = "/process.Process/"
        return {
            prefix + "List": Unary(m.Empty, self.list),
            prefix + "Start": ServerStream(m.StartRequest, self.start),
            prefix + "Connect": ServerStream(m.SelectRequest, self.connect),
            prefix + "Update": Unary(m.UpdateRequest, self.update),
            prefix + "SendInput": Unary(m.SendInputRequest, self.send_input),
            prefix + "StreamInput": ClientStream(m.StreamInputRequest, self.stream_input),
            prefix + "SendSignal": Unary(m.SendSignalRequest, self.send_signal),
            prefix + "CloseStdin": Unary(m.SelectRequest, self.close_stdin),
        }

    async def list(self, call: RpcCall, request: m.Empty) -> m.ListResponse:
        found = [
            m.ProcessInfo(config=p.config, pid=p.pid, tag=p.tag) for p in self._registry.running()
        ]
        return m.ListResponse(processes=tuple(found))

    async def start(self, call: RpcCall, request: m.StartRequest, stream: Stream) -> None:
        """Run a command and stream its events until it ends."""
        command, config = self._command(call, request)
        try:
            process, subscription = await self._registry.start(
                command, config, request.tag, timeout=call.timeout
            )
        except SpawnError as error:
            code = Code.RESOURCE_EXHAUSTED if error.is_resource_exhausted else Code.INVALID_ARGUMENT
            raise ConnectError(code, printable(str(error))) from error
        except SandboxGoneError as error:
            raise ConnectError(Code.UNAVAILABLE, f"the sandbox has ended: {error}") from error
        await self._follow(call, process, subscription, stream, is_starter=True)
        if process.is_timed_out:
            raise ConnectError(
                Code.DEADLINE_EXCEEDED,
                f"the command was killed: it ran longer than the {call.timeout:g} s it was given",
            )

    async def connect(self, call: RpcCall, request: m.SelectRequest, stream: Stream) -> None:
        """Stream the events of a process; the deadline ends the stream, not the process."""
        process = self._find(request.process, with_ended=True)
        subscription = process.subscribe()
        await self._follow(call, process, subscription, stream, limit=call.timeout)

    async def _follow(
        self,
        call: RpcCall,
        process: ManagedProcess,
        subscription: Subscription,
        stream: Stream,
        *,
        limit: float | None = None,
        is_starter: bool = False,
    ) -> None:
        timeout = call.keepalive_seconds
        try:
            async with asyncio.timeout(limit):
                start = m.ProcessEvent(start=m.StartEvent(pid=process.pid))
                await stream.send(m.ProcessEventResponse(event=start))
                while True:
                    events = await subscription.take(timeout)
                    if is_starter and process.is_timed_out:
                        # The caller ends the stream with the deadline error, not the end event.
                        # Clients that used Connect set no deadline: they see a kill.
                        if data := [event for event in events if event.end is None]:
                            await _send(stream, data)
                        if process.end is not None:
                            return
                        continue
                    await _send(stream, events)
                    if events and events[-1].end is not None:
                        return
        finally:
            process.unsubscribe(subscription)

    async def update(self, call: RpcCall, request: m.UpdateRequest) -> m.Empty:
        process = self._find(request.process)
        if request.pty is None or request.pty.size is None:
            return m.Empty()
        try:
            process.resize(request.pty.size.cols, request.pty.size.rows)
        except (StdinError, OSError) as error:
            raise ConnectError(Code.INTERNAL, f"cannot resize: {error}") from error
        return m.Empty()

    async def send_input(self, call: RpcCall, request: m.SendInputRequest) -> m.Empty:
        await self._write(self._find(request.process), request.input)
        return m.Empty()

    async def stream_input(
        self, call: RpcCall, messages: AsyncIterator[m.StreamInputRequest]
    ) -> m.Empty:
        """Write a stream of input to a process, in order."""
        process: ManagedProcess | None = None
        async for message in messages:
            if message.start is not None:
                process = self._find(message.start.process)
            elif message.data is not None:
                if process is None:
                    raise ConnectError(
                        Code.INVALID_ARGUMENT, "the first message must select a process"
                    )
                await self._write(process, message.data.input)
        return m.Empty()

    async def send_signal(self, call: RpcCall, request: m.SendSignalRequest) -> m.Empty:
        process = self._find(request.process)
        number = _SIGNALS.get(request.signal)
        if number is None:
            raise ConnectError(
                Code.UNIMPLEMENTED, "only SIGNAL_SIGTERM and SIGNAL_SIGKILL can be sent"
            )
        try:
            await process.signal(number)
        except (OSError, SandboxGoneError) as error:
            raise ConnectError(Code.INTERNAL, f"cannot signal: {error}") from error
        return m.Empty()

    async def close_stdin(self, call: RpcCall, request: m.SelectRequest) -> m.Empty:
        process = self._find(request.process)
        try:
            await process.close_input()
        except StdinError as error:
            raise ConnectError(Code.INTERNAL, str(error)) from error
        return m.Empty()

    def _find(
        self, selector: m.ProcessSelector | None, *, with_ended: bool = False
    ) -> ManagedProcess:
        if selector is None or (selector.pid is None and selector.tag is None):
            raise ConnectError(Code.INVALID_ARGUMENT, "no process selected: set pid or tag")
        process = self._registry.find(pid=selector.pid, tag=selector.tag, with_ended=with_ended)
        if process is None:
            what = f"pid {selector.pid}" if selector.pid is not None else f"tag {selector.tag!r}"
            raise ConnectError(Code.NOT_FOUND, f"process with {what} not found")
        return process

    async def _write(self, process: ManagedProcess, piece: m.ProcessInput | None) -> None:
        if piece is None or (piece.stdin is None and piece.pty is None):
            raise ConnectError(Code.INVALID_ARGUMENT, "the input is neither stdin nor pty")
        try:
            if piece.pty is not None:
                await process.write(piece.pty, to_pty=True)
            elif piece.stdin is not None:
                await process.write(piece.stdin, to_pty=False)
        except StdinError as error:
            raise ConnectError(Code.INTERNAL, str(error)) from error

    def _command(self, call: RpcCall, request: m.StartRequest) -> tuple[Command, m.ProcessConfig]:
        config = request.process
        if config is None or not config.cmd:
            raise ConnectError(Code.INVALID_ARGUMENT, "process.cmd is empty: set process.cmd")
        user = self._context.user(call.username)
        cwd = self._context.directory(config.cwd or "", user)
        size: tuple[int, int] | None = None
        if request.pty is not None:
            given = request.pty.size or m.PtySize()
            size = (given.cols or _DEFAULT_SIZE[0], given.rows or _DEFAULT_SIZE[1])
        env = self._context.variables(user) | dict(config.envs)
        if any("\0" in text for text in (config.cmd, *config.args, *env, *env.values())):
            raise ConnectError(Code.INVALID_ARGUMENT, "NUL bytes cannot be passed to a command")
        argv, env = self._context.invocation((config.cmd, *config.args), env)
        command = Command(
            argv=argv,
            env=env,
            cwd=cwd,
            uid=user.uid,
            gid=user.gid,
            groups=user.groups,
            pty_size=size,
            has_stdin=request.stdin is not False,
        )
        return command, config


async def _send(stream: Stream, events: list[m.ProcessEvent]) -> None:
    if events:
        is_last = events[-1].end is not None
        responses = (m.ProcessEventResponse(event=event) for event in events)
        await stream.send(*responses, is_last=is_last)
    else:
        keepalive = m.ProcessEvent(keepalive=m.Empty())
        await stream.send(m.ProcessEventResponse(event=keepalive))
