"""The client of a sandbox's init: copies a channel out of it and is its only reader.

The protocol is in `init_protocol.py`.
"""

import array
import asyncio
import contextlib
import ctypes
import errno
import os
import signal
import socket
import struct
from collections.abc import Callable, Sequence

from paddock.envd.process.init_protocol import (
    ATTACH,
    CHUNK,
    CLOSE_STDIN,
    ENVD_CHANNEL_FD,
    EXIT,
    FORGET,
    MORE,
    PING,
    REPLY,
    SIGNAL,
    SPAWN,
    ChannelClosedError,
    DescriptorsLostError,
    InitError,
    InitMessage,
    ProcessRecord,
    ProtocolError,
    SignalScope,
    SpawnRequest,
    Stage,
    decode,
    decode_record,
    encode,
    encode_spawn,
)

_SYS_PIDFD_GETFD = 438
_KILL_TIMEOUT_SECONDS = 5.0
"""The time that a killed command has to end."""
_libc = ctypes.CDLL(None, use_errno=True)


def take_channel(pidfd: int, *, fd: int = ENVD_CHANNEL_FD) -> socket.socket:
    """Copy a client end out of init, given its pidfd."""
    got = _libc.syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0)
    if got < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot take init's channel {fd}: {os.strerror(number)}")
    os.set_inheritable(got, False)
    return socket.socket(fileno=got)


class InitClient:
    """The only reader of a channel, on the running event loop.

    `on_exit` is called for every process of this channel that ends, `on_lost` when the channel is
    lost. Records passed to `on_exit` have no descriptors.
    """

    def __init__(
        self,
        channel: socket.socket,
        *,
        on_exit: Callable[[ProcessRecord], None],
        on_lost: Callable[[Exception], None] | None = None,
    ) -> None:
        self._channel = channel
        self._on_exit = on_exit
        self._on_lost = on_lost
        self._seq = 0
        self._waiting: dict[int, asyncio.Future[InitMessage]] = {}
        self._attach: tuple[int, int, list[ProcessRecord]] | None = None
        self._session = 0
        self._undelivered: dict[int, asyncio.Event] = {}
        """Commands that are killed because their descriptors did not arrive, by id."""
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._closed = False
        channel.setblocking(False)
        self._loop.add_reader(channel.fileno(), self._readable)

    async def attach(self) -> list[ProcessRecord]:
        """Take over from an earlier reader, whose replies are dropped; return all processes."""
        self._session = int.from_bytes(os.urandom(8), "little")
        records: list[ProcessRecord] = []
        seq = self._next_seq()
        self._attach = (seq, self._session, records)
        await self._call(ATTACH, struct.pack("<Q", self._session), seq=seq)
        return records

    async def ping(self) -> int:
        """Return the number of processes in init's table."""
        message = await self._call(PING)
        if len(message.body) < 8:
            raise ProtocolError("short ping reply")
        return int(struct.unpack_from("<II", message.body)[1])

    async def spawn(self, request: SpawnRequest) -> ProcessRecord:
        """Start a command; the caller must close the descriptors of the record."""
        message = await self._call(SPAWN, encode_spawn(request))
        try:
            return decode_record(message)
        except DescriptorsLostError as problem:
            close_all(message.fds)
            await self._kill_undelivered(request.id)
            raise InitError(errno.EMFILE, Stage.STREAMS) from problem
        except ProtocolError:
            close_all(message.fds)
            raise

    async def _kill_undelivered(self, ident: int) -> None:
        """Kill a command whose descriptors did not arrive, and remove it from init's table."""
        ended = self._undelivered[ident] = asyncio.Event()
        try:
            with contextlib.suppress(InitError):
                await self.signal(ident, signal.SIGKILL, SignalScope.TREE)
            with contextlib.suppress(InitError):  # it may have ended already
                await self.forget(ident)
                return
            with contextlib.suppress(TimeoutError, InitError):
                async with asyncio.timeout(_KILL_TIMEOUT_SECONDS):
                    await ended.wait()
                await self.forget(ident)
        finally:
            del self._undelivered[ident]

    async def signal(self, ident: int, signo: int, scope: SignalScope = SignalScope.PROCESS) -> int:
        """Signal a command, its group or its tree; return how many processes; ESRCH for none."""
        message = await self._call(SIGNAL, struct.pack("<IiI", ident, signo, int(scope)))
        return int(struct.unpack_from("<I", message.body)[0]) if len(message.body) >= 4 else 0

    async def close_stdin(self, ident: int) -> None:
        """Close init's copy of the write end."""
        await self._call(CLOSE_STDIN, struct.pack("<I", ident))

    async def forget(self, ident: int) -> None:
        """Make init close its copies and drop the record of an ended process."""
        await self._call(FORGET, struct.pack("<I", ident))

    def close(self) -> None:
        """Stop reading and close this copy of the client end; the sandbox is not affected."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ChannelClosedError("the channel to init was closed"))
        self._waiting.clear()

    def _next_seq(self) -> int:
        self._seq = self._seq % 0xFFFFFFFF + 1
        return self._seq

    async def _call(self, op: int, body: bytes = b"", *, seq: int = 0) -> InitMessage:
        if self._closed:
            raise ChannelClosedError("the channel to init is closed")
        seq = seq or self._next_seq()
        future: asyncio.Future[InitMessage] = self._loop.create_future()
        self._waiting[seq] = future
        try:
            datagrams = encode(op, seq, body)
            if not self._try_send(datagrams):
                # The datagrams of one request must not be mixed with another's.
                async with self._sending:
                    for datagram in datagrams:
                        await self._send(datagram)
            message = await future
        finally:
            self._waiting.pop(seq, None)
        if message.status < 0:
            stage = struct.unpack_from("<I", message.body)[0] if len(message.body) >= 4 else 0
            raise InitError(-message.status, Stage(stage) if stage in set(Stage) else Stage.NONE)
        return message

    def _try_send(self, datagrams: list[bytes]) -> bool:
        if len(datagrams) > 1 or self._sending.locked():
            return False
        try:
            self._channel.send(datagrams[0], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        return True

    async def _send(self, datagram: bytes) -> None:
        try:
            self._channel.send(datagram, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            await self._loop.sock_sendall(self._channel, datagram)

    def _readable(self) -> None:
        for _ in range(64):
            try:
                data, fds = receive(self._channel)
            except BlockingIOError:
                return
            except OSError as problem:
                self._on_channel_lost(problem)
                return
            if not data:
                self._on_channel_lost(ChannelClosedError("init is gone"))
                return
            try:
                self._handle(decode(data, fds))
            except ProtocolError as problem:
                close_all(fds)
                self._on_channel_lost(problem)
                return

    def _handle(self, message: InitMessage) -> None:
        if message.op == EXIT:
            # Ended before this reader attached: the reply to ATTACH contains it.
            if self._attach is None:
                self._handle_exit(decode_record(message))
            return
        if self._attach is not None and message.op == ATTACH | REPLY:
            self._handle_attach(message)
            return
        future = self._waiting.get(message.seq) if self._attach is None else None
        if future is None or future.done():
            close_all(message.fds)
            return
        future.set_result(message)

    def _handle_exit(self, record: ProcessRecord) -> None:
        if (undelivered := self._undelivered.get(record.id)) is not None:
            undelivered.set()
        else:
            self._on_exit(record)

    def _handle_attach(self, message: InitMessage) -> None:
        assert self._attach is not None  # noqa: S101 - narrowed by the only caller
        seq, session, records = self._attach
        if message.flags & MORE:
            if message.seq == seq:
                records.append(decode_record(message))
            else:
                close_all(message.fds)
            return
        close_all(message.fds)
        if message.seq == seq and message.body[:8] == struct.pack("<Q", session):
            self._attach = None
            future = self._waiting.get(seq)
            if future is not None and not future.done():
                future.set_result(message)
            return
        # The end of another reader's list: the records under the same seq are not ours.
        for record in records:
            close_all(record.fds)
        records.clear()

    def _on_channel_lost(self, problem: Exception) -> None:
        self.close()
        if self._on_lost is not None:
            self._on_lost(problem)


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one datagram with its descriptors, which are close-on-exec."""
    data, ancillary, _, _ = channel.recvmsg(
        CHUNK + 4096, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors; ignore errors."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
