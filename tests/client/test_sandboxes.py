"""The client against a server that speaks as Paddock and envd do."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from paddock.client import envd, sandboxes
from paddock.client.model import (
    CodeOutcome,
    CodeRun,
    Interrupted,
    OpenSandbox,
    ShellCommand,
    WantedSandbox,
)
from paddock.client.output import OutputTail
from paddock.client.sandboxes import ClientAddresses, HttpSandboxes
from paddock.kit.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    PaddockError,
    QuotaExceededError,
    RateLimitedError,
    UnavailableError,
)
from paddock.run_code.events import CodeResult
from paddock.runtime import envd_api

BOX = OpenSandbox("i1", access_token="token")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def client(handle: Handler) -> AsyncGenerator[HttpSandboxes]:
    """A client of a server with one handler."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("")).rstrip("/")
        yield HttpSandboxes(session, ClientAddresses(url, url, url), {"X-API-Key": "key"})


def frame(message: Any, flags: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return envd_api.FRAME_HEAD.pack(flags, len(data)) + data


def output(data: bytes) -> bytes:
    return frame({"event": {"data": {"stdout": base64.b64encode(data).decode()}}})


START = frame({"event": {"start": {"pid": 7}}})
END = frame({"event": {"end": {"exitCode": 2, "exited": True}}}) + frame({}, 2)


def streaming(*parts: bytes, commands: list[str] | None = None) -> Handler:
    """A handler that streams these parts, and records commands."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if commands is not None:
            asked = json.loads(body[envd_api.FRAME_HEAD.size :])
            commands.append(asked["process"]["args"][-1])
            if len(commands) > 1:
                return web.Response(body=START + END)
        response = web.StreamResponse()
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        return response

    return handle


async def run(boxes: HttpSandboxes, out: OutputTail | None = None) -> int:
    command = ShellCommand(text="make", seconds=5)
    return await boxes.run_command(BOX, command, out or OutputTail(), OutputTail())


async def test_a_command_streams_its_output_and_returns_its_exit_code() -> None:
    seen: list[web.Request] = []
    stream = streaming(START, output(b"a"), output(b"b"), END)

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        return await stream(request)

    out = OutputTail()
    async with client(handle) as boxes:
        assert await run(boxes, out) == 2
    assert out.text == "ab"
    headers = seen[0].headers
    assert headers["E2b-Sandbox-Id"] == "i1"
    assert headers["X-Access-Token"] == "token"
    assert headers["Connect-Timeout-Ms"] == "5000", "envd ends it if nobody else can"
    assert "X-API-Key" not in headers, "a sandbox does not get the API key"


async def test_a_command_that_prints_too_much_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envd, "MAX_OUTPUT_BYTES", 1000)
    commands: list[str] = []
    async with client(streaming(START, output(bytes(2000)), commands=commands)) as boxes:
        with pytest.raises(Interrupted, match="MiB of output"):
            await run(boxes)
    assert commands == ["make", "kill -KILL -- -7"]


async def test_a_command_whose_caller_is_cancelled_is_killed() -> None:
    commands: list[str] = []
    has_started, is_killed = asyncio.Event(), asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        commands.append(json.loads(body[envd_api.FRAME_HEAD.size :])["process"]["args"][-1])
        if len(commands) > 1:
            is_killed.set()
            return web.Response(body=START + END)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(START + output(b"x"))
        has_started.set()
        await is_killed.wait()
        return response

    class Noticed(OutputTail):
        def add(self, data: bytes) -> None:
            has_output.set()

    has_output = asyncio.Event()
    async with client(handle) as boxes:
        running = asyncio.create_task(run(boxes, Noticed()))
        await has_output.wait()
        running.cancel()
        await asyncio.wait((running,))
        await is_killed.wait()
    assert running.cancelled()
    assert commands == ["make", "kill -KILL -- -7"]


async def test_a_command_that_ran_too_long_was_interrupted() -> None:
    late = frame({"error": {"code": "deadline_exceeded", "message": "late"}}, 2)
    async with client(streaming(START, output(b"x"), late, commands=[])) as boxes:
        with pytest.raises(Interrupted, match="killed after 5 s"):
            await run(boxes)


@pytest.mark.parametrize(
    "parts",
    [(START,), (START, b"\0\0"), (START, b"\0\0\0\0\2{]"), (envd_api.FRAME_HEAD.pack(0, 1 << 30),)],
    ids=["no end", "half a head", "no JSON", "too large"],
)
async def test_a_stream_that_breaks_is_an_error(parts: tuple[bytes, ...]) -> None:
    async with client(streaming(*parts, commands=[])) as boxes:
        with pytest.raises(UnavailableError):
            await run(boxes)


@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        (403, {}, ForbiddenError),
        (404, {}, NotFoundError),
        (409, {}, ConflictError),
        (429, {}, QuotaExceededError),
        (429, {"Retry-After": "7"}, RateLimitedError),
        (503, {}, UnavailableError),
        (500, {}, UnavailableError),
    ],
    ids=["forbidden", "absent", "conflict", "quota", "rate", "unavailable", "internal"],
)
async def test_a_refusal_is_an_error_with_its_message(
    status: int, headers: dict[str, str], kind: type[PaddockError]
) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response({"message": "no"}, status=status, headers=headers)

    async with client(handle) as boxes:
        with pytest.raises(kind, match="no"):
            await boxes.connect("i1", seconds=60)


async def test_a_server_that_is_gone_is_unavailable() -> None:
    async with client(streaming()) as boxes:
        pass
    async with aiohttp.ClientSession() as session:
        gone = HttpSandboxes(session, ClientAddresses(boxes.url(BOX, 1), "", ""), {})
        with pytest.raises(UnavailableError, match="does not answer"):
            await gone.connect("i1", seconds=60)


async def test_a_new_sandbox_pauses_at_its_end_and_carries_its_idempotency_key() -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append((request.headers["Idempotency-Key"], await request.json()))
        return web.json_response({"sandboxID": "i1", "templateID": "base"}, status=201)

    async with client(handle) as boxes:
        wanted = WantedSandbox(template="base", seconds=60, idempotency_key="k")
        assert (await boxes.create(wanted)).sandbox_id == "i1"
    [(key, body)] = seen
    assert (key, body["autoPause"], body["autoResume"]) == ("k", True, {"enabled": True})


async def test_pausing_a_paused_sandbox_is_no_error() -> None:
    state = "paused"

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            return web.json_response({"message": "it is not running"}, status=409)
        now = "2026-01-01T00:00:00Z"
        body = {"sandboxID": "i1", "templateID": "b", "state": state, "metadata": {}}
        return web.json_response({**body, "startedAt": now, "endAt": now})

    async with client(handle) as boxes:
        await boxes.pause("i1")
        state = "running"
        with pytest.raises(ConflictError, match="not running"):
            await boxes.pause("i1")


async def test_a_part_of_a_file_has_the_size_of_the_whole() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.headers["Range"] == "bytes=2-4"
        headers = {"Content-Range": "bytes 2-4/9"}
        return web.Response(body=b"cde", status=206, headers=headers)

    async with client(handle) as boxes:
        part = await boxes.read_file(BOX, "/a", offset=2, limit=3)
    assert (part.data, part.size) == (b"cde", 9)


async def test_nothing_is_read_behind_the_end_of_a_file() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(status=416, headers={"Content-Range": "bytes */3"})

    async with client(handle) as boxes:
        part = await boxes.read_file(BOX, "/a", offset=3, limit=10)
    assert (part.data, part.size) == (b"", 3)


async def test_a_file_without_a_known_length_is_read_from_the_offset() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"abcdef")  # as envd sends files of /proc

    async with client(handle) as boxes:
        part = await boxes.read_file(BOX, "/proc/x", offset=2, limit=3)
    assert (part.data, part.size) == (b"cde", 6)


@pytest.mark.parametrize(
    "call",
    [
        lambda boxes: boxes.list_files(BOX, "/", depth=1),
        lambda boxes: boxes.read_file(BOX, "/a", offset=0, limit=10),
        lambda boxes: boxes.connect("i1", seconds=60),
        run,
    ],
    ids=["list", "read", "connect", "command"],
)
async def test_a_redirect_is_not_followed(call: Callable[[HttpSandboxes], Awaitable[Any]]) -> None:
    paths: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        paths.append(request.path)
        if request.path == "/internal":
            return web.json_response({"entries": [], "sandboxID": "i1"})
        return web.Response(status=307, headers={"Location": "/internal"})

    async with client(handle) as boxes:
        with pytest.raises(UnavailableError, match="redirect to '/internal'"):
            await call(boxes)
    assert "/internal" not in paths


@pytest.mark.parametrize("entry", ['{"path":"' + "x" * 500 + '"}', "{}"], ids=["long", "many"])
async def test_a_listing_that_is_too_large_is_refused(entry: str) -> None:
    body = '{"entries":[' + ",".join([entry] * ((6 << 20) // len(entry) // 2)) + "]}"
    body = body.replace("x" * 500, "x" * 2000)

    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(text=body)

    async with client(handle) as boxes:
        with pytest.raises(InvalidError, match="too many entries"):
            await boxes.list_files(BOX, "/", depth=10)


def running(*lines: bytes) -> Handler:
    """A handler that sends these lines of a run of code, and its end."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"\n".join((*lines, b'{"type":"end_of_execution"}', b"")))

    return handle


async def run_code(boxes: HttpSandboxes) -> CodeOutcome:
    outcome = CodeOutcome()
    code = CodeRun(code="1", language="python", seconds=5)
    await boxes.run_code(BOX, code, outcome, OutputTail(), OutputTail())
    return outcome


async def test_of_results_only_text_and_images_are_kept() -> None:
    line = {"type": "result", "text": "t" * 100_000, "html": "<p>", "png": "AA==", "jpeg": "BB=="}
    more = {"svg": "<svg>", "data": {"a": [1]}, "chart": {}, "extra": {"a/b": 1}, "json": [1]}
    async with client(running(json.dumps({**line, **more}).encode())) as boxes:
        [value] = (await run_code(boxes)).values
    assert value.text is not None
    assert len(value.text) < 33 * 1024
    assert value == CodeResult(text=value.text, png="AA==")


async def test_the_results_of_a_call_share_a_budget() -> None:
    image = json.dumps({"type": "result", "png": "A" * (3 << 20)}).encode()
    async with client(running(image, image, image, image)) as boxes:
        outcome = await run_code(boxes)
    assert (len(outcome.values), outcome.left_out) == (2, 2)


async def test_code_that_sends_results_without_end_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandboxes, "_MAX_STREAM_BYTES", 1 << 20)
    line = json.dumps({"type": "result", "text": "t" * 1000}).encode()
    async with client(running(*[line] * 2000)) as boxes:
        with pytest.raises(Interrupted, match="after 1 MiB of output"):
            await run_code(boxes)


async def test_a_response_to_an_upload_without_end_is_not_read() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"x" * 10_000)
        return response

    async with client(handle) as boxes, asyncio.timeout(20):
        await boxes.write_file(BOX, "/a", b"data")


async def test_the_message_of_a_failed_command_is_short() -> None:
    failed = frame({"error": {"code": "internal", "message": "x" * 1_000_000}}, 2)
    async with client(streaming(START, failed, commands=[])) as boxes:
        with pytest.raises(UnavailableError) as caught:
            await run(boxes)
    assert len(caught.value.message) < 5000
