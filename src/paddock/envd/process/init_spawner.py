"""Starts commands through the sandbox's pid 1: they are its children and survive envd."""

import contextlib
import errno
import itertools
import os
import socket
from collections.abc import Callable, Mapping

from paddock.envd.process import init_protocol
from paddock.envd.process.init_client import InitClient
from paddock.envd.process.init_protocol import SignalScope
from paddock.envd.process.spawner import (
    OOM_SCORE_ADJ,
    Command,
    ExitStatus,
    InheritedProcess,
    OnExit,
    SandboxGoneError,
    SpawnedProcess,
    Spawner,
    SpawnError,
)


class _InitChild:
    """A command whose parent is init."""

    def __init__(self, client: InitClient, record: init_protocol.ProcessRecord) -> None:
        self._client = client
        self._id = record.id
        self.pid = record.pid
        self.stdin = record.stdin
        named = {"stdout": record.stdout, "stderr": record.stderr, "pty": record.pty}
        self.outputs: Mapping[str, int] = {k: fd for k, fd in named.items() if fd is not None}
        for fd in record.fds:
            os.set_blocking(fd, False)

    async def signal(self, number: int, scope: SignalScope = SignalScope.PROCESS) -> None:
        try:
            await self._client.signal(self._id, number, scope)
        except ProcessLookupError:
            return
        except init_protocol.InitError as error:
            if error.errno != 3:  # ESRCH: it ended meanwhile
                raise
        except init_protocol.ChannelClosedError as error:
            raise SandboxGoneError(str(error)) from error

    async def close_stdin(self) -> None:
        with contextlib.suppress(init_protocol.InitError, init_protocol.ChannelClosedError):
            await self._client.close_stdin(self._id)

    async def wait_responsive(self) -> None:
        try:
            await self._client.ping()
        except init_protocol.ChannelClosedError as error:
            raise SandboxGoneError(str(error)) from error

    async def forget(self) -> None:
        with contextlib.suppress(init_protocol.InitError, init_protocol.ChannelClosedError):
            await self._client.forget(self._id)


class InitSpawner:
    """Starts commands as children of the sandbox's pid 1."""

    def __init__(
        self, channel: socket.socket, on_lost: Callable[[Exception], None] | None = None
    ) -> None:
        self._client = InitClient(channel, on_exit=self._on_exit_record, on_lost=on_lost)
        self._ids = itertools.count(1)
        self._exits: dict[int, OnExit] = {}

    async def attach(self, on_exit: Callable[[int], OnExit]) -> list[InheritedProcess]:
        """Take over the channel and its processes."""
        inherited: list[InheritedProcess] = []
        highest = 0
        for record in await self._client.attach():
            highest = max(highest, record.id)
            ended: ExitStatus | None = None
            if record.flags & init_protocol.RecordFlags.EXITED:
                ended = ExitStatus.from_wait(record.wait_status)
            else:
                self._exits[record.id] = on_exit(record.pid)
            inherited.append(InheritedProcess(_InitChild(self._client, record), record.memo, ended))
        self._ids = itertools.count(highest + 1)
        return inherited

    async def spawn(self, command: Command, on_exit: OnExit) -> SpawnedProcess:
        flags = init_protocol.SpawnFlags(0)
        columns, rows = command.pty_size or (80, 24)
        if command.pty_size is not None:
            flags |= init_protocol.SpawnFlags.PTY
        elif command.has_stdin:
            flags |= init_protocol.SpawnFlags.STDIN_PIPE
        ident = next(self._ids)
        request = init_protocol.SpawnRequest(
            id=ident, argv=command.argv, env=command.env, cwd=command.cwd, uid=command.uid,
            gid=command.gid, groups=command.groups, flags=flags, rows=rows, cols=columns,
            oom_score_adj=OOM_SCORE_ADJ, memo=command.memo,
        )  # fmt: skip
        self._exits[ident] = on_exit
        try:
            record = await self._client.spawn(request)
        except init_protocol.InitError as error:
            self._exits.pop(ident, None)
            raise SpawnError(_explain(command, error), error.errno) from error
        except (init_protocol.ChannelClosedError, init_protocol.ProtocolError) as error:
            self._exits.pop(ident, None)
            raise SandboxGoneError(str(error)) from error
        return _InitChild(self._client, record)

    def close(self) -> None:
        self._client.close()

    def _on_exit_record(self, record: init_protocol.ProcessRecord) -> None:
        if (on_exit := self._exits.pop(record.id, None)) is not None:
            on_exit(ExitStatus.from_wait(record.wait_status))


def _explain(command: Command, error: init_protocol.InitError) -> str:
    if error.errno == errno.EAGAIN and error.stage in (
        init_protocol.Stage.FORK,
        init_protocol.Stage.EXEC,
    ):
        return (
            f"cannot start {command.argv[0]!r}: the sandbox has as many processes as it may have; "
            "kill some of its commands, or the sandbox, or give its template more `pids`"
        )
    if error.stage is init_protocol.Stage.EXEC:
        return f"cannot run {command.argv[0]!r}: {error.strerror}"
    if error.stage is init_protocol.Stage.DIRECTORY:
        return f"cannot enter directory {command.cwd!r}: {error.strerror}"
    return f"cannot start {command.argv[0]!r} ({error.stage.name.lower()}): {error.strerror}"


_: type[Spawner] = InitSpawner
