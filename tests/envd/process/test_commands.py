"""The RPC service `process.Process`: events, exits, signals, deadlines, input, terminals."""

import asyncio
import base64
import json
import os
import resource
import signal as signals
import time
from pathlib import Path

import pytest

from paddock.envd.process import registry
from paddock.envd.process.direct_spawner import DirectSpawner
from paddock.envd.process.init_client import close_all
from paddock.envd.process.init_spawner import InitSpawner
from paddock.envd.process.spawner import Command, SpawnError
from tests.envd.conftest import Init
from tests.envd.rig import USER_UID, Rig, end, frame, output

pytestmark = pytest.mark.timeout(120)

is_root = pytest.mark.skipif(os.geteuid() != 0, reason="switching users needs root")


async def until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        await asyncio.sleep(0.01)


async def test_a_command_streams_its_pid_output_and_end(rig: Rig) -> None:
    events = await rig.run("echo $$; echo oops >&2; exit 3")

    assert events[0]["start"]["pid"] == int(output(events))
    assert output(events, "stderr") == b"oops\n"
    assert end(events) == {
        "exitCode": 3,
        "exited": True,
        "status": "exit status 3",
        "error": "exit status 3",
    }


async def test_a_successful_end_has_no_error(rig: Rig) -> None:
    assert end(await rig.run("true")) == {"exited": True, "status": "exit status 0"}


@is_root
async def test_the_user_of_the_request_runs_the_command(rig: Rig) -> None:
    basic = base64.b64encode(b"root:").decode()

    as_default = await rig.run("id -u; id -G; echo $HOME $USER $LOGNAME")
    as_root = await rig.run(
        "id -u", headers={"authorization": f"Basic {basic}"}, process={"cwd": "/"}
    )

    assert output(as_default).decode().split("\n")[:3] == [
        str(USER_UID),
        f"{USER_UID} 4321",
        f"{rig.home} user user",
    ]
    assert output(as_root) == b"0\n"


async def test_an_unknown_user_is_unauthenticated(rig: Rig) -> None:
    basic = base64.b64encode(b"nobody-here:").decode()

    events = await rig.run("true", headers={"authorization": f"Basic {basic}"})

    assert events[-1]["$end"]["error"]["code"] == "unauthenticated"


async def test_variables_of_the_request_override_those_of_the_sandbox(rig: Rig) -> None:
    await rig.request("POST", "/init", b'{"envVars":{"A":"1","B":"2"}}', control=True)

    events = await rig.run(
        "echo $E2B_SANDBOX $E2B_SANDBOX_ID $E2B_TEMPLATE_ID $A $B $C; pwd",
        process={"envs": {"B": "mine", "C": "3"}},
    )

    assert output(events).decode() == f"true isbx base 1 mine 3\n{rig.home}\n"


async def test_a_command_starts_in_the_default_directory(rig: Rig) -> None:
    await rig.request("POST", "/init", b'{"defaultWorkdir":"/usr/share"}', control=True)

    assert output(await rig.run("pwd")) == b"/usr/share\n"
    assert output(await rig.run("pwd", process={"cwd": "/tmp"})) == b"/tmp\n"


@is_root
async def test_a_command_has_default_priority_and_a_raised_oom_score(rig: Rig) -> None:
    events = await rig.run("nice; cat /proc/self/oom_score_adj; umask")

    assert output(events).split() == [str(os.nice(0)).encode(), b"100", b"0022"]


async def test_a_missing_cwd_is_an_invalid_argument(rig: Rig) -> None:
    events = await rig.run("true", process={"cwd": "/nowhere/at/all"})

    assert events[-1]["$end"]["error"]["code"] == "invalid_argument"
    assert "/nowhere/at/all" in events[-1]["$end"]["error"]["message"]


async def test_a_missing_program_is_an_invalid_argument(rig: Rig) -> None:
    stream = await rig.stream("process.Process/Start", {"process": {"cmd": "/no/such/program"}})
    events = await stream.rest()
    stream.close()

    assert events[-1]["$end"]["error"]["code"] == "invalid_argument"


async def test_a_command_that_fails_for_lack_of_descriptors_leaks_none() -> None:
    """With commands forked by envd itself, as in pods."""
    command = Command(argv=("/bin/true",), env={}, cwd="/", uid=0, gid=0)
    held = set(Path("/proc/self/fd").iterdir())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spawner = DirectSpawner(switch_user=False)
    first = os.dup(0)  # the lowest free descriptor
    os.close(first)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + 3, limits[1]))
    try:
        with pytest.raises(SpawnError) as refused:
            await spawner.spawn(command, lambda status: None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert refused.value.is_resource_exhausted
    assert set(Path("/proc/self/fd").iterdir()) <= held


async def test_a_command_whose_descriptors_did_not_arrive_is_killed(init: Init) -> None:
    lost, ended = [], []
    command = Command(argv=("/bin/sleep", "60"), env={}, cwd="/", uid=0, gid=0)
    spawner = InitSpawner(init.channel(), lost.append)
    await spawner.attach(lambda pid: lambda status: None)
    held = set(Path("/proc/self/fd").iterdir())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = os.dup(0)  # the lowest free descriptor
    os.close(first)
    for room in (0, 1):
        resource.setrlimit(resource.RLIMIT_NOFILE, (first + room, limits[1]))
        try:
            with pytest.raises(SpawnError) as refused:
                await spawner.spawn(command, ended.append)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert refused.value.is_resource_exhausted
        assert set(Path("/proc/self/fd").iterdir()) <= held
    children = Path(f"/proc/{init.process.pid}/task/{init.process.pid}/children")
    assert children.read_text() == ""
    # The sandbox still runs, and init keeps neither command.
    assert (lost, ended) == ([], [])
    child = await spawner.spawn(command, ended.append)
    close_all((*child.outputs.values(),))
    assert await spawner._client.ping() == 1
    spawner.close()


async def test_kill_ends_the_stream_even_if_a_grandchild_holds_the_pipe(rig: Rig) -> None:
    stream = await rig.start("sleep 300 & echo $!; exec sleep 300")
    pid = (await stream.event())["start"]["pid"]
    grandchild = int(output([await stream.event()]))

    answer = await rig.process("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
    async with asyncio.timeout(60):
        events = await stream.rest()

    assert answer.status == 200
    assert end(events) == {
        "exitCode": -1,
        "status": "signal: killed",
        "error": "signal: killed",
    }
    os.kill(grandchild, 9)
    stream.close()


async def test_sigterm_is_reported_as_terminated(rig: Rig) -> None:
    stream = await rig.start("exec sleep 30")
    pid = (await stream.event())["start"]["pid"]

    await rig.process("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGTERM"})

    assert end(await stream.rest())["status"] == "signal: terminated"
    stream.close()


async def test_a_program_that_catches_a_signal_ends_with_its_own_status(rig: Rig) -> None:
    stream = await rig.start(
        "trap 'sleep 300 & echo $!; exit 7' TERM; echo set; while :; do sleep 0.05; done"
    )
    pid = (await stream.event())["start"]["pid"]
    assert output([await stream.event()]) == b"set\n"

    await rig.process("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGTERM"})

    async with asyncio.timeout(60):  # although its background process holds the pipes
        events = await stream.rest()
    assert end(events) == {
        "exitCode": 7,
        "exited": True,
        "status": "exit status 7",
        "error": "exit status 7",
    }
    os.kill(int(output(events)), 9)
    stream.close()


@pytest.mark.parametrize(
    ("signal", "words"),
    [("HUP", "hangup"), ("INT", "interrupt"), ("SEGV", "segmentation fault"), ("KILL", "killed")],
)
async def test_signals_are_reported_by_the_names_that_clients_compare(
    rig: Rig, signal: str, words: str
) -> None:
    told = end(await rig.run(f"ulimit -c 0; kill -{signal} $$; sleep 30"))

    assert told["exitCode"] == -1
    assert "exited" not in told
    assert told["status"] == told["error"] == f"signal: {words}"


async def test_a_command_receives_signals_that_envd_ignores() -> None:
    """With commands forked by envd itself, which was started by `nohup` or the like."""
    ended = asyncio.get_running_loop().create_future()
    before = signals.signal(signals.SIGHUP, signals.SIG_IGN)
    try:
        spawner = DirectSpawner(switch_user=False)
        command = Command(
            argv=("/bin/sh", "-c", "kill -HUP $$; exit 3"), env={}, cwd="/", uid=0, gid=0
        )
        child = await spawner.spawn(command, ended.set_result)
        os.kill(os.getpid(), signals.SIGHUP)  # envd itself still ignores it
        status = await ended
        for descriptor in child.outputs.values():
            os.close(descriptor)
    finally:
        signals.signal(signals.SIGHUP, before)

    assert status.signal == signals.SIGHUP


async def test_signalling_an_unknown_process_is_not_found(rig: Rig) -> None:
    answer = await rig.process(
        "SendSignal", {"process": {"pid": 4_000_000}, "signal": "SIGNAL_SIGKILL"}
    )

    assert (answer.status, answer.json()["code"]) == (404, "not_found")


async def test_a_command_is_killed_at_its_deadline(rig: Rig) -> None:
    # On a stalled machine the first deadline may pass before there is output.
    for milliseconds in ("2000", "20000"):
        stream = await rig.start(
            "echo here; exec sleep 60", headers={"connect_timeout_ms": milliseconds}
        )
        pid = (await stream.event())["start"]["pid"]

        events = await stream.rest()

        assert events[-1]["$end"]["error"]["code"] == "deadline_exceeded"
        await until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
        stream.close()
        if output(events):
            break
    assert output(events) == b"here\n"


async def test_a_disconnect_does_not_kill_and_connect_finds_the_process_again(rig: Rig) -> None:
    stream = await rig.start("read line; echo got $line", tag="mine", stdin=True)
    pid = (await stream.event())["start"]["pid"]
    stream.close()

    again = await rig.stream("process.Process/Connect", {"process": {"tag": "mine"}})
    assert (await again.event())["start"]["pid"] == pid
    await rig.process(
        "SendInput",
        {"process": {"pid": pid}, "input": {"stdin": base64.b64encode(b"hello\n").decode()}},
    )
    events = await again.rest()

    assert output(events) == b"got hello\n"
    assert end(events)["exited"] is True
    again.close()


async def test_connected_clients_receive_the_end_of_a_command_killed_at_its_deadline(
    rig: Rig,
) -> None:
    """The deadline is that of the starting client; other streams must have an end event."""
    starter = await rig.start("echo here; exec sleep 60", headers={"connect_timeout_ms": "1500"})
    pid = (await starter.event())["start"]["pid"]
    meanwhile = await rig.stream("process.Process/Connect", {"process": {"pid": pid}})
    assert (await starter.rest())[-1]["$end"]["error"]["code"] == "deadline_exceeded"
    afterwards = await rig.stream("process.Process/Connect", {"process": {"pid": pid}})

    for connected in (meanwhile, afterwards):
        told = end(await connected.rest())
        assert told["exitCode"] == -1
        assert told["status"] == "signal: killed"
        connected.close()
    starter.close()


async def test_the_deadline_of_connect_ends_the_stream_only(rig: Rig) -> None:
    stream = await rig.start("exec sleep 30")
    pid = (await stream.event())["start"]["pid"]

    other = await rig.stream(
        "process.Process/Connect", {"process": {"pid": pid}}, connect_timeout_ms="100"
    )
    events = await other.rest()

    assert events[-1]["$end"]["error"]["code"] == "deadline_exceeded"
    assert (await rig.process("List")).json()["processes"][0]["pid"] == pid
    await rig.process("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
    await stream.rest()
    stream.close()
    other.close()


async def test_an_ended_command_can_be_connected_to_but_is_not_listed(rig: Rig) -> None:
    pid = (await rig.run("exit 7"))[0]["start"]["pid"]

    late = await rig.stream("process.Process/Connect", {"process": {"pid": pid}})
    events = await late.rest()

    assert events[0]["start"]["pid"] == pid
    assert end(events)["exitCode"] == 7
    assert (await rig.process("List")).json() == {}
    late.close()


async def test_only_the_latest_ended_commands_are_retained(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_ENDED", 3)
    pids = [(await rig.run("true"))[0]["start"]["pid"] for _ in range(6)]

    async def is_known(pid: int) -> bool:
        late = await rig.stream("process.Process/Connect", {"process": {"pid": pid}})
        events = await late.rest()
        late.close()
        return "error" not in events[-1]["$end"]

    assert [await is_known(pid) for pid in pids] == [False] * 3 + [True] * 3


async def test_list_returns_command_environment_directory_and_tag(rig: Rig) -> None:
    stream = await rig.start("exec sleep 30", tag="t1", process={"envs": {"A": "b"}, "cwd": "/tmp"})
    pid = (await stream.event())["start"]["pid"]

    listed = (await rig.process("List")).json()["processes"]

    assert listed == [
        {
            "config": {
                "cmd": "/bin/bash",
                "args": ["-c", "exec sleep 30"],
                "envs": {"A": "b"},
                "cwd": "/tmp",
            },
            "pid": pid,
            "tag": "t1",
        }
    ]
    await rig.process("SendSignal", {"process": {"tag": "t1"}, "signal": "SIGNAL_SIGKILL"})
    await stream.rest()
    stream.close()


async def test_without_a_subscriber_output_is_discarded_and_nothing_blocks(
    rig: Rig, tmp_path: Path
) -> None:
    done = rig.home / "done"
    stream = await rig.start(f"head -c 3000000 /dev/zero; touch {done}")
    await stream.event()
    stream.close()

    await until(done.exists)


async def test_a_slow_subscriber_slows_the_command_and_loses_no_output(rig: Rig) -> None:
    size = 20_000_000
    stream = await rig.start(f"head -c {size} /dev/zero; echo finished > progress")
    await stream.event()
    await asyncio.sleep(0.5)  # long enough to write everything without backpressure

    assert not (rig.home / "progress").exists()
    received = 0
    async for event in stream.events():
        received += len(output([event]))
    assert received == size
    stream.close()


async def test_a_slow_subscriber_slows_a_command_that_writes_small_chunks(rig: Rig) -> None:
    stream = await rig.start("for i in {1..4000}; do printf %05000d 0; done; touch progress")
    await stream.event()
    await asyncio.sleep(1.5)  # without backpressure it writes 20 MB in less

    assert not (rig.home / "progress").exists()
    received = 0
    async for event in stream.events():
        received += len(output([event]))
    assert received == 20_000_000
    stream.close()


async def test_all_data_precede_the_end_event(rig: Rig) -> None:
    events = await rig.run("head -c 1000000 /dev/zero | tr '\\0' x; head -c 200000 /dev/zero >&2")

    assert len(output(events)) == 1_000_000
    assert len(output(events, "stderr")) == 200_000
    assert max(len(output([e], k)) for e in events for k in ("stdout", "stderr")) <= 32768
    end(events)


async def test_standard_input_is_closed_on_request(rig: Rig) -> None:
    stream = await rig.start("wc -c", stdin=True)
    pid = (await stream.event())["start"]["pid"]

    data = base64.b64encode(b"x" * 300_000).decode()
    await rig.process("SendInput", {"process": {"pid": pid}, "input": {"stdin": data}})
    closed = await rig.process("CloseStdin", {"process": {"pid": pid}})
    events = await stream.rest()
    again = await rig.process("CloseStdin", {"process": {"pid": pid}})

    assert closed.status == 200
    assert output(events).strip() == b"300000"
    assert again.status == 404
    stream.close()


async def test_standard_input_is_open_unless_it_is_declined(rig: Rig) -> None:
    """Old clients do not set the field and send input nevertheless."""
    stream = await rig.start("cat")
    pid = (await stream.event())["start"]["pid"]
    sent = await rig.process("SendInput", {"process": {"pid": pid}, "input": {"stdin": "eA=="}})
    await rig.process("CloseStdin", {"process": {"pid": pid}})

    assert sent.status == 200
    assert output(await stream.rest()) == b"x"
    declined = await rig.run("cat; readlink /proc/self/fd/0", stdin=False)
    assert output(declined) == b"/dev/null\n"
    stream.close()


async def test_input_to_a_closed_standard_input_is_an_internal_error(rig: Rig) -> None:
    stream = await rig.start("cat; exec sleep 30", stdin=False)
    pid = (await stream.event())["start"]["pid"]

    answer = await rig.process("SendInput", {"process": {"pid": pid}, "input": {"stdin": "eA=="}})

    assert (answer.status, answer.json()["code"]) == (500, "internal")
    await rig.process("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
    await stream.rest()
    stream.close()


async def test_an_input_stream_keeps_order(rig: Rig) -> None:
    stream = await rig.start("head -c 26", stdin=True)
    pid = (await stream.event())["start"]["pid"]
    letters = [bytes([c]) for c in range(ord("a"), ord("z") + 1)]
    body = frame({"start": {"process": {"pid": pid}}})
    for letter in letters:
        body += frame({"data": {"input": {"stdin": base64.b64encode(letter).decode()}}})
        body += frame({"keepalive": {}})

    wire = await rig.wire()
    await wire.send(
        "POST", "/process.Process/StreamInput", {"content-type": "application/connect+json"}, body
    )
    answer = await wire.response()

    assert output(await stream.rest()) == b"".join(letters)
    assert answer.body == frame(b"{}") + frame(b"{}", 2)
    wire.close()
    stream.close()


async def test_a_terminal_has_a_size_and_input_and_can_be_resized(rig: Rig) -> None:
    stream = await rig.stream(
        "process.Process/Start",
        {
            "process": {"cmd": "/bin/bash", "args": ["--norc", "-i"]},
            "pty": {"size": {"cols": 91, "rows": 33}},
        },
    )
    pid = (await stream.event())["start"]["pid"]

    async def say(text: str) -> None:
        data = base64.b64encode(text.encode()).decode()
        answer = await rig.process("SendInput", {"process": {"pid": pid}, "input": {"pty": data}})
        assert answer.status == 200

    async def hear(wanted: bytes) -> None:
        heard = b""
        async with asyncio.timeout(20):
            while wanted not in heard:
                heard += output([await stream.event()], "pty")

    await say("stty size\n")
    await hear(b"33 91")
    resized = await rig.process(
        "Update", {"process": {"pid": pid}, "pty": {"size": {"cols": 100, "rows": 50}}}
    )
    assert resized.status == 200
    await say("stty size; test -t 0 && tty\n")
    await hear(b"50 100")
    wrong = await rig.process("SendInput", {"process": {"pid": pid}, "input": {"stdin": "eA=="}})
    assert wrong.json()["code"] == "internal"
    assert (await rig.process("CloseStdin", {"process": {"pid": pid}})).json()["code"] == "internal"
    await say("exit 5\n")
    assert end(await stream.rest())["exitCode"] == 5
    stream.close()


async def test_a_silent_stream_receives_keepalives(rig: Rig) -> None:
    stream = await rig.start("exec sleep 30", headers={"keepalive_ping_interval": "1"})
    pid = (await stream.event())["start"]["pid"]

    async with asyncio.timeout(20):
        assert await stream.event() == {"keepalive": {}}

    await rig.process("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
    await stream.rest()
    stream.close()


async def test_a_message_that_is_not_json_is_an_invalid_argument(rig: Rig) -> None:
    answer = await rig.request(
        "POST", "/process.Process/List", b"{nonsense", content_type="application/json"
    )

    assert (answer.status, answer.json()["code"]) == (400, "invalid_argument")


async def test_all_json_spellings_of_proto3_are_accepted(
    rig: Rig,
) -> None:
    stream = await rig.start("exec sleep 30")
    pid = (await stream.event())["start"]["pid"]

    body = json.dumps({"process": {"pid": str(pid), "tag": None}, "signal": 9}, indent=2).encode()
    answer = await rig.request(
        "POST", "/process.Process/SendSignal", body, content_type="application/json; charset=utf-8"
    )

    assert answer.status == 200
    assert end(await stream.rest())["status"] == "signal: killed"
    stream.close()


async def test_a_command_runs_although_its_client_disconnects_while_it_starts(
    rig: Rig,
) -> None:
    message = {"process": {"cmd": "/bin/sleep", "args": ["30"]}, "tag": "left"}
    for _ in range(5):
        wire = await rig.wire()
        await wire.send(
            "POST",
            "/process.Process/Start",
            {"content-type": "application/connect+json"},
            frame(message),
        )
        wire.writer.transport.abort()

    await until(lambda: len(list(rig.envd.registry.running())) == 5)
    await until(lambda: not any(p._subscribers for p in rig.envd.registry.running()))
    for process in list(rig.envd.registry.running()):
        await process.signal(9)
    await until(lambda: not any(rig.envd.registry.running()))


async def test_a_command_is_killed_at_its_deadline_after_its_client_disconnected(rig: Rig) -> None:
    stream = await rig.start("exec sleep 30", headers={"connect_timeout_ms": "1000"})
    pid = (await stream.event())["start"]["pid"]
    stream.close()

    await until(lambda: not Path(f"/proc/{pid}").exists())
