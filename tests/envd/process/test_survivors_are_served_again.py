"""A new envd serves the processes of an earlier one: list, output, input, signals, exits."""

import asyncio
import base64
import os
import signal
import time
from pathlib import Path

import pytest

from paddock.envd.process import registry
from paddock.envd.process.init_spawner import InitSpawner
from tests.envd.conftest import Init
from tests.envd.rig import Rig, end, open_rig, output

pytestmark = pytest.mark.timeout(120)


async def fresh(init: Init, directory: Path) -> Rig:
    directory.mkdir(exist_ok=True)
    return await open_rig(directory, spawner=InitSpawner(init.channel()))


async def test_the_next_envd_lists_feeds_and_ends_a_running_command(
    init: Init, tmp_path: Path
) -> None:
    first = await fresh(init, tmp_path / "one")
    stream = await first.start(
        "while read line; do echo got $line; done; exit 4", tag="echo", stdin=True
    )
    pid = (await stream.event())["start"]["pid"]
    stream.close()
    first.envd.close()

    second = await fresh(init, tmp_path / "two")
    listed = (await second.process("List")).json()["processes"]
    again = await second.stream("process.Process/Connect", {"process": {"tag": "echo"}})
    await again.event()
    data = base64.b64encode(b"hello\n").decode()
    await second.process("SendInput", {"process": {"pid": pid}, "input": {"stdin": data}})
    heard = await again.event()
    await second.process("CloseStdin", {"process": {"pid": pid}})

    assert [(p["pid"], p["tag"], p["config"]["cmd"]) for p in listed] == [
        (pid, "echo", "/bin/bash")
    ]
    assert output([heard]) == b"got hello\n"
    assert end(await again.rest())["exitCode"] == 4
    again.close()
    second.envd.close()


async def test_the_next_envd_reports_an_exit_that_happened_meanwhile(
    init: Init, tmp_path: Path
) -> None:
    first = await fresh(init, tmp_path / "one")
    stream = await first.start("read line; echo last words; exit 9", stdin=True)
    pid = (await stream.event())["start"]["pid"]
    stdin = os.open(f"/proc/{pid}/fd/0", os.O_WRONLY)
    stream.close()
    first.envd.close()
    os.write(stdin, b"go\n")
    os.close(stdin)

    await gone(pid)
    second = await fresh(init, tmp_path / "two")
    late = await second.stream("process.Process/Connect", {"process": {"pid": pid}})

    assert end(await late.rest())["exitCode"] == 9
    late.close()
    second.envd.close()


async def test_the_next_envd_can_kill_a_surviving_command(init: Init, tmp_path: Path) -> None:
    first = await fresh(init, tmp_path / "one")
    stream = await first.start("exec sleep 60")
    pid = (await stream.event())["start"]["pid"]
    stream.close()
    first.envd.close()

    second = await fresh(init, tmp_path / "two")
    again = await second.stream("process.Process/Connect", {"process": {"pid": pid}})
    await second.process("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})

    assert end(await again.rest())["status"] == "signal: killed"
    again.close()
    second.envd.close()


async def test_a_terminal_survives_a_restart_of_envd(init: Init, tmp_path: Path) -> None:
    first = await fresh(init, tmp_path / "one")
    stream = await first.stream(
        "process.Process/Start",
        {
            "process": {"cmd": "/bin/bash", "args": ["--norc", "-i"]},
            "pty": {"size": {"cols": 80, "rows": 24}},
        },
    )
    pid = (await stream.event())["start"]["pid"]
    stream.close()
    first.envd.close()

    second = await fresh(init, tmp_path / "two")
    again = await second.stream("process.Process/Connect", {"process": {"pid": pid}})
    await again.event()
    data = base64.b64encode(b"echo $((6*7)); exit 3\n").decode()
    await second.process("SendInput", {"process": {"pid": pid}, "input": {"pty": data}})
    events = await again.rest()

    assert b"42" in output(events, "pty")
    assert end(events)["exitCode"] == 3
    again.close()
    second.envd.close()


async def gone(pid: int) -> None:
    async with asyncio.timeout(20):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.02)


async def test_a_deadline_survives_a_restart_of_envd(init: Init, tmp_path: Path) -> None:
    first = await fresh(init, tmp_path / "one")
    stream = await first.start("exec sleep 60", headers={"connect_timeout_ms": "1500"})
    pid = (await stream.event())["start"]["pid"]
    stream.close()
    first.envd.close()

    second = await fresh(init, tmp_path / "two")

    await gone(pid)
    second.envd.close()


async def test_a_deadline_that_passed_during_a_pause_is_restarted(
    init: Init, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "PAUSED_SECONDS", 0.5)
    rig = await fresh(init, tmp_path / "one")
    stream = await rig.start("exec sleep 60", headers={"connect_timeout_ms": "2000"})
    pid = (await stream.event())["start"]["pid"]
    os.kill(init.process.pid, signal.SIGSTOP)  # for envd this looks like a frozen sandbox
    await asyncio.sleep(3.0)
    woke = time.monotonic()
    os.kill(init.process.pid, signal.SIGCONT)

    await gone(pid)

    assert time.monotonic() - woke > 1.5
    assert (await stream.rest())[-1]["$end"]["error"]["code"] == "deadline_exceeded"
    stream.close()
    rig.envd.close()


def test_a_stored_deadline_is_never_later_than_the_timeout() -> None:
    memo = registry._Memo(timeout=60.0, until=1000.0)

    assert memo.remaining(990.0) == 10.0
    assert memo.remaining(5000.0) == 60.0  # the sandbox was paused
    assert memo.remaining(3.0) == 60.0  # the machine was rebooted
