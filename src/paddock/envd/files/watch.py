"""Watching directories with inotify: raw events in, the client's five event types out.

One inotify instance per watcher. `drain` reads what the kernel has right now, so that an event is
there as soon as the call that caused it has returned. A recursive watcher follows new directories
at once and reports what was put into them before it could look. Queues are bounded; what was
lost is said. RPCs are `filesystem_service`'s.
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
_NETWORK = {0x6969, 0xFF534D42, 0xFE534D42, 0x65735546, 0x01021997, 0x00C36400}


class WatchLimitError(Exception):
    """More watching than is allowed."""


class WatchEvent(Struct, frozen=True):
    """Something happened to `name`, relative to the watched directory."""

    name: str
    type: EventType


def is_network_mount(path: str) -> bool:
    """Whether the directory is on a filesystem others may change unseen."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        return False
    return struct.unpack_from("q", buffer.raw)[0] & 0xFFFFFFFF in _NETWORK


class DirectoryWatcher:
    """One watched directory, with what happened and was not yet taken."""

    def __init__(self, path: str, *, recursive: bool) -> None:
        self.path = path
        self.is_recursive = recursive
        self._events: deque[WatchEvent] = deque()
        self._directories: dict[int, str] = {}
        self._synthetic: set[tuple[int, str]] = set()
        self.is_lossy = False
        """Events were lost since this was last cleared."""
        self.fd = _check(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify_init1", path)
        try:
            self._add("", is_root=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop watching."""
        if self.fd >= 0:
            with contextlib.suppress(RuntimeError):  # no loop: a failed constructor
                asyncio.get_running_loop().remove_reader(self.fd)
            os.close(self.fd)
            self.fd = -1

    def take(self) -> list[WatchEvent]:
        """Drain the kernel's queue and take everything."""
        self.drain()
        taken = list(self._events)
        self._events.clear()
        return taken

    def drain(self) -> bool:
        """Read what the kernel has; false when we hold enough and leave the rest to its queue."""
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
        if self._was_announced(wd, mask, name):
            return
        for bits, kind in _TYPES:
            if mask & bits:
                self._push(WatchEvent(relative, kind))
        if self.is_recursive and mask & IN_ISDIR:
            if mask & (IN_CREATE | IN_MOVED_TO):
                self._follow(relative, is_new=bool(mask & IN_CREATE))
            elif mask & IN_MOVED_FROM:
                self._unfollow(relative)

    def _was_announced(self, wd: int, mask: int, name: str) -> bool:
        """Whether this creation was reported already, when its directory was first looked into."""
        if (wd, name) not in self._synthetic:
            return False
        if mask & (IN_CREATE | IN_DELETE | IN_MOVED_FROM):
            self._synthetic.discard((wd, name))
        return bool(mask & IN_CREATE)

    def _push(self, event: WatchEvent) -> None:
        if len(self._events) >= 2 * MAX_QUEUED:
            self.is_lossy = True
        else:
            self._events.append(event)

    def _follow(self, relative: str, *, is_new: bool) -> None:
        """Watch a directory that appeared, and report what is in it already if it is new."""
        with contextlib.suppress(OSError):  # gone again, or replaced by something else
            self._add(relative, announce=is_new)

    def _add(self, relative: str, *, is_root: bool = False, announce: bool = False) -> None:
        pending = [relative]
        while pending:
            relative = pending.pop()
            path = os.path.join(self.path, relative) if relative else self.path
            if len(self._directories) >= MAX_DIRECTORIES:
                if is_root:
                    raise WatchLimitError(f"more than {MAX_DIRECTORIES} directories to watch")
                self.is_lossy = True
                return
            # A link is followed only where the client named it.
            flags = _MASK if is_root and not relative else _MASK | 0x02000000
            wd = _libc.inotify_add_watch(self.fd, os.fsencode(path), flags)
            if wd < 0:
                if is_root and not relative:
                    _check(wd, "inotify_add_watch", path)
                continue
            self._directories[wd] = relative
            if self.is_recursive:
                pending += self._scan(wd, path, relative, announce=announce)

    def _scan(self, wd: int, path: str, relative: str, *, announce: bool) -> list[str]:
        below: list[str] = []
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                name = f"{relative}/{entry.name}" if relative else entry.name
                if announce:
                    self._announce(wd, name, entry)
                if entry.is_dir(follow_symlinks=False):
                    below.append(name)
                if len(below) > MAX_DIRECTORIES or len(self._synthetic) > MAX_QUEUED:
                    self.is_lossy = True
                    break
        return below

    def _announce(self, wd: int, name: str, entry: "os.DirEntry[str]") -> None:
        """Report what happened in a new directory before we could watch it."""
        self._synthetic.add((wd, entry.name))
        self._push(WatchEvent(name, EventType.CREATE))
        if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_size:
            self._push(WatchEvent(name, EventType.WRITE))

    def _unfollow(self, relative: str) -> None:
        """A directory was moved away: its descriptors would report stale names."""
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
    """Every watcher of this envd: those polled by id, and those a stream holds."""

    def __init__(self, new_id: Callable[[], str] = lambda: "w" + secrets.token_hex(8)) -> None:
        self._new_id = new_id
        self._polled: dict[str, DirectoryWatcher] = {}
        self._streamed: set[DirectoryWatcher] = set()
        self.with_entries: set[str] = set()
        """Ids whose events carry the entry."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._polled) + len(self._streamed)

    def open(self, path: str, *, recursive: bool) -> DirectoryWatcher:
        """Make a watcher for a stream; give it back with `release`."""
        self._admit()
        watcher = DirectoryWatcher(path, recursive=recursive)
        self._streamed.add(watcher)
        return watcher

    def release(self, watcher: DirectoryWatcher) -> None:
        """Close a stream's watcher."""
        self._streamed.discard(watcher)
        watcher.close()

    def create(self, path: str, *, recursive: bool) -> str:
        """Make a watcher to be polled; gives its id."""
        self._admit()
        ident = self._new_id()
        watcher = DirectoryWatcher(path, recursive=recursive)
        self._polled[ident] = watcher
        if recursive:
            self._keep_up(watcher)
        return ident

    def take(self, watcher: DirectoryWatcher) -> list[WatchEvent]:
        """Take a polled watcher's events."""
        events = watcher.take()
        if watcher.is_recursive:
            self._keep_up(watcher)
        return events

    def _keep_up(self, watcher: DirectoryWatcher) -> None:
        """New directories must be watched at once, not when the client asks next."""
        loop = asyncio.get_running_loop()

        def readable() -> None:
            if not watcher.drain():
                loop.remove_reader(watcher.fd)

        loop.add_reader(watcher.fd, readable)

    def get(self, ident: str) -> DirectoryWatcher | None:
        """Find a polled watcher."""
        return self._polled.get(ident)

    def remove(self, ident: str) -> bool:
        """Close a polled watcher; false if there is none."""
        watcher = self._polled.pop(ident, None)
        self.with_entries.discard(ident)
        if watcher is not None:
            watcher.close()
        return watcher is not None

    def close(self) -> None:
        """Close all of them."""
        for watcher in (*self._polled.values(), *self._streamed):
            watcher.close()
        self._polled.clear()
        self._streamed.clear()

    def _admit(self) -> None:
        if self.count >= MAX_WATCHERS:
            raise WatchLimitError(f"there are {MAX_WATCHERS} watchers already: remove some")
