"""The server by its protocol: routes, statuses, streams, disconnects, restarts."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from aiohttp import web

from tests.code_interpreter.e2b.conftest import start_server, stop_server

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_run_is_a_stream_of_lines(server) -> None:
    lines = await server.execute("print('hi')\n1 + 1")
    count, printed, result, end = lines
    assert count["type"] == "number_of_executions"
    assert (printed["type"], printed["text"]) == ("stdout", "hi\n")
    assert printed["timestamp"].endswith("Z")
    assert result == {"type": "result", "text": "2", "is_main_result": True, "extra": {}}
    assert end == {"type": "end_of_execution"}


async def test_contexts_are_created_listed_restarted_and_removed(server) -> None:
    async with server.session.post("/contexts", json={"language": "py", "cwd": "/"}) as answer:
        assert answer.status == 500
        assert "'py'" in await answer.text()
    async with server.session.post("/contexts", json={"language": "bash", "cwd": "/usr"}) as answer:
        made = await answer.json()
    assert (made["language"], made["cwd"]) == ("bash", "/usr")
    async with server.session.get("/contexts") as answer:
        listed = await answer.json()
    assert [item["language"] for item in listed[:2]] == ["python", "javascript"]
    assert listed[-1] == made
    lines = await server.execute("pwd", context_id=made["id"])
    assert lines[1]["text"] == "/usr\n"
    async with server.session.post(f"/contexts/{made['id']}/restart") as answer:
        assert (answer.status, await answer.json()) == (200, None)
    async with server.session.delete(f"/contexts/{made['id']}") as answer:
        assert (answer.status, await answer.json()) == (200, None)
    async with server.session.delete(f"/contexts/{made['id']}") as answer:
        assert (answer.status, await answer.text()) == (404, f"Context {made['id']} not found")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"code": "1", "context_id": "x", "language": "python"}, 400),
        ({"code": "1", "context_id": "x"}, 404),
        ({"code": "1", "language": "cobol"}, 500),
        ({"code": 1}, 400),
    ],
)
async def test_a_bad_request_has_its_status_and_a_reason(server, body, status) -> None:
    async with server.session.post("/execute", json=body) as answer:
        assert answer.status == status
        assert await answer.text()


async def test_browsers_may_call_it(server) -> None:
    async with server.session.options("/execute") as answer:
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
    async with server.session.get("/health") as answer:
        assert answer.headers["Access-Control-Allow-Origin"] == "*"


async def test_silence_is_filled_with_keepalives(server) -> None:
    first, *silence, last = await server.execute("import time; time.sleep(5.5)")
    assert (first["type"], last["type"]) == ("number_of_executions", "end_of_execution")
    assert {line["type"] for line in silence} == {"keepalive"}


async def test_the_run_of_a_client_that_leaves_is_interrupted(server) -> None:
    async with server.session.post("/execute", json={"code": "while True: pass"}) as answer:
        assert b"number_of_executions" in await answer.content.readline()
    assert (await server.execute("2"))[1]["text"] == "2"


async def test_a_run_goes_on_if_the_sandbox_is_frozen_when_its_client_is_cut_off(server) -> None:
    code = "import time\nfor step in range(30): time.sleep(0.1)\ndone = step"
    async with server.session.post("/execute", json={"code": code}) as answer:
        assert b"number_of_executions" in await answer.content.readline()
    await asyncio.sleep(0.1)
    os.kill(server.server_pid, signal.SIGSTOP)
    await asyncio.sleep(0.5)
    os.kill(server.server_pid, signal.SIGCONT)
    assert (await server.execute("done"))[1]["text"] == "29"


async def test_a_run_goes_on_if_its_client_is_cut_off_while_the_sandbox_is_frozen(server) -> None:
    code = "import time\nfor step in range(20): time.sleep(0.1)\ndone = -step"
    async with server.session.post("/execute", json={"code": code}) as answer:
        assert b"number_of_executions" in await answer.content.readline()
        await asyncio.sleep(0.2)
        os.kill(server.server_pid, signal.SIGSTOP)
        await asyncio.sleep(0.5)
    os.kill(server.server_pid, signal.SIGCONT)
    assert (await server.execute("done"))[1]["text"] == "-19"


async def test_much_output_through_a_slow_reader_needs_little_memory(server) -> None:
    code = "for i in range(25): print('z' * 4_000_000)"
    before = rss_mib(server.server_pid)
    peak = total = 0
    async with server.session.post("/execute", json={"code": code}) as answer:
        await asyncio.sleep(1.5)
        async for line in answer.content.iter_chunked(1 << 20):
            peak = max(peak, rss_mib(server.server_pid))
            total += len(line)
            await asyncio.sleep(0.002)
    assert total > 100_000_000
    assert peak - before < 70, "some lines of 4 MB, and not the whole output"


def rss_mib(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 >> 20


async def test_a_killed_server_is_back_and_leaves_no_kernels(server) -> None:
    lines = await server.execute("import os; os.getpid()")
    kernel, old = int(lines[1]["text"]), server.server_pid
    os.kill(old, signal.SIGKILL)
    while Path(f"/proc/{old}").exists():
        await asyncio.sleep(0.02)
    await server.until_healthy()
    while _is_running(kernel):
        await asyncio.sleep(0.02)
    assert (await server.execute("x = 1; x"))[1]["text"] == "1"


def _is_running(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for has no arguments."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except FileNotFoundError:
        return False


async def test_the_variables_of_the_sandbox_are_those_of_envd(tmp_path) -> None:
    asked = []

    async def envs(request: web.Request) -> web.Response:
        asked.append(request.headers.get("X-Access-Token"))
        return web.json_response({"WHERE": "it's here"})

    app = web.Application()
    app.add_routes([web.get("/envs", envs)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    server = await start_server(
        tmp_path, CODE_INTERPRETER_ENVIRONMENT_URL=f"http://127.0.0.1:{port}/envs"
    )
    await server.until_healthy()
    show = {"code": "echo $WHERE", "language": "bash"}
    headers = {"X-Access-Token": "secret"}
    assert (await server.execute(headers=headers, **show))[1]["text"] == "it's here\n"
    changed = await server.execute(headers=headers, env_vars={"WHERE": "there"}, **show)
    assert changed[1]["text"] == "there\n"
    assert (await server.execute(headers=headers, **show))[1]["text"] == "it's here\n"
    assert asked == ["secret"]
    (tmp_path / "generation").write_text("another clone")
    await server.execute(headers=headers, **show)
    assert asked == ["secret", "secret"]
    await stop_server(server)
    await runner.cleanup()
