"""The zygote: the warm parent process of every envd on a node.

`python -m paddock.envd.zygote.start --fd N` (a connected SOCK_SEQPACKET unix socket; the zygote
ends when it is closed) or `--socket PATH` (listens there and serves all clients concurrently).

One datagram is one request, JSON with descriptors by SCM_RIGHTS:

    {"op":"start","id":<any string>,"config":{…Config…},"fds":["listener","control","init","userns",
     "mntns","netns","cgroup","disk","cgroup_procs"]}

`fds` names the descriptors in the order they are attached; all but `listener` may be left out:

    listener      listening socket (unix or TCP) for clients; `/init` is 404 there
    control       listening unix socket for the node: no token required, has `/init` and `/status`
    inside        listening TCP socket for code inside the sandbox: `GET /envs` and `/health` alone
    init          envd's channel to the sandbox's pid 1 (`init_protocol.py`); without it envd forks
    userns mntns netns   namespaces to join, in that order
    cgroup        directory descriptors of the sandbox's cgroup for `/metrics`: `cgroup` (v2), or
    cgroup_memory, cgroup_cpu      the v1 hierarchies
    disk          a file for `/metrics` with the number of bytes that the sandbox has written
    wait          instead of a listener: join, then wait on this SOCK_SEQPACKET socket for a `start`
                  with config, listener and control, and with init and the mount namespace if they
                  were not passed before; ends when the socket is closed
    cgroup_procs  written "0" before joining, so that envd itself is accounted there

Replies and events, also JSON datagrams:

    {"id":…,"op":"started","pid":N}      with the child's pidfd; it has joined and is about to serve
    {"id":…,"op":"failed","error":"…"}
    {"id":…,"op":"exited","pid":N,"status":<wait status>}    later, to the requesting connection
    {"op":"ping"} -> {"op":"pong","children":N}
    {"op":"broken","error":"…"}          startup failed; the zygote ends and answers no request

`--spares N` keeps N children forked beforehand, so that a start costs no fork.

envds outlive the zygote; a new zygote does not manage old ones (keep the pidfds). Exit status 0 of
an envd means that it was idle (`idle_exit_seconds`): keep the listener and start another envd when
it becomes readable.
"""

import argparse
import array
import contextlib
import gc
import os
import selectors
import signal
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from paddock.envd import isolation, logs, outbound
from paddock.envd.server import Envd
from paddock.envd.zygote.child import (
    MAX_FDS,
    MAX_REQUEST,
    ZygoteRequest,
    child_main,
    run_child,
    spare_main,
)
from paddock.envd.zygote.cow_layout import fill_holes
from paddock.envd.zygote.warmup import warm_up

_IDLE_SECONDS = 0.03
_SPARE_RETRY_SECONDS = 1.0
"""The pause after a spare could not be forked."""


class StartingChild(Struct):
    """A child that was started and may not have reported yet."""

    id: str
    pid: int
    pidfd: int
    requester: socket.socket


class SpareChild(Struct):
    """A forked child that waits for a sandbox."""

    pid: int
    pidfd: int
    channel: socket.socket


class ZygoteServer:
    """Forks envds on request. Single-threaded, with one selector."""

    def __init__(
        self,
        *,
        listener: socket.socket | None,
        peer: socket.socket | None,
        spares: int = 0,
    ) -> None:
        self._envd = Envd()
        """Inherited by the children, which only set their sandbox."""
        self._wanted_spares = spares
        self._spares: list[SpareChild] = []
        self._selector = selectors.DefaultSelector()
        self._children = 0
        self._is_bound_to_peer = peer is not None
        self._is_done = False
        if listener is not None:
            listener.setblocking(False)
            self._register(listener, lambda: self._accept(listener))
        if peer is not None:
            self._add_peer(peer)

    def run(self) -> None:
        """Serve until the peer given at startup disconnects."""
        quiet = _IDLE_SECONDS
        while not self._is_done:
            # Spares are forked when there was no request for a moment.
            is_short = len(self._spares) < self._wanted_spares
            ready = self._selector.select(quiet if is_short else None)
            for key, _ in ready:
                key.data()
            if is_short and not ready:
                try:
                    self._add_spare()
                    quiet = _IDLE_SECONDS
                except OSError:
                    quiet = _SPARE_RETRY_SECONDS

    def _register(self, source: Any, action: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, action)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            peer, _ = listener.accept()
            self._add_peer(peer)

    def _add_peer(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        self._register(peer, lambda: self._receive(peer))

    def _receive(self, peer: socket.socket) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(peer, MAX_REQUEST, MAX_FDS)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._selector.unregister(peer)
            peer.close()
            self._is_done = self._is_bound_to_peer
            return
        try:
            self._handle(peer, data, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _handle(self, peer: socket.socket, data: bytes, fds: list[int]) -> None:
        try:
            request = msgspec.json.decode(data, type=ZygoteRequest)
        except msgspec.MsgspecError as error:
            self._send(peer, {"op": "failed", "id": "", "error": f"malformed request: {error}"})
            return
        if request.op == "ping":
            self._send(peer, {"op": "pong", "id": request.id, "children": self._children})
            return
        problem = _validation_error(request, fds)
        if problem is not None:
            self._send(peer, {"op": "failed", "id": request.id, "error": problem})
            return
        self._start(peer, request, dict(zip(request.fds, fds, strict=True)))

    def _start(self, peer: socket.socket, request: ZygoteRequest, fds: dict[str, int]) -> None:
        try:
            reading, pid, pidfd = self._start_child(request, fds)
        except OSError as error:
            # Descriptors, memory or processes are exhausted; the zygote keeps serving.
            self._send(peer, {"op": "failed", "id": request.id, "error": f"cannot fork: {error}"})
            return
        self._children += 1
        starting = StartingChild(request.id, pid, pidfd, peer)
        self._register(reading, lambda: self._on_report(starting, reading))
        self._register(starting.pidfd, lambda: self._on_exit(starting))

    def _start_child(self, request: ZygoteRequest, fds: dict[str, int]) -> tuple[int, int, int]:
        """Start a child; return the pipe of its report, its pid and a pidfd."""
        reading, writing = os.pipe()
        try:
            spare = self._assign_spare(request, [writing, *fds.values()])
            if spare is None:
                spare = _fork_child(lambda: child_main(self._envd, request.config, fds, writing))
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return reading, *spare

    def _add_spare(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def wait() -> None:
            ours.close()
            spare_main(self._envd, theirs)

        try:
            pid, pidfd = _fork_child(wait)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        spare = SpareChild(pid, pidfd, ours)
        self._spares.append(spare)
        self._register(spare.pidfd, lambda: self._on_spare_exit(spare))

    def _assign_spare(self, request: ZygoteRequest, fds: list[int]) -> tuple[int, int] | None:
        while self._spares:
            spare = self._spares.pop()
            self._selector.unregister(spare.pidfd)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            try:
                spare.channel.sendmsg([msgspec.json.encode(request)], rights, socket.MSG_NOSIGNAL)
            except OSError:  # it has died and its exit is not handled yet
                os.waitpid(spare.pid, 0)
                os.close(spare.pidfd)
                continue
            finally:
                spare.channel.close()
            return spare.pid, spare.pidfd
        return None

    def _on_spare_exit(self, spare: SpareChild) -> None:
        if spare not in self._spares:  # assigned by the previous event
            return
        self._selector.unregister(spare.pidfd)
        os.waitpid(spare.pid, 0)
        os.close(spare.pidfd)
        spare.channel.close()
        self._spares.remove(spare)

    def _on_report(self, child: StartingChild, reading: int) -> None:
        """Handle a report: `ok` or an error; end-of-file without a report is a crash."""
        report = os.read(reading, 512)
        self._selector.unregister(reading)
        os.close(reading)
        if report == b"ok":
            reply = {"op": "started", "id": child.id, "pid": child.pid}
            self._send(child.requester, reply, [child.pidfd])
        else:
            error = report.decode("utf-8", "replace") or "envd ended while starting"
            self._send(child.requester, {"op": "failed", "id": child.id, "error": error})

    def _on_exit(self, child: StartingChild) -> None:
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        self._children -= 1
        gone = {"op": "exited", "id": child.id, "pid": child.pid, "status": status}
        self._send(child.requester, gone)

    def _send(self, peer: socket.socket, message: object, fds: list[int] | None = None) -> None:
        # A node that has disconnected or does not read must not block the others.
        with contextlib.suppress(OSError):
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds or []))]
            peer.sendmsg([msgspec.json.encode(message)], rights if fds else [], socket.MSG_NOSIGNAL)


def _fork_child(run_child: Callable[[], None]) -> tuple[int, int]:
    """Fork a child that runs `run_child`, which never returns; return its pid and a pidfd."""
    pid = os.fork()
    if pid == 0:
        run_child()
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _validation_error(request: ZygoteRequest, fds: list[int]) -> str | None:
    if request.op != "start":
        return f"unknown op {request.op!r}: use start or ping"
    if len(request.fds) != len(fds):
        return f"{len(request.fds)} descriptors are named but {len(fds)} were received"
    return None if {"listener", "wait"} & set(request.fds) else "a listener is needed"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m paddock.envd.zygote.start")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fd", type=int, help="connected SOCK_SEQPACKET socket")
    where.add_argument("--socket", help="path to listen on")
    parser.add_argument("--spares", type=int, default=0, help="number of envds to fork in advance")
    options = parser.parse_args(arguments)
    logs.configure("envd[%(process)d] %(levelname)s %(message)s")
    peer = listener = None
    if options.fd is not None:
        peer = socket.socket(fileno=options.fd)
        peer.set_inheritable(False)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(options.socket)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(options.socket)
        os.chmod(options.socket, 0o600)
        listener.listen(64)
    tempfile.gettempdir()  # cached: TMPDIR is removed with the environment
    os.environ.clear()
    isolation.preload()
    outbound.preload()
    warm_up(lambda config, fds, report: run_child(Envd(), config, fds, report))
    # Here rather than in each child, where every page that it touches would be copied.
    isolation.seal_interpreter()
    zygote = ZygoteServer(listener=listener, peer=peer, spares=options.spares)
    isolation.rename("envd-zygote")
    gc.collect()
    filler = fill_holes()
    gc.freeze()
    zygote.run()
    filler.clear()
    return 0
