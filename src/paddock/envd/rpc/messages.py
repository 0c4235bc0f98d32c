"""The messages of `process.Process` and `filesystem.Filesystem`, and their protobuf tables.

Each message is a frozen struct whose JSON form (camelCase, base64, defaults omitted) msgspec
knows by itself; `FIELDS` adds what the binary form needs. The codec is `proto`.
A field that is `None` is absent; of a oneof at most one field is set.
"""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType

from msgspec import Struct

from paddock.envd.rpc.proto import Field, field


class RpcMessage(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Anything that crosses the wire of an RPC."""


class Empty(RpcMessage, frozen=True):
    """A message without fields: many responses, `keepalive`, WatchDir's `start`."""


class Signal(StrEnum):
    """Signals a client may send."""

    UNSPECIFIED = "SIGNAL_UNSPECIFIED"
    TERM = "SIGNAL_SIGTERM"
    KILL = "SIGNAL_SIGKILL"


class FileType(StrEnum):
    """What an entry is, links followed."""

    UNSPECIFIED = "FILE_TYPE_UNSPECIFIED"
    FILE = "FILE_TYPE_FILE"
    DIRECTORY = "FILE_TYPE_DIRECTORY"
    SYMLINK = "FILE_TYPE_SYMLINK"


class EventType(StrEnum):
    """What happened to a watched entry."""

    UNSPECIFIED = "EVENT_TYPE_UNSPECIFIED"
    CREATE = "EVENT_TYPE_CREATE"
    WRITE = "EVENT_TYPE_WRITE"
    REMOVE = "EVENT_TYPE_REMOVE"
    RENAME = "EVENT_TYPE_RENAME"
    CHMOD = "EVENT_TYPE_CHMOD"


class PtySize(RpcMessage, frozen=True):
    """A terminal's size in characters."""

    cols: int = 0
    rows: int = 0


class Pty(RpcMessage, frozen=True):
    """Ask for a terminal instead of pipes."""

    size: PtySize | None = None


class ProcessConfig(RpcMessage, frozen=True):
    """A command as the client gave it."""

    cmd: str = ""
    args: tuple[str, ...] = ()
    envs: Mapping[str, str] = {}
    cwd: str | None = None


class ProcessInfo(RpcMessage, frozen=True):
    """A running process started through envd."""

    config: ProcessConfig | None = None
    pid: int = 0
    tag: str | None = None


class ProcessSelector(RpcMessage, frozen=True):
    """Which process: by pid or by tag."""

    pid: int | None = None
    tag: str | None = None


class ProcessInput(RpcMessage, frozen=True):
    """Bytes for a process's standard input or terminal."""

    stdin: bytes | None = None
    pty: bytes | None = None


class ListResponse(RpcMessage, frozen=True):
    """Every running process."""

    processes: tuple[ProcessInfo, ...] = ()


class StartRequest(RpcMessage, frozen=True):
    """Start a command and stream what it says."""

    process: ProcessConfig | None = None
    pty: Pty | None = None
    tag: str | None = None
    stdin: bool | None = None


class SelectRequest(RpcMessage, frozen=True):
    """`Connect` and `CloseStdin`: only which process."""

    process: ProcessSelector | None = None


class UpdateRequest(RpcMessage, frozen=True):
    """Resize a terminal."""

    process: ProcessSelector | None = None
    pty: Pty | None = None


class SendInputRequest(RpcMessage, frozen=True):
    """Write to a process."""

    process: ProcessSelector | None = None
    input: ProcessInput | None = None


class SendSignalRequest(RpcMessage, frozen=True):
    """Signal a process."""

    process: ProcessSelector | None = None
    signal: Signal = Signal.UNSPECIFIED


class StreamInputStart(RpcMessage, frozen=True):
    """First message of an input stream: whom it is for."""

    process: ProcessSelector | None = None


class StreamInputData(RpcMessage, frozen=True):
    """One piece of an input stream."""

    input: ProcessInput | None = None


class StreamInputRequest(RpcMessage, frozen=True):
    """One message of an input stream."""

    start: StreamInputStart | None = None
    data: StreamInputData | None = None
    keepalive: Empty | None = None


class StartEvent(RpcMessage, frozen=True):
    """The process runs, under this pid inside the sandbox."""

    pid: int = 0


class DataEvent(RpcMessage, frozen=True):
    """Output, from exactly one of the three."""

    stdout: bytes | None = None
    stderr: bytes | None = None
    pty: bytes | None = None


class EndEvent(RpcMessage, frozen=True):
    """The process ended; nothing follows."""

    exit_code: int = 0
    exited: bool = False
    status: str = ""
    error: str | None = None


class ProcessEvent(RpcMessage, frozen=True):
    """One event in a process's life."""

    start: StartEvent | None = None
    data: DataEvent | None = None
    end: EndEvent | None = None
    keepalive: Empty | None = None


class ProcessEventResponse(RpcMessage, frozen=True):
    """What `Start` and `Connect` stream."""

    event: ProcessEvent | None = None


class EntryInfo(RpcMessage, frozen=True):
    """A file, directory or link."""

    name: str = ""
    type: FileType = FileType.UNSPECIFIED
    path: str = ""
    size: int = 0
    mode: int = 0
    permissions: str = ""
    owner: str = ""
    group: str = ""
    modified_time: datetime | None = None
    symlink_target: str | None = None
    metadata: Mapping[str, str] = {}
    is_symlink: bool = False


class PathRequest(RpcMessage, frozen=True):
    """`Stat`, `MakeDir` and `Remove`: only a path."""

    path: str = ""


class EntryResponse(RpcMessage, frozen=True):
    """`Stat`, `MakeDir` and `Move` answer with the entry."""

    entry: EntryInfo | None = None


class MoveRequest(RpcMessage, frozen=True):
    """Rename, creating the destination's parents."""

    source: str = ""
    destination: str = ""


class ListDirRequest(RpcMessage, frozen=True):
    """List a directory, `depth` levels deep (0 means 1)."""

    path: str = ""
    depth: int = 0


class ListDirResponse(RpcMessage, frozen=True):
    """Entries in lexical walk order."""

    entries: tuple[EntryInfo, ...] = ()


class WatchRequest(RpcMessage, frozen=True):
    """`WatchDir` and `CreateWatcher`."""

    path: str = ""
    recursive: bool = False
    include_entry: bool = False
    allow_network_mounts: bool = False


class FilesystemEvent(RpcMessage, frozen=True):
    """Something happened to `name`, relative to the watched directory."""

    name: str = ""
    type: EventType = EventType.UNSPECIFIED
    entry: EntryInfo | None = None


class WatchDirResponse(RpcMessage, frozen=True):
    """What `WatchDir` streams."""

    start: Empty | None = None
    filesystem: FilesystemEvent | None = None
    keepalive: Empty | None = None


class WatcherId(RpcMessage, frozen=True):
    """`CreateWatcher`'s answer; `GetWatcherEvents` and `RemoveWatcher` ask with it."""

    watcher_id: str = ""


class WatcherEvents(RpcMessage, frozen=True):
    """What happened since the last call."""

    events: tuple[FilesystemEvent, ...] = ()


_SIGNALS = {Signal.UNSPECIFIED: 0, Signal.TERM: 15, Signal.KILL: 9}
_FILE_TYPES: Mapping[StrEnum, int] = {kind: number for number, kind in enumerate(FileType)}
_EVENT_TYPES: Mapping[StrEnum, int] = {kind: number for number, kind in enumerate(EventType)}

FIELDS: Mapping[type[Struct], tuple[Field, ...]] = MappingProxyType(
    {
        Empty: (),
        PtySize: (field(1, "cols", "varint"), field(2, "rows", "varint")),
        Pty: (field(1, "size", PtySize),),
        ProcessConfig: (
            field(1, "cmd", "string"),
            field(2, "args", "string", repeated=True),
            field(3, "envs", "map"),
            field(4, "cwd", "string", optional=True),
        ),
        ProcessInfo: (
            field(1, "config", ProcessConfig),
            field(2, "pid", "varint"),
            field(3, "tag", "string", optional=True),
        ),
        ProcessSelector: (
            field(1, "pid", "varint", optional=True),
            field(2, "tag", "string", optional=True),
        ),
        ProcessInput: (
            field(1, "stdin", "bytes", optional=True),
            field(2, "pty", "bytes", optional=True),
        ),
        ListResponse: (field(1, "processes", ProcessInfo, repeated=True),),
        StartRequest: (
            field(1, "process", ProcessConfig),
            field(2, "pty", Pty),
            field(3, "tag", "string", optional=True),
            field(4, "stdin", "bool", optional=True),
        ),
        SelectRequest: (field(1, "process", ProcessSelector),),
        UpdateRequest: (field(1, "process", ProcessSelector), field(2, "pty", Pty)),
        SendInputRequest: (
            field(1, "process", ProcessSelector),
            field(2, "input", ProcessInput),
        ),
        SendSignalRequest: (
            field(1, "process", ProcessSelector),
            field(2, "signal", "enum", enum=_SIGNALS),
        ),
        StreamInputStart: (field(1, "process", ProcessSelector),),
        StreamInputData: (field(2, "input", ProcessInput),),
        StreamInputRequest: (
            field(1, "start", StreamInputStart),
            field(2, "data", StreamInputData),
            field(3, "keepalive", Empty),
        ),
        StartEvent: (field(1, "pid", "varint"),),
        DataEvent: (
            field(1, "stdout", "bytes", optional=True),
            field(2, "stderr", "bytes", optional=True),
            field(3, "pty", "bytes", optional=True),
        ),
        EndEvent: (
            field(1, "exit_code", "zigzag"),
            field(2, "exited", "bool"),
            field(3, "status", "string"),
            field(4, "error", "string", optional=True),
        ),
        ProcessEvent: (
            field(1, "start", StartEvent),
            field(2, "data", DataEvent),
            field(3, "end", EndEvent),
            field(4, "keepalive", Empty),
        ),
        ProcessEventResponse: (field(1, "event", ProcessEvent),),
        EntryInfo: (
            field(1, "name", "string"),
            field(2, "type", "enum", enum=_FILE_TYPES),
            field(3, "path", "string"),
            field(4, "size", "varint"),
            field(5, "mode", "varint"),
            field(6, "permissions", "string"),
            field(7, "owner", "string"),
            field(8, "group", "string"),
            field(9, "modified_time", "timestamp", optional=True),
            field(10, "symlink_target", "string", optional=True),
            field(11, "metadata", "map"),
            field(12, "is_symlink", "bool"),
        ),
        PathRequest: (field(1, "path", "string"),),
        EntryResponse: (field(1, "entry", EntryInfo),),
        MoveRequest: (field(1, "source", "string"), field(2, "destination", "string")),
        ListDirRequest: (field(1, "path", "string"), field(2, "depth", "varint")),
        ListDirResponse: (field(1, "entries", EntryInfo, repeated=True),),
        WatchRequest: (
            field(1, "path", "string"),
            field(2, "recursive", "bool"),
            field(3, "include_entry", "bool"),
            field(4, "allow_network_mounts", "bool"),
        ),
        FilesystemEvent: (
            field(1, "name", "string"),
            field(2, "type", "enum", enum=_EVENT_TYPES),
            field(3, "entry", EntryInfo),
        ),
        WatchDirResponse: (
            field(1, "start", Empty),
            field(2, "filesystem", FilesystemEvent),
            field(3, "keepalive", Empty),
        ),
        WatcherId: (field(1, "watcher_id", "string"),),
        WatcherEvents: (field(1, "events", FilesystemEvent, repeated=True),),
    }
)
