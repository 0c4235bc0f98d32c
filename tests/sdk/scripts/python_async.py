"""Checks of E2B's asynchronous Python SDK against a whole installation."""

import asyncio

import e2b
from e2b import AsyncSandbox, SandboxQuery, SandboxState
from e2b.sandbox.commands.command_handle import PtySize
from harness import check, main_async

IS_NEWEST = hasattr(AsyncSandbox, "fork")


async def until(condition, seconds=60):
    async with asyncio.timeout(seconds):
        while not (found := await condition()):
            await asyncio.sleep(0.05)
        return found


@check
async def create_run_and_kill():
    box = await AsyncSandbox.create(timeout=600, metadata={"kind": "async"})
    done = await asyncio.gather(*(box.commands.run(f"echo {n}") for n in range(20)))
    assert [item.stdout for item in done] == [f"{n}\n" for n in range(20)]
    info = await box.get_info()
    assert info.metadata == {"kind": "async"}
    assert await box.is_running()
    assert await box.kill() is True
    assert await box.is_running() is False


@check
async def many_sandboxes_at_once():
    boxes = await asyncio.gather(*(AsyncSandbox.create() for _ in range(6)))
    assert len({box.sandbox_id for box in boxes}) == 6
    done = await asyncio.gather(*(box.commands.run("hostname") for box in boxes))
    assert len({item.stdout for item in done}) == 6
    assert all(await asyncio.gather(*(box.kill() for box in boxes)))


@check
async def background_commands_and_files():
    box = await AsyncSandbox.create()
    received = []
    handle = await box.commands.run(
        "read line; echo got $line", background=True, stdin=True, on_stdout=received.append
    )
    await box.commands.send_stdin(handle.pid, "hello\n")
    assert (await handle.wait()).stdout == "got hello\n"
    assert "".join(received) == "got hello\n"
    await box.files.write("a.txt", "text")
    assert await box.files.read("a.txt") == "text"
    failed = None
    try:
        await box.commands.run("exit 9")
    except e2b.CommandExitException as error:
        failed = error
    assert failed is not None
    assert failed.exit_code == 9
    await box.kill()


@check
async def watching_and_terminals():
    box = await AsyncSandbox.create()
    await box.files.make_dir("watched")
    seen = []
    handle = await box.files.watch_dir("watched", lambda e: seen.append((e.name, e.type.value)))
    await box.files.write("watched/f", "x")

    async def three():
        return len(seen) >= 3

    await until(three)
    assert seen == [("f", "create"), ("f", "chmod"), ("f", "write")]
    await handle.stop()
    shown = []
    terminal = await box.pty.create(PtySize(rows=30, cols=100), on_data=shown.append)
    await box.pty.send_stdin(terminal.pid, b"echo $((6*7))x; exit\n")
    await terminal.wait()
    assert b"42x" in b"".join(shown)
    await box.kill()


@check
async def pause_list_and_connect():
    box = await AsyncSandbox.create(metadata={"kind": "async-pause"})
    await box.files.write("kept.txt", "kept")
    handle = await box.commands.run("sleep 1000", background=True, timeout=0)
    await (box.pause() if IS_NEWEST else box.beta_pause())
    wanted = SandboxQuery(metadata={"kind": "async-pause"}, state=[SandboxState.PAUSED])
    found = await AsyncSandbox.list(query=wanted).next_items()
    assert [item.sandbox_id for item in found] == [box.sandbox_id]
    again = await AsyncSandbox.connect(box.sandbox_id)
    assert await again.files.read("kept.txt") == "kept"
    assert handle.pid in [process.pid for process in await again.commands.list()]
    await again.kill()


@check(newer=True)
async def snapshots_and_forks():
    box = await AsyncSandbox.create()
    await box.files.write("state.txt", "one")
    snapshot = await box.create_snapshot()
    clone = await AsyncSandbox.create(snapshot.snapshot_id)
    assert await clone.files.read("state.txt") == "one"
    (fork,) = await box.fork(timeout=600)
    assert await fork.files.read("state.txt") == "one"
    await asyncio.gather(box.kill(), clone.kill(), fork.kill())


asyncio.run(main_async(IS_NEWEST))
