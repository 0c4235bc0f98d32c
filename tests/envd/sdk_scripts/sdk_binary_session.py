"""Every RPC method in binary, by the SDK's generated clients; run by the SDK's interpreter.

The SDK itself speaks JSON; its stubs also speak protobuf, and compress what they send.
"""

import sys

from e2b.envd.filesystem import filesystem_connect, filesystem_pb
from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof

ADDRESS, TOKEN = sys.argv[1:]
HEADERS = {"X-Access-Token": TOKEN}
fs = filesystem_pb
process = process_connect.ProcessClientSync(ADDRESS)
files = filesystem_connect.FilesystemClientSync(ADDRESS)


def by_pid(pid: int) -> process_pb.ProcessSelector:
    return process_pb.ProcessSelector(selector=Oneof("pid", pid))


def stdin(data: bytes) -> process_pb.ProcessInput:
    return process_pb.ProcessInput(input=Oneof("stdin", data))


def command(script: str, **more) -> process_pb.StartRequest:
    config = process_pb.ProcessConfig(cmd="/bin/bash", args=["-c", script], envs={"A": "ü"})
    return process_pb.StartRequest(process=config, **more)


def start(request: process_pb.StartRequest):
    stream = process.start(request, headers=HEADERS)
    first = next(stream).event.event
    assert first.field == "start", first
    return first.value.pid, stream


def of(data) -> bytes:
    """Return the bytes of a data event of any stream."""
    return data.output.value


# -- processes

pid, stream = start(command("echo $A; exit 3"))
events = [answer.event.event for answer in stream]
assert b"".join(of(e.value) for e in events if e.field == "data") == "ü\n".encode()
assert (events[-1].value.exit_code, events[-1].value.status) == (3, "exit status 3"), events[-1]

pid, stream = start(command("cat; exec sleep 60", tag="t", stdin=True))
listed = process.list(process_pb.ListRequest(), headers=HEADERS).processes
assert [(one.pid, one.tag, one.config.cmd) for one in listed] == [(pid, "t", "/bin/bash")]
process.send_input(
    process_pb.SendInputRequest(process=by_pid(pid), input=stdin(b"one")), headers=HEADERS
)


def inputs():
    begin = process_pb.StreamInputRequest.StartEvent(process=by_pid(pid))
    yield process_pb.StreamInputRequest(event=Oneof("start", begin))
    for word in (b" two", b" three"):
        data = process_pb.StreamInputRequest.DataEvent(input=stdin(word))
        yield process_pb.StreamInputRequest(event=Oneof("data", data))


process.stream_input(inputs(), headers=HEADERS)
heard = b""
while heard != b"one two three":
    heard += of(next(stream).event.event.value)
process.close_stdin(process_pb.CloseStdinRequest(process=by_pid(pid)), headers=HEADERS)
other = process.connect(
    process_pb.ConnectRequest(process=process_pb.ProcessSelector(selector=Oneof("tag", "t"))),
    headers=HEADERS,
)
assert next(other).event.event.value.pid == pid
process.send_signal(
    process_pb.SendSignalRequest(process=by_pid(pid), signal=process_pb.Signal.SIGKILL),
    headers=HEADERS,
)
for one in (stream, other):
    *_, last = (answer.event.event for answer in one)
    assert (last.field, last.value.exit_code, last.value.status) == ("end", -1, "signal: killed")

size = process_pb.PTY.Size(cols=77, rows=11)
pid, stream = start(command("read; stty size", pty=process_pb.PTY(size=size)))
bigger = process_pb.PTY(size=process_pb.PTY.Size(cols=78, rows=12))
process.update(process_pb.UpdateRequest(process=by_pid(pid), pty=bigger), headers=HEADERS)
enter = process_pb.ProcessInput(input=Oneof("pty", b"\n"))
process.send_input(process_pb.SendInputRequest(process=by_pid(pid), input=enter), headers=HEADERS)
events = [answer.event.event for answer in stream]
assert b"12 78" in b"".join(of(e.value) for e in events if e.field == "data"), events

# -- files

made = files.make_dir(fs.MakeDirRequest(path="d"), headers=HEADERS).entry
assert (made.name, made.type, made.owner) == ("d", fs.FileType.DIRECTORY, "user"), made
watched = files.watch_dir(fs.WatchDirRequest(path="d", recursive=True), headers=HEADERS)
assert next(watched).event.field == "start"
watcher = files.create_watcher(
    fs.CreateWatcherRequest(path="d", include_entry=True), headers=HEADERS
).watcher_id
files.make_dir(fs.MakeDirRequest(path="d/e"), headers=HEADERS)
moved = files.move(fs.MoveRequest(source="d/e", destination="d/f"), headers=HEADERS).entry
assert moved.path.endswith("/d/f")
assert files.stat(fs.StatRequest(path="d/f"), headers=HEADERS).entry == moved
names = files.list_dir(fs.ListDirRequest(path="", depth=2), headers=HEADERS).entries
assert [one.name for one in names] == ["d", "f"], names
events = files.get_watcher_events(
    fs.GetWatcherEventsRequest(watcher_id=watcher), headers=HEADERS
).events
assert [(e.name, e.type) for e in events if e.type != fs.EventType.CHMOD] == [
    ("e", fs.EventType.CREATE),
    ("e", fs.EventType.RENAME),
    ("f", fs.EventType.CREATE),
], events
assert events[-1].entry.path == moved.path
first = next(watched).event
assert (first.field, first.value.name, first.value.type) == ("filesystem", "e", 1), first
files.remove_watcher(fs.RemoveWatcherRequest(watcher_id=watcher), headers=HEADERS)
files.remove(fs.RemoveRequest(path="d"), headers=HEADERS)
assert not files.list_dir(fs.ListDirRequest(path=""), headers=HEADERS).entries
print("done")
