"""The parts of a process: the order of their stop, and the effect of a failure."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import httpx
import pytest
from starlette.responses import StreamingResponse

from paddock.app.wiring import run_parts
from paddock.app.wiring.http_server import AsgiServer, listen
from paddock.engine.supervisor import StartGroup
from paddock.kit.errors import ConflictError, UnavailableError
from paddock.kit.tasks import background


async def test_requests_in_flight_are_answered_before_controllers_stop() -> None:
    asked, stop, ready = asyncio.Event(), asyncio.Event(), asyncio.Event()
    wanted: asyncio.Queue[asyncio.Future[bytes]] = asyncio.Queue()

    async def app(_scope, _receive, send) -> None:
        asked.set()
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        await wanted.put(answer)
        body = await answer
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def reconcile() -> None:
        await stop.wait()
        while True:
            (await wanted.get()).set_result(b"done")

    listener = listen("127.0.0.1", 0)
    parts = (
        run_parts.group_part("controllers", lambda: {"reconcile": reconcile()}),
        run_parts.server_part(AsgiServer(app, listener, ready.set)),
    )
    async with (
        background(run_parts.run(parts, stop), name="process") as process,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=25
        ) as client,
    ):
        await ready.wait()
        async with background(client.get("/"), name="request") as request:
            await asked.wait()
            stop.set()
            assert (await request).text == "done"
        await process


async def test_streams_do_not_delay_the_stop_and_log_nothing(caplog) -> None:
    stop, ready = asyncio.Event(), asyncio.Event()

    async def lines() -> AsyncGenerator[bytes]:
        yield b"first"
        await asyncio.Event().wait()

    async def app(scope, receive, send) -> None:
        await StreamingResponse(lines())(scope, receive, send)

    listener = listen("127.0.0.1", 0)
    async with (
        background(
            run_parts.run((run_parts.server_part(AsgiServer(app, listener, ready.set)),), stop),
            name="process",
        ) as process,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=25
        ) as client,
    ):
        await ready.wait()
        async with client.stream("GET", "/") as response:
            stream = response.aiter_raw()
            assert await anext(stream) == b"first"
            stop.set()
            with pytest.raises((StopAsyncIteration, httpx.RemoteProtocolError)):
                await anext(stream)
        await process
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_a_failed_part_ends_the_process_with_its_error() -> None:
    left: list[str] = []

    @contextlib.asynccontextmanager
    async def cluster() -> AsyncGenerator[None]:
        yield
        left.append("never: it is cancelled where it waits")

    async def breaks() -> None:
        raise ConflictError("two of us")

    async def lives() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.append("lives")

    parts = (
        run_parts.context_part("cluster", StartGroup.CACHES, cluster),
        run_parts.group_part("controllers", lambda: {"lives": lives(), "breaks": breaks()}),
    )
    with pytest.raises(ConflictError, match="two of us"):
        await run_parts.run(parts, asyncio.Event())
    assert left == ["lives"]


def test_a_port_in_use_is_reported_with_a_hint() -> None:
    with contextlib.closing(listen("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=str(port)) as refused:
            listen("127.0.0.1", port)
    assert "another port" in (refused.value.hint or "")
