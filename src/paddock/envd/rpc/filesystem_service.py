"""The RPC service `filesystem.Filesystem`.

Decides users, paths and error codes. Listings are in `files/entries.py`, changes in
`files/tree_ops.py`, watches in `files/watch.py`. envd acts as root of the sandbox and gives what it
creates to the user, as E2B's envd does.
"""

import asyncio
import errno
import os
import stat
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from paddock.envd.blocking import in_thread
from paddock.envd.files import entries, paths, tree_ops
from paddock.envd.files.watch import (
    DirectoryWatcher,
    FileEvent,
    Watchers,
    WatchLimitError,
    is_network_mount,
)
from paddock.envd.rpc import messages as m
from paddock.envd.rpc.connect import Method, RpcCall, ServerStream, Stream, Unary
from paddock.envd.rpc.connect_frames import Code, ConnectError, printable
from paddock.envd.sandbox_context import SandboxContext

_CODES = {
    errno.ENOENT: Code.NOT_FOUND,
    errno.ENOTDIR: Code.NOT_FOUND,
    errno.EACCES: Code.PERMISSION_DENIED,
    errno.EPERM: Code.PERMISSION_DENIED,
    errno.EEXIST: Code.ALREADY_EXISTS,
    errno.ENOTEMPTY: Code.ALREADY_EXISTS,
    errno.EISDIR: Code.INVALID_ARGUMENT,
    errno.EINVAL: Code.INVALID_ARGUMENT,
    errno.ELOOP: Code.INVALID_ARGUMENT,
    errno.ENAMETOOLONG: Code.INVALID_ARGUMENT,
    errno.ENOSPC: Code.RESOURCE_EXHAUSTED,
    errno.EDQUOT: Code.RESOURCE_EXHAUSTED,
    errno.EMFILE: Code.RESOURCE_EXHAUSTED,
}


@contextmanager
def _explained(doing: str, path: str) -> Generator[None]:
    """Translate errors of the kernel, and limits that are exceeded, into Connect errors."""
    try:
        yield
    except OSError as error:
        code = _CODES.get(error.errno or 0, Code.INTERNAL)
        shown = printable(path)
        if code is Code.NOT_FOUND:
            raise ConnectError(code, f"path not found: cannot {doing} {shown!r}") from error
        raise ConnectError(code, f"cannot {doing} {shown!r}: {error.strerror}") from error
    except paths.ParentError as error:
        raise ConnectError(Code.INVALID_ARGUMENT, printable(f"cannot {doing}: {error}")) from error
    except (entries.TooManyEntriesError, WatchLimitError) as error:
        raise ConnectError(Code.RESOURCE_EXHAUSTED, printable(str(error))) from error
    except RecursionError as error:
        raise ConnectError(Code.INTERNAL, f"cannot {doing}: the tree is too deep") from error


class FilesystemService:
    """The RPC methods for files."""

    def __init__(self, context: SandboxContext, watchers: Watchers) -> None:
        self._context = context
        self._watchers = watchers

    def methods(self) -> Mapping[str, Method]:
        """Return the methods by path."""
        prefix = "/filesystem.Filesystem/"
        return {
            prefix + "Stat": Unary(m.PathRequest, self.stat),
            prefix + "MakeDir": Unary(m.PathRequest, self.make_dir),
            prefix + "Move": Unary(m.MoveRequest, self.move),
            prefix + "ListDir": Unary(m.ListDirRequest, self.list_dir),
            prefix + "Remove": Unary(m.PathRequest, self.remove),
            prefix + "WatchDir": ServerStream(m.WatchRequest, self.watch_dir),
            prefix + "CreateWatcher": Unary(m.WatchRequest, self.create_watcher),
            prefix + "GetWatcherEvents": Unary(m.WatcherId, self.get_watcher_events),
            prefix + "RemoveWatcher": Unary(m.WatcherId, self.remove_watcher),
        }

    async def stat(self, call: RpcCall, request: m.PathRequest) -> m.EntryResponse:
        """Return one entry; links are not followed."""
        path = self._path(call, request.path)
        with _explained("stat", path):
            return m.EntryResponse(entry=self._describe(path))

    async def list_dir(self, call: RpcCall, request: m.ListDirRequest) -> m.ListDirResponse:
        path = self._path(call, request.path)
        with _explained("list", path):
            _require_directory(path)
            self._context.users.refresh()
            found = await in_thread(
                entries.list_directory, path, request.depth, self._context.users
            )
        return m.ListDirResponse(entries=tuple(found))

    async def make_dir(self, call: RpcCall, request: m.PathRequest) -> m.EntryResponse:
        """`mkdir -p`."""
        user = self._context.user(call.username)
        path = self._context.resolve(request.path, user)
        shown = printable(path)
        with _explained("create directory", path):
            try:
                mode = os.stat(path).st_mode
            except (FileNotFoundError, NotADirectoryError):
                pass
            else:
                if stat.S_ISDIR(mode):
                    raise ConnectError(Code.ALREADY_EXISTS, f"directory already exists: {shown}")
                raise ConnectError(
                    Code.INVALID_ARGUMENT, f"path already exists but it is not a directory: {shown}"
                )
            paths.make_directories(path, uid=user.uid, gid=user.gid)
            return m.EntryResponse(entry=self._describe(path))

    async def move(self, call: RpcCall, request: m.MoveRequest) -> m.EntryResponse:
        """Rename, creating the destination's parents."""
        user = self._context.user(call.username)
        source = self._context.resolve(request.source, user)
        destination = self._context.resolve(request.destination, user)
        with _explained("move", source):
            os.lstat(source)
            paths.make_parents(destination, uid=user.uid, gid=user.gid)
            await in_thread(tree_ops.move, source, destination)
            return m.EntryResponse(entry=self._describe(destination))

    async def remove(self, call: RpcCall, request: m.PathRequest) -> m.Empty:
        """`rm -rf`."""
        path = self._path(call, request.path)
        if path == "/":
            raise ConnectError(Code.INVALID_ARGUMENT, "refusing to remove the root directory")
        with _explained("remove", path):
            await in_thread(tree_ops.remove, path)
        return m.Empty()

    async def watch_dir(self, call: RpcCall, request: m.WatchRequest, stream: Stream) -> None:
        """Stream the events of a directory until the client leaves."""
        path = self._watchable(call, request)
        with _explained("watch", path):
            watcher = self._watchers.open(path, recursive=request.recursive)
        loop = asyncio.get_running_loop()
        wake = asyncio.Event()
        loop.add_reader(watcher.fd, wake.set)
        try:
            async with asyncio.timeout(call.timeout):
                await stream.send(m.WatchDirResponse(start=m.Empty()))
                while True:
                    await _wait(wake, call.keepalive_seconds)
                    events = self._events(watcher, watcher.take(), request.include_entry)
                    if events:
                        await stream.send(*(m.WatchDirResponse(filesystem=e) for e in events))
                    elif not wake.is_set():
                        await stream.send(m.WatchDirResponse(keepalive=m.Empty()))
                    wake.clear()
                    _refuse_loss(watcher)
        finally:
            self._watchers.release(watcher)

    async def create_watcher(self, call: RpcCall, request: m.WatchRequest) -> m.WatcherId:
        """Create a watcher for a client that polls."""
        path = self._watchable(call, request)
        with _explained("watch", path):
            ident = self._watchers.create(path, recursive=request.recursive)
        if request.include_entry:
            self._watchers.with_entries.add(ident)
        return m.WatcherId(watcher_id=ident)

    async def get_watcher_events(self, call: RpcCall, request: m.WatcherId) -> m.WatcherEvents:
        """Return the events since the last call."""
        watcher = self._watchers.get(request.watcher_id)
        if watcher is None:
            raise ConnectError(
                Code.NOT_FOUND, f"watcher with id {printable(request.watcher_id)} not found"
            )
        _refuse_loss(watcher)
        include = request.watcher_id in self._watchers.with_entries
        events = self._events(watcher, self._watchers.take(watcher), include)
        return m.WatcherEvents(events=tuple(events))

    async def remove_watcher(self, call: RpcCall, request: m.WatcherId) -> m.Empty:
        if not self._watchers.remove(request.watcher_id):
            raise ConnectError(
                Code.NOT_FOUND, f"watcher with id {printable(request.watcher_id)} not found"
            )
        return m.Empty()

    def _path(self, call: RpcCall, path: str) -> str:
        return self._context.resolve(path, self._context.user(call.username))

    def _describe(self, path: str) -> m.EntryInfo:
        self._context.users.refresh()
        return entries.describe(path, self._context.users)

    def _watchable(self, call: RpcCall, request: m.WatchRequest) -> str:
        path = self._path(call, request.path)
        with _explained("watch", path):
            _require_directory(path)
        if not request.allow_network_mounts and is_network_mount(path):
            raise ConnectError(
                Code.INVALID_ARGUMENT,
                f"{printable(path)!r} is on a network mount, where changes made elsewhere are not "
                "seen: set allowNetworkMounts to watch it nevertheless",
            )
        return path

    def _events(
        self, watcher: DirectoryWatcher, events: list[FileEvent], include: bool
    ) -> list[m.FilesystemEvent]:
        describe: Callable[[str], m.EntryInfo | None] = (
            (lambda name: self._entry(watcher, name)) if include else (lambda _: None)
        )
        return [
            m.FilesystemEvent(name=printable(e.name), type=e.type, entry=describe(e.name))
            for e in events
        ]

    def _entry(self, watcher: DirectoryWatcher, name: str) -> m.EntryInfo | None:
        try:
            return self._describe(os.path.join(watcher.path, name))
        except OSError:
            return None


def _require_directory(path: str) -> None:
    if not stat.S_ISDIR(os.stat(path).st_mode):
        raise ConnectError(Code.INVALID_ARGUMENT, f"path is not a directory: {printable(path)}")


def _refuse_loss(watcher: DirectoryWatcher) -> None:
    if watcher.is_lossy:
        watcher.is_lossy = False
        raise ConnectError(
            Code.RESOURCE_EXHAUSTED,
            "the event buffer overflowed and events were lost: list the directory again",
        )


async def _wait(wake: asyncio.Event, timeout: float) -> None:
    try:
        async with asyncio.timeout(timeout):
            await wake.wait()
    except TimeoutError:
        return
