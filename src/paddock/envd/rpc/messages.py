"""The messages of `process.Process` and `filesystem.Filesystem`, and their protobuf tables.

Each message is a frozen struct. msgspec derives its JSON form (camelCase, base64, defaults
omitted); `FIELDS` holds the protobuf tables for the codec in `proto.py`.
A field that is `None` is absent; of a oneof at most one field is set.
"""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType

from msgspec import Struct

from paddock.envd.rpc.proto import Field, field


class RpcMessage(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The base of all RPC messages."""


class Empty(RpcMessage, frozen=True):
    """A message without fields: many responses, `keepalive`, WatchDir's `start`."""


class Signal(StrEnum):
    """Signals a client may send."""

    UNSPECIFIED = "SIGNAL_UNSPECIFIED"
    TERM = "SIGNAL_SIGTERM"
    KILL = "SIGNAL_SIGKILL"


class FileType(StrEnum):
    """The type of an entry, links followed."""

    UNSPECIFIED = "FILE_TYPE_UNSPECIFIED"
    FILE = "FILE_TYPE_FILE"
    DIRECTORY = "FILE_TYPE_DIRECTORY"
    SYMLINK = "FILE_TYPE_SYMLINK"


class EventType(StrEnum):
    """The kind of change to a watched entry."""

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
    """Request a terminal instead of pipes."""

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
    """Selects a process by pid or by tag."""

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
    """The request of `Start`."""

    process: ProcessConfig | None = None
    pty: Pty | None = None
    tag: str | None = None
    stdin: bool | None = None


class SelectRequest(RpcMessage, frozen=True):
    """The request of `Connect` and `CloseStdin`."""

    process: ProcessSelector | None = None


class UpdateRequest(RpcMessage, frozen=True):
    """The request of `Update`: resize a terminal."""

    process: ProcessSelector | None = None
    pty: Pty | None = None


class SendInputRequest(RpcMessage, frozen=True):
    """The request of `SendInput`."""

    process: ProcessSelector | None = None
    input: ProcessInput | None = None


class SendSignalRequest(RpcMessage, frozen=True):
    """The request of `SendSignal`."""

    process: ProcessSelector | None = None
    signal: Signal = Signal.UNSPECIFIED


class StreamInputStart(RpcMessage, frozen=True):
    """The first message of an input stream: selects the process."""

    process: ProcessSelector | None = None


class StreamInputData(RpcMessage, frozen=True):
    """Input in an input stream."""

    input: ProcessInput | None = None


class StreamInputRequest(RpcMessage, frozen=True):
    """One message of an input stream."""

    start: StreamInputStart | None = None
    data: StreamInputData | None = None
    keepalive: Empty | None = None


class StartEvent(RpcMessage, frozen=True):
    """The process has started; the pid is the one inside the sandbox."""

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
    """One event of a process."""

    start: StartEvent | None = None
    data: DataEvent | None = None
    end: EndEvent | None = None
    keepalive: Empty | None = None


class ProcessEventResponse(RpcMessage, frozen=True):
    """The response stream of `Start` and `Connect`."""

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
    """The request of `Stat`, `MakeDir` and `Remove`."""

    path: str = ""


class EntryResponse(RpcMessage, frozen=True):
    """The response of `Stat`, `MakeDir` and `Move`."""

    entry: EntryInfo | None = None


class MoveRequest(RpcMessage, frozen=True):
    """The request of `Move`; missing parents of the destination are created."""

    source: str = ""
    destination: str = ""


class ListDirRequest(RpcMessage, frozen=True):
    """The request of `ListDir`; `depth` is the number of levels (0 means 1)."""

    path: str = ""
    depth: int = 0


class ListDirResponse(RpcMessage, frozen=True):
    """Entries in lexical walk order."""

    entries: tuple[EntryInfo, ...] = ()


class WatchRequest(RpcMessage, frozen=True):
    """The request of `WatchDir` and `CreateWatcher`."""

    path: str = ""
    recursive: bool = False
    include_entry: bool = False
    allow_network_mounts: bool = False


class FilesystemEvent(RpcMessage, frozen=True):
    """A change to `name`, which is relative to the watched directory."""

    name: str = ""
    type: EventType = EventType.UNSPECIFIED
    entry: EntryInfo | None = None


class WatchDirResponse(RpcMessage, frozen=True):
    """The response stream of `WatchDir`."""

    start: Empty | None = None
    filesystem: FilesystemEvent | None = None
    keepalive: Empty | None = None


class WatcherId(RpcMessage, frozen=True):
    """The response of `CreateWatcher`; the request of `GetWatcherEvents` and `RemoveWatcher`."""

    watcher_id: str = ""


class WatcherEvents(RpcMessage, frozen=True):
    """The response of `GetWatcherEvents`: the events since the last call."""

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
