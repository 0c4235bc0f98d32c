"""The client of the code interpreter against a real HTTP server."""

import asyncio
import base64
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import aclosing

import aiohttp
import msgspec
import pytest
from aiohttp import web

from paddock.kit.errors import (
    DeadlineExceededError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    PaddockError,
    RateLimitedError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
)
from paddock.run_code.client import CodeInterpreter
from paddock.run_code.events import (
    BadStreamError,
    CodeError,
    CodeResult,
    EventOmitted,
    RunBroken,
    RunEnded,
    RunStarted,
    StderrText,
    StdoutText,
    parse,
)
from paddock.run_code.http import sandbox_session
from tests.run_code.server import Run, interpreter_server, serving

HEADERS = {"E2b-Sandbox-Id": "i1", "E2b-Sandbox-Port": "49999", "X-Access-Token": "token"}


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def events_of(interpreter: CodeInterpreter, code: str = "1 + 1", **options) -> list:
    return [event async for event in interpreter.run(code, **options)]


async def test_a_run_yields_its_output_results_and_end_in_order(session) -> None:
    picture = base64.b64encode(b"\x89PNG").decode()

    async def behave(run: Run) -> None:
        await run.send(type="number_of_executions", execution_count=1)
        await run.send(type="stdout", text="out\n", timestamp="2026-11-19T00:00:00Z")
        await run.send(type="stderr", text="err\n", timestamp="2026-11-19T00:00:00Z")
        await run.send(type="result", png=picture, is_main_result=False, extra={})
        await run.send(type="result", text="2", is_main_result=True, data={"a": [1]})
        await run.send(type="end_of_execution")

    async with interpreter_server(behave) as server:
        found = await events_of(CodeInterpreter(session, server.url, HEADERS))
    started, out, err, shown, main, end = found
    assert started == RunStarted(1)
    assert (out, err) == (StdoutText("out\n"), StderrText("err\n"))
    assert shown.image().mime == "image/png"
    assert shown.image().decoded() == b"\x89PNG"
    assert (main.text, main.is_main_result, bytes(main.data)) == ("2", True, b'{"a": [1]}')
    assert main.image() is None
    assert end == RunEnded()


async def test_the_request_names_the_sandbox_and_what_to_run(session) -> None:
    async def behave(run: Run) -> None:
        await run.send(type="end_of_execution")

    async with interpreter_server(behave) as server:
        interpreter = CodeInterpreter(session, server.url, HEADERS)
        await events_of(interpreter)
        await events_of(interpreter, "ls", language="bash", env={"A": "1"})
    first, second = server.bodies
    assert first == {"code": "1 + 1", "context_id": None, "language": None, "env_vars": None}
    assert (second["language"], second["env_vars"]) == ("bash", {"A": "1"})
    assert server.headers[0].items() >= HEADERS.items()


async def test_lines_may_arrive_in_any_pieces(session) -> None:
    async def behave(run: Run) -> None:
        for byte in b'\n{"type":"stdout","text":"a"}\n{"type":"end_of_execution"}\n':
            await run.write(bytes([byte]))

    async with interpreter_server(behave) as server:
        found = await events_of(CodeInterpreter(session, server.url, HEADERS))
    assert found == [StdoutText("a"), RunEnded()]


async def test_an_event_that_is_too_large_is_left_out_and_the_run_goes_on(session) -> None:
    async def behave(run: Run) -> None:
        await run.write(b'{"type":"stdout","text":"')
        for _ in range(64):
            await run.write(b"x" * 65536)
        await run.write(b'"}\n')
        await run.send(type="result", text="2")
        await run.send(type="end_of_execution")

    async with interpreter_server(behave) as server:
        interpreter = CodeInterpreter(session, server.url, HEADERS, max_event_bytes=100_000)
        omitted, result, end = await events_of(interpreter)
    assert isinstance(omitted, EventOmitted)
    assert omitted.size_bytes > 64 * 65536
    assert result == CodeResult(text="2")
    assert end == RunEnded()


async def test_keepalives_and_events_of_unknown_types_are_skipped(session) -> None:
    async def behave(run: Run) -> None:
        await run.send(type="keepalive")
        await run.send(type="later invention", text=1)
        await run.send(type="error", name="NameError", value="x", traceback="line 1", more=1)
        await run.send(type="unexpected_end_of_execution")

    async with interpreter_server(behave) as server:
        found = await events_of(CodeInterpreter(session, server.url, HEADERS))
    assert found == [CodeError("NameError", "x", "line 1"), RunBroken()]


async def test_what_only_python_accepts_as_json_is_replaced(session) -> None:
    async def behave(run: Run) -> None:
        await run.write(b'{"type":"stdout","text":"\\ud800!"}\n')
        await run.write(b'{"type":"result","data":{"a":[NaN,1.5]}}\n')
        await run.send(type="end_of_execution")

    async with interpreter_server(behave) as server:
        text, result, _ = await events_of(CodeInterpreter(session, server.url, HEADERS))
    assert text == StdoutText("?!")
    assert msgspec.json.decode(result.data) == {"a": [None, 1.5]}


async def test_a_large_line_that_only_python_accepts_is_left_out(session) -> None:
    line = b'{"type":"result","text":"1","data":{"a":[NaN' + b",1" * 1000 + b"]}}"

    async def behave(run: Run) -> None:
        await run.write(line + b"\n")
        await run.send(type="end_of_execution")

    async with interpreter_server(behave) as server:
        strict = CodeInterpreter(session, server.url, HEADERS, max_lenient_bytes=1000)
        assert await events_of(strict) == [EventOmitted(len(line)), RunEnded()]
        lenient = CodeInterpreter(session, server.url, HEADERS)
        assert (await events_of(lenient))[0].text == "1"


async def test_data_of_results_is_not_decoded() -> None:
    arrays = b"[],[]," * 100_000
    line = b'{"type":"result","text":"1","data":{"a":[' + arrays + b'[]]},"extra":[1]}'
    tracemalloc.start()
    try:
        result = parse(line)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(result, CodeResult)
    assert peak < len(line), "decoded, it takes twenty times its size"


async def test_a_stream_is_given_up_when_it_is_too_long(session) -> None:
    async def behave(run: Run) -> None:
        while True:
            await run.send(type="later invention", text="x" * 1000)

    async with interpreter_server(behave) as server:
        interpreter = CodeInterpreter(session, server.url, HEADERS, max_stream_bytes=1 << 20)
        with pytest.raises(TooLargeError, match="more than 1 MiB"):
            await events_of(interpreter)


async def test_a_redirect_of_the_sandbox_is_not_followed() -> None:
    paths: list[str] = []

    async def redirect(request: web.Request) -> web.StreamResponse:
        headers = {"Location": "/internal", "Set-Cookie": "stolen=1; Path=/"}
        return web.Response(status=307, headers=headers)

    async def internal(request: web.Request) -> web.StreamResponse:
        paths.append(request.path)
        return web.Response()

    def routes(app: web.Application) -> None:
        app.router.add_route("*", "/internal", internal)

    async with serving(redirect, routes) as url, sandbox_session() as opened:
        with pytest.raises(BadStreamError, match="redirect"):
            await events_of(CodeInterpreter(opened, url, HEADERS))
        assert not list(opened.cookie_jar), "a cookie would go to other sandboxes"
    assert paths == []


@pytest.mark.parametrize(
    "line",
    [
        b"<html>",
        b"[1]",
        b'{"type":"stdout","text":1}',
        b'{"text":"a"}',
        b'{"type":"stdout"',
        b"\xff",
    ],
    ids=["html", "array", "wrong type", "no type", "incomplete", "not UTF-8"],
)
async def test_another_server_on_the_port_is_an_error(session, line: bytes) -> None:
    async def behave(run: Run) -> None:
        await run.write(line + b"\n")

    async with interpreter_server(behave) as server:
        with pytest.raises(BadStreamError, match="not an event"):
            await events_of(CodeInterpreter(session, server.url, HEADERS))


async def test_deep_nesting_is_an_error_and_no_crash(session) -> None:
    async def behave(run: Run) -> None:
        await run.write(b'{"type":"result","json":' + b"[" * 200_000 + b"\n")

    async with interpreter_server(behave) as server:
        with pytest.raises(BadStreamError):
            await events_of(CodeInterpreter(session, server.url, HEADERS))


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "closed"])
async def test_a_stream_without_an_end_means_that_the_sandbox_is_gone(session, is_cut) -> None:
    async def behave(run: Run) -> None:
        await run.send(type="stdout", text="a")
        if is_cut:
            run.cut()

    async with interpreter_server(behave) as server:
        with pytest.raises(UnavailableError, match="ended or was paused while the code ran"):
            await events_of(CodeInterpreter(session, server.url, HEADERS))


async def test_a_run_that_takes_too_long_is_interrupted(session) -> None:
    async def behave(run: Run) -> None:
        while True:
            await run.send(type="stdout", text="tick")
            await asyncio.sleep(0.001)

    async with interpreter_server(behave) as server:
        interpreter = CodeInterpreter(session, server.url, HEADERS)
        with pytest.raises(DeadlineExceededError, match=r"more than 0\.5 s"):
            await events_of(interpreter, timeout_seconds=0.5)
        await asyncio.wait_for(server.disconnected.wait(), 10)


async def test_closing_the_generator_disconnects(session) -> None:
    async def behave(run: Run) -> None:
        await run.send(type="stdout", text="started")
        await asyncio.sleep(3600)

    async with interpreter_server(behave) as server:
        interpreter = CodeInterpreter(session, server.url, HEADERS)
        async with aclosing(interpreter.run("wait()")) as events:
            assert await anext(events) == StdoutText("started")
        await asyncio.wait_for(server.disconnected.wait(), 10)


async def test_silence_means_that_the_connection_is_lost(session) -> None:
    async def behave(run: Run) -> None:
        await asyncio.sleep(3600)

    async with interpreter_server(behave) as server:
        interpreter = CodeInterpreter(session, server.url, HEADERS, silence_seconds=0.5)
        with pytest.raises(UnavailableError, match=r"sent nothing for 0\.5 s"):
            await events_of(interpreter)


CLOSED = {"message": "The sandbox is running but port is not open", "code": 502, "port": 49999}
REFUSALS = [
    ("no interpreter", 502, CLOSED, {}, UnsupportedError, "its template has no code interpreter"),
    ("starts", 502, CLOSED, {"Retry-After": "1"}, UnavailableError, "port is not open"),
    ("gone", 502, {"message": "The sandbox was not found"}, {}, NotFoundError, "was not found"),
    ("killed", 502, {"message": "The sandbox ended"}, {}, UnavailableError, "sandbox ended"),
    ("no context", 404, "Context abc not found", {}, NotFoundError, "Context abc not found"),
    ("both", 400, "Only one of them", {}, InvalidError, "Only one of them"),
    ("private", 403, {"message": "secured"}, {}, ForbiddenError, "secured"),
    ("busy", 429, {"message": "too many"}, {"Retry-After": "7"}, RateLimitedError, "too many"),
    ("waking", 503, {"message": "not woken"}, {}, UnavailableError, "not woken"),
    ("kernel", 500, "no kernel for cobol", {}, PaddockError, "no kernel for cobol"),
    ("silent", 500, "", {}, PaddockError, "500 Internal Server Error"),
]


@pytest.mark.parametrize(
    ("status", "body", "headers", "kind", "message"),
    [pytest.param(*case[1:], id=case[0]) for case in REFUSALS],
)
async def test_a_refusal_becomes_an_error(session, status, body, headers, kind, message) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        if isinstance(body, str):
            return web.Response(status=status, text=body, headers=headers)
        return web.json_response(body, status=status, headers=headers)

    async with serving(refuse) as url:
        with pytest.raises(kind, match=message) as raised:
            await events_of(CodeInterpreter(session, url, HEADERS))
    if isinstance(raised.value, RateLimitedError):
        assert raised.value.retry_after_seconds == 7


async def test_a_gateway_that_does_not_run_is_an_error_with_advice(session) -> None:
    with pytest.raises(UnavailableError, match="does not answer") as raised:
        await events_of(CodeInterpreter(session, "http://127.0.0.1:1", HEADERS))
    assert raised.value.hint is not None
    assert "paddock up" in raised.value.hint


async def test_an_image_that_is_no_base64_has_no_bytes() -> None:
    image = CodeResult(png="a").image()
    assert image is not None
    assert image.decoded() is None
