"""Watching directories with inotify, reported as the client's five event types.

One inotify instance per watcher. `drain` reads what the kernel has now, so that an event is there
as soon as the call that caused it has returned. A recursive watcher adds new directories at once
and reports entries that were created in them before. Queues are bounded; lost events are reported.
The RPC methods are in `rpc/filesystem_service.py`.
"""

import asyncio
import contextlib
import ctypes
import os
import secrets
import struct
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from paddock.envd.rpc.messages import EventType

IN_MODIFY, IN_ATTRIB, IN_MOVED_FROM, IN_MOVED_TO = 0x2, 0x4, 0x40, 0x80
IN_CREATE, IN_DELETE, IN_Q_OVERFLOW, IN_IGNORED = 0x100, 0x200, 0x4000, 0x8000
IN_ONLYDIR, IN_ISDIR = 0x01000000, 0x40000000
_MASK = IN_MODIFY | IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE | IN_ONLYDIR
_TYPES = (
    (IN_CREATE | IN_MOVED_TO, EventType.CREATE),
    (IN_MODIFY, EventType.WRITE),
    (IN_DELETE, EventType.REMOVE),
    (IN_MOVED_FROM, EventType.RENAME),
    (IN_ATTRIB, EventType.CHMOD),
)
_HEAD = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)

MAX_WATCHERS = 64
MAX_DIRECTORIES = 8192
MAX_QUEUED = 16384
# NFS, CIFS, SMB2, FUSE, 9P, CEPH: changes made elsewhere are invisible to inotify.
_NETWORK_FILESYSTEMS = {0x6969, 0xFF534D42, 0xFE534D42, 0x65735546, 0x01021997, 0x00C36400}


class WatchLimitError(Exception):
    """Too many watchers or watched directories."""


class FileEvent(Struct, frozen=True):
    """A change to `name`, which is relative to the watched directory."""

    name: str
    type: EventType


def is_network_mount(path: str) -> bool:
    """Whether a directory is on a file system where changes made elsewhere cause no events."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        return False
    return struct.unpack_from("q", buffer.raw)[0] & 0xFFFFFFFF in _NETWORK_FILESYSTEMS


class DirectoryWatcher:
    """One watched directory and its queue of events."""

    def __init__(self, path: str, *, recursive: bool) -> None:
        self.path = path
        self.is_recursive = recursive
        self._events: deque[FileEvent] = deque()
        self._directories: dict[int, str] = {}
        self._reported: set[tuple[int, str]] = set()
        self.is_lossy = False
        """Whether events were lost since this was last cleared."""
        self.fd = _check(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify_init1", path)
        try:
            self._add("", is_root=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.fd >= 0:
            with contextlib.suppress(RuntimeError):  # no loop: a failed constructor
                asyncio.get_running_loop().remove_reader(self.fd)
            os.close(self.fd)
            self.fd = -1

    def take(self) -> list[FileEvent]:
        """Read the kernel's queue and return all events."""
        self.drain()
        taken = list(self._events)
        self._events.clear()
        return taken

    def drain(self) -> bool:
        """Read the kernel's queue; return false if our own queue is full."""
        while len(self._events) < MAX_QUEUED:
            try:
                data = os.read(self.fd, 64 << 10)
            except BlockingIOError:
                return True
            position = 0
            while position < len(data):
                wd, mask, _, length = _HEAD.unpack_from(data, position)
                position += _HEAD.size
                name = data[position : position + length].rstrip(b"\0")
                position += length
                self._handle(wd, mask, os.fsdecode(name))
        return False

    def _handle(self, wd: int, mask: int, name: str) -> None:
        if mask & IN_Q_OVERFLOW:
            self.is_lossy = True
            return
        if mask & IN_IGNORED:
            self._directories.pop(wd, None)
            return
        directory = self._directories.get(wd)
        if directory is None or not name:
            return
        relative = f"{directory}/{name}" if directory else name
        if self._was_reported(wd, mask, name):
            return
        for bits, kind in _TYPES:
            if mask & bits:
                self._push(FileEvent(relative, kind))
        if self.is_recursive and mask & IN_ISDIR:
            if mask & (IN_CREATE | IN_MOVED_TO):
                self._follow(relative, is_new=bool(mask & IN_CREATE))
            elif mask & IN_MOVED_FROM:
                self._unfollow(relative)

    def _was_reported(self, wd: int, mask: int, name: str) -> bool:
        """Whether this creation was already reported when its directory was added."""
        if (wd, name) not in self._reported:
            return False
        if mask & (IN_CREATE | IN_DELETE | IN_MOVED_FROM):
            self._reported.discard((wd, name))
        return bool(mask & IN_CREATE)

    def _push(self, event: FileEvent) -> None:
        if len(self._events) >= 2 * MAX_QUEUED:
            self.is_lossy = True
        else:
            self._events.append(event)

    def _follow(self, relative: str, *, is_new: bool) -> None:
        """Watch a new directory; report its entries if it was created, not moved here."""
        with contextlib.suppress(OSError):  # removed or replaced meanwhile
            self._add(relative, report_existing=is_new)

    def _add(self, relative: str, *, is_root: bool = False, report_existing: bool = False) -> None:
        pending = [relative]
        while pending:
            relative = pending.pop()
            path = os.path.join(self.path, relative) if relative else self.path
            if len(self._directories) >= MAX_DIRECTORIES:
                if is_root:
                    raise WatchLimitError(f"more than {MAX_DIRECTORIES} directories to watch")
                self.is_lossy = True
                return
            # Follow a link only if it is the watched path itself.
            flags = _MASK if is_root and not relative else _MASK | 0x02000000
            wd = _libc.inotify_add_watch(self.fd, os.fsencode(path), flags)
            if wd < 0:
                if is_root and not relative:
                    _check(wd, "inotify_add_watch", path)
                continue
            self._directories[wd] = relative
            if self.is_recursive:
                pending += self._scan(wd, path, relative, report_existing=report_existing)

    def _scan(self, wd: int, path: str, relative: str, *, report_existing: bool) -> list[str]:
        below: list[str] = []
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                name = f"{relative}/{entry.name}" if relative else entry.name
                if report_existing:
                    self._report_existing(wd, name, entry)
                if entry.is_dir(follow_symlinks=False):
                    below.append(name)
                if len(below) > MAX_DIRECTORIES or len(self._reported) > MAX_QUEUED:
                    self.is_lossy = True
                    break
        return below

    def _report_existing(self, wd: int, name: str, entry: "os.DirEntry[str]") -> None:
        """Report an entry that was created before its directory was watched."""
        self._reported.add((wd, entry.name))
        self._push(FileEvent(name, EventType.CREATE))
        if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_size:
            self._push(FileEvent(name, EventType.WRITE))

    def _unfollow(self, relative: str) -> None:
        """Stop watching a directory that was moved away: its names would be stale."""
        inside = relative + "/"
        for wd, name in tuple(self._directories.items()):
            if name == relative or name.startswith(inside):
                del self._directories[wd]
                _libc.inotify_rm_watch(self.fd, wd)


def _check(result: int, call: str, path: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}", path)
    return result


class Watchers:
    """All watchers of this envd: those polled by id, and those of streams."""

    def __init__(self, new_id: Callable[[], str] = lambda: "w" + secrets.token_hex(8)) -> None:
        self._new_id = new_id
        self._polled: dict[str, DirectoryWatcher] = {}
        self._streamed: set[DirectoryWatcher] = set()
        self.with_entries: set[str] = set()
        """Ids of watchers whose events contain the entry."""

    @property
    def count(self) -> int:
        """The number of watchers."""
        return len(self._polled) + len(self._streamed)

    def open(self, path: str, *, recursive: bool) -> DirectoryWatcher:
        """Create a watcher for a stream; close it with `release`."""
        self._check_limit()
        watcher = DirectoryWatcher(path, recursive=recursive)
        self._streamed.add(watcher)
        return watcher

    def release(self, watcher: DirectoryWatcher) -> None:
        """Close a stream's watcher."""
        self._streamed.discard(watcher)
        watcher.close()

    def create(self, path: str, *, recursive: bool) -> str:
        """Create a watcher for polling; return its id."""
        self._check_limit()
        ident = self._new_id()
        watcher = DirectoryWatcher(path, recursive=recursive)
        self._polled[ident] = watcher
        if recursive:
            self._read_in_background(watcher)
        return ident

    def take(self, watcher: DirectoryWatcher) -> list[FileEvent]:
        """Return the events of a polled watcher."""
        events = watcher.take()
        if watcher.is_recursive:
            self._read_in_background(watcher)
        return events

    def _read_in_background(self, watcher: DirectoryWatcher) -> None:
        """Read events as they come: new directories must be watched before the next poll."""
        loop = asyncio.get_running_loop()

        def readable() -> None:
            if not watcher.drain():
                loop.remove_reader(watcher.fd)

        loop.add_reader(watcher.fd, readable)

    def get(self, ident: str) -> DirectoryWatcher | None:
        return self._polled.get(ident)

    def remove(self, ident: str) -> bool:
        """Close a polled watcher; return whether there was one."""
        watcher = self._polled.pop(ident, None)
        self.with_entries.discard(ident)
        if watcher is not None:
            watcher.close()
        return watcher is not None

    def close(self) -> None:
        for watcher in (*self._polled.values(), *self._streamed):
            watcher.close()
        self._polled.clear()
        self._streamed.clear()

    def _check_limit(self) -> None:
        if self.count >= MAX_WATCHERS:
            raise WatchLimitError(f"there are {MAX_WATCHERS} watchers already: remove some")
