"""Held requests: one waking for all, each forwarded once, bounded in every way."""

import asyncio
import gc
import json

import pytest
from msgspec import structs

from paddock.cache.states import SandboxState
from paddock.gateway.limits import GatewayLimits, GatewayOptions
from paddock.gateway.routing import route_lookup
from paddock.kit.errors import (
    ConflictError,
    NotFoundError,
    QuotaExceededError,
    UnavailableError,
)
from tests.gateway.rig import OK, PATIENCE_SECONDS, get, read_request, recording, rig, route
from tests.runtime.local.nodes import eventually

ASLEEP = {"state": SandboxState.PAUSED, "wakes": True}


async def test_a_hundred_calls_to_a_paused_sandbox_wake_it_once_and_are_all_answered() -> None:
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen), **ASLEEP)
        answers = await asyncio.gather(*(paddock.get(f"/{number}") for number in range(100)))
        assert [answer.status for answer in answers] == [200] * 100
        assert paddock.wakes == ["abc"]
        assert sorted(line.split()[1] for line, _, _ in seen) == sorted(f"/{n}" for n in range(100))
        traffic = paddock.activity.get("uid-abc")
        assert traffic is not None
        assert (traffic.wakes, traffic.requests, paddock.activity.held) == (1, 100, 0)


async def test_a_request_that_comes_in_the_moment_of_waking_is_no_second_waking() -> None:
    woken = asyncio.Event()
    async with rig() as paddock:
        await paddock.upstream(OK, **ASLEEP)

        async def when_told(asleep):
            paddock.wakes.append(asleep.id)
            await woken.wait()
            return structs.replace(asleep, state=SandboxState.RUNNING, version=2)

        paddock.on_wake = when_told
        first = asyncio.create_task(paddock.get())
        await eventually(lambda: paddock.activity.held == 1)
        hold = paddock.gateway._hold

        def held_when_it_wakes(*request):
            # It is still asleep in the table; what ends the waking comes before this one's turn.
            woken.set()
            hold(*request)

        paddock.gateway._hold = held_when_it_wakes
        second = await paddock.get()
        assert ((await first).status, second.status) == (200, 200)
        assert paddock.wakes == ["abc"]
        traffic = paddock.activity.get("uid-abc")
        assert traffic is not None
        assert traffic.wakes == 1


@pytest.mark.parametrize("state", [SandboxState.PAUSED, SandboxState.PAUSING])
async def test_a_held_request_goes_on_unchanged_with_its_body(state: SandboxState) -> None:
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen), state=state, wakes=True)
        answer = await paddock.ask(
            get("/x?y", method="POST", transfer_encoding="chunked", x_a="b")
            + b"3\r\nabc\r\n2\r\nde\r\n0\r\nX-T: 1\r\n\r\n"
        )
        assert answer.status == 200
        line, headers, body = seen[0]
        assert (line, body) == ("POST /x?y HTTP/1.1", b"abcde")
        assert (headers["x-a"], headers["trailer-x-t"]) == ("b", "1")


async def test_a_held_websocket_is_opened_when_its_sandbox_runs() -> None:
    async def serve(reader, writer) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 101 Ok\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        writer.write(await reader.readexactly(5))
        await writer.drain()

    async with rig() as paddock:
        await paddock.upstream(serve, **ASLEEP)
        wire = await paddock.connect()
        wire.send(get(connection="Upgrade", upgrade="websocket") + b"early")
        assert (await wire.head())[0] == 101
        assert await wire.rest() == b"early"
        await wire.close()


async def test_a_large_body_is_not_gathered_while_its_sandbox_sleeps() -> None:
    woken = asyncio.Event()
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen), **ASLEEP)

        async def slowly(asleep):
            await woken.wait()
            return structs.replace(asleep, state=SandboxState.RUNNING, version=2)

        paddock.on_wake = slowly
        wire = await paddock.connect()
        size = 20_000_000
        wire.send(get(method="POST", content_length=str(size)) + b"x" * size)
        await eventually(lambda: paddock.activity.held == 1)
        [exchange] = paddock.gateway._inflight.in_flight["uid-abc"]
        await eventually(lambda: exchange.held_bytes > 64 * 1024)
        assert exchange.held_bytes < 1_000_000
        woken.set()
        assert (await wire.answer()).status == 200
        assert len(seen[0][2]) == size
        await wire.close()


async def test_a_caller_that_hangs_up_stops_only_its_own_waiting() -> None:
    seen = []
    woken = asyncio.Event()
    async with rig() as paddock:
        await paddock.upstream(recording(seen), **ASLEEP)

        async def slowly(asleep):
            paddock.wakes.append(asleep.id)
            await woken.wait()
            return structs.replace(asleep, state=SandboxState.RUNNING, version=2)

        paddock.on_wake = slowly
        gone, stays = await paddock.connect(), await paddock.connect()
        gone.send(get("/gone"))
        stays.send(get("/stays"))
        await eventually(lambda: paddock.activity.held == 2)
        gone.reset()
        await eventually(lambda: paddock.activity.held == 1)
        woken.set()
        assert (await stays.answer()).status == 200
        await stays.close()
        assert [line for line, _, _ in seen] == ["GET /stays HTTP/1.1"]
        assert paddock.wakes == ["abc"]


async def test_a_sandbox_that_did_not_ask_for_it_is_not_woken() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, state=SandboxState.PAUSED)
        answer = await paddock.get()
        assert answer.status == 502
        assert json.loads(answer.body)["message"] == "The sandbox was not found"
        assert paddock.wakes == []


async def test_waking_can_be_switched_off_for_a_whole_gateway() -> None:
    async with rig(options=GatewayOptions(wakes=False)) as paddock:
        await paddock.upstream(OK, **ASLEEP)
        assert (await paddock.get()).status == 502
        assert paddock.wakes == []


async def test_more_may_not_wait_than_allowed() -> None:
    woken = asyncio.Event()
    async with rig(GatewayLimits(held_requests_per_sandbox=2, held_requests=3)) as paddock:
        await paddock.upstream(OK, **ASLEEP)
        await paddock.upstream(OK, "xyz", **ASLEEP)

        async def slowly(asleep):
            await woken.wait()
            return structs.replace(asleep, state=SandboxState.RUNNING, version=2)

        paddock.on_wake = slowly
        waiting = [asyncio.create_task(paddock.get()) for _ in range(2)]
        await eventually(lambda: paddock.activity.held == 2)
        refused = await paddock.get()
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        waiting.append(asyncio.create_task(paddock.get(e2b_sandbox_id="xyz")))
        await eventually(lambda: paddock.activity.held == 3)
        assert (await paddock.get(e2b_sandbox_id="xyz")).status == 503
        woken.set()
        assert [(await task).status for task in waiting] == [200] * 3


async def test_held_bytes_are_bounded_over_all_requests() -> None:
    woken = asyncio.Event()
    async with rig(GatewayLimits(held_bytes=10)) as paddock:
        await paddock.upstream(OK, **ASLEEP)

        async def slowly(asleep):
            await woken.wait()
            return structs.replace(asleep, state=SandboxState.RUNNING, version=2)

        paddock.on_wake = slowly
        post = get(method="POST", content_length="20") + b"x" * 20
        first = asyncio.create_task(paddock.ask(post))
        await eventually(lambda: paddock.activity.held == 1)
        assert (await paddock.ask(post)).status == 503
        woken.set()
        assert (await first).status == 200


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (NotFoundError("gone"), 502, "The sandbox was not found"),
        (QuotaExceededError("10 of 10"), 429, "quota"),
        (ValueError("bug"), 500, "internal error"),
    ],
)
async def test_why_there_is_no_waking_is_told_without_a_word_of_the_inside(
    error: Exception, status: int, words: str
) -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, **ASLEEP)

        async def fails(_):
            raise error

        paddock.on_wake = fails
        answer = await paddock.get()
        assert answer.status == status
        assert words in json.loads(answer.body)["message"]
        assert str(error) not in answer.body.decode()


async def test_waiting_ends_at_its_time_with_a_hint_when_to_come_again() -> None:
    async with rig(wake_seconds=0.05) as paddock:
        await paddock.upstream(OK, **ASLEEP)
        paddock.on_wake = lambda _: asyncio.Event().wait()  # type: ignore[assignment]
        answer = await paddock.get()
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")


@pytest.mark.parametrize("error", [ConflictError("pausing"), UnavailableError("restarting")])
async def test_what_passes_by_itself_is_tried_again(error: Exception) -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, **ASLEEP)
        tries = 0

        async def third_time(asleep):
            nonlocal tries
            tries += 1
            if tries < 3:
                raise error
            return structs.replace(asleep, state=SandboxState.RUNNING, version=9)

        paddock.on_wake = third_time
        assert (await paddock.get()).status == 200


async def test_a_namesake_is_never_woken_nor_given_anothers_request() -> None:
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen), **ASLEEP)

        async def replaced(asleep):
            paddock.routes.remove(asleep.key, asleep.version)
            paddock.routes.put(route("abc", uid="uid-new", version=7))
            return structs.replace(asleep, uid="uid-new", state=SandboxState.RUNNING, version=7)

        paddock.on_wake = replaced
        assert (await paddock.get()).status == 502
        assert seen == []


async def test_a_sandbox_killed_while_requests_wait_is_told_at_once() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, **ASLEEP)
        ends = asyncio.Event()

        async def never(asleep):
            await ends.wait()
            return asleep

        paddock.on_wake = never
        asking = asyncio.create_task(paddock.get())
        await eventually(lambda: paddock.activity.held == 1)
        known = paddock.routes.get("abc")
        assert known is not None
        paddock.routes.remove(known.key, 99)
        assert (await asking).status == 502
        await eventually(lambda: paddock.activity.held == 0)
        ends.set()


async def test_a_request_on_its_way_in_when_the_sandbox_is_paused_is_carried_over() -> None:
    arrived, thawed = asyncio.Event(), asyncio.Event()

    async def serve(reader, writer) -> None:
        await read_request(reader)
        arrived.set()
        await thawed.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()

    async with rig(GatewayLimits(pause_grace_seconds=60)) as paddock:
        await paddock.upstream(serve, wakes=True)

        async def thaw(asleep):
            paddock.wakes.append(asleep.id)
            thawed.set()
            return structs.replace(asleep, state=SandboxState.RUNNING, version=99)

        paddock.on_wake = thaw
        asking = asyncio.create_task(paddock.get())
        await asyncio.wait_for(arrived.wait(), PATIENCE_SECONDS)
        paddock.change(state=SandboxState.PAUSED)
        assert (await asking).body == b"ok"
        assert paddock.wakes == ["abc"]


async def test_a_request_that_was_inside_for_longer_breaks_off_and_wakes_nothing() -> None:
    arrived = asyncio.Event()

    async def serve(reader, writer) -> None:
        await read_request(reader)
        arrived.set()
        await reader.read()

    async with rig(GatewayLimits(pause_grace_seconds=0)) as paddock:
        await paddock.upstream(serve, wakes=True)
        wire = await paddock.connect()
        wire.send(get())
        await asyncio.wait_for(arrived.wait(), PATIENCE_SECONDS)
        paddock.change(state=SandboxState.PAUSED)
        with pytest.raises(ConnectionResetError):
            await wire.rest()
        await wire.close()
        assert paddock.wakes == []


@pytest.mark.parametrize(
    ("wakes", "change"),
    [
        (True, {"state": SandboxState.PAUSED}),
        (False, {"state": SandboxState.PAUSED}),
        (True, {"incarnation": 1}),
    ],
)
async def test_what_happens_while_a_connection_is_made_concerns_its_request_too(
    wakes: bool, change: dict
) -> None:
    thawed = asyncio.Event()

    async def serve(reader, writer) -> None:
        await read_request(reader)
        await thawed.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()

    async with rig() as paddock:
        await paddock.upstream(serve, wakes=wakes)
        dial = paddock.dialer.dial

        async def changes_meanwhile(*wanted):
            connection = await dial(*wanted)
            paddock.change(**change)
            return connection

        async def thaw(asleep):
            thawed.set()
            return structs.replace(asleep, state=SandboxState.RUNNING, version=99)

        paddock.dialer.dial = changes_meanwhile
        paddock.on_wake = thaw
        wire = await paddock.connect()
        wire.send(get())
        if wakes and "state" in change:
            assert (await wire.answer()).body == b"ok"
        else:
            with pytest.raises(ConnectionResetError):
                await wire.rest()
        assert thawed.is_set() == (wakes and "state" in change)
        await wire.close()


@pytest.mark.parametrize(
    ("headers", "answer", "status"),
    [
        ({}, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n", 200),
        (
            {"Connection": "Upgrade", "Upgrade": "websocket"},
            b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
            101,
        ),
    ],
)
async def test_streams_break_off_when_their_sandbox_is_paused_or_ends(
    headers: dict[str, str], answer: bytes, status: int
) -> None:
    async def serve(reader, writer) -> None:
        await read_request(reader)
        writer.write(answer)
        await reader.read()

    for change in ("pause", "kill", "restart"):
        async with rig() as paddock:
            await paddock.upstream(serve, wakes=True)
            wire = await paddock.connect()
            wire.send(get(**headers))
            assert (await wire.head())[0] == status
            if change == "pause":
                paddock.change(state=SandboxState.PAUSED)
            elif change == "restart":
                paddock.change(incarnation=1)
            else:
                known = paddock.routes.get("abc")
                assert known is not None
                paddock.routes.remove(known.key, 99)
            with pytest.raises(ConnectionResetError):
                await wire.rest()
            await wire.close()
            assert paddock.wakes == []


async def test_a_sandbox_that_ends_in_the_moment_of_a_request_leaves_no_work_undone() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK)
        dispatch = paddock.gateway.dispatch

        def and_end(exchange, client) -> None:
            dispatch(exchange, client)
            known = paddock.routes.get("abc")
            assert known is not None
            paddock.routes.remove(known.key, 99)

        paddock.gateway.dispatch = and_end
        assert (await paddock.get()).status == 502
        # A coroutine that nobody awaited would warn here.
        gc.collect()


async def test_a_connection_of_an_earlier_life_is_never_used_again() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK)
        wire = await paddock.connect()
        for incarnation in range(3):
            wire.send(get())
            assert (await wire.answer()).status == 200
            paddock.change(incarnation=incarnation + 1)
        await wire.close()
        assert paddock.dialer.dials == 3


async def test_a_sandbox_in_the_making_is_waited_for_without_waking() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, state=SandboxState.CREATING)
        asking = asyncio.create_task(paddock.get())
        await eventually(lambda: paddock.activity.held == 1)
        paddock.change(state=SandboxState.RUNNING)
        assert (await asking).status == 200
        assert paddock.wakes == []


async def test_a_route_that_the_table_lacks_is_looked_up_once_and_nos_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The questions take as long as the machine likes.
    monkeypatch.setattr(route_lookup, "ABSENT_SECONDS", PATIENCE_SECONDS)
    async with rig() as paddock:
        await paddock.upstream(OK, "other")
        paddock.dialer.targets["new", 8000] = paddock.dialer.targets["other", 8000]
        paddock.elsewhere["new"] = route("new")
        answers = await asyncio.gather(*(paddock.get(e2b_sandbox_id="new") for _ in range(5)))
        assert [answer.status for answer in answers] == [200] * 5
        assert paddock.lookups == ["new"]
        for _ in range(5):
            assert (await paddock.get(e2b_sandbox_id="nobody")).status == 502
        assert paddock.lookups == ["new", "nobody"]


async def test_a_lookup_waits_for_a_control_plane_that_restarts() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, "other")
        paddock.dialer.targets["new", 8000] = paddock.dialer.targets["other", 8000]
        paddock.elsewhere["new"] = route("new")
        paddock.absences = [UnavailableError("restarting")] * 2
        assert (await paddock.get(e2b_sandbox_id="new")).status == 200
        assert paddock.lookups == ["new"] * 3


async def test_nobody_is_told_that_a_sandbox_is_gone_by_whom_it_was_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(route_lookup, "_TIMEOUT_SECONDS", 0.3)
    async with rig() as paddock:
        paddock.absences = [UnavailableError("dead")] * 100
        answer = await paddock.get(e2b_sandbox_id="new")
        assert answer.status == 503, "unknown is not absent"
        assert answer.headers["retry-after"] == "1"
        # Nor is it remembered.
        paddock.absences.clear()
        assert (await paddock.get(e2b_sandbox_id="new")).status == 502


async def test_a_sandbox_whose_end_was_heard_of_is_gone_whoever_can_be_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(route_lookup, "_TIMEOUT_SECONDS", 0.3)
    async with rig() as paddock:
        await paddock.upstream(OK)
        route = paddock.routes.get("abc")
        assert route is not None
        paddock.routes.remove(route.key, route.version + 1)
        paddock.absences = [UnavailableError("dead")] * 100
        assert (await paddock.get(e2b_sandbox_id="abc")).status == 502


async def test_more_lookups_than_are_made_at_once_are_put_off_and_not_denied() -> None:
    told = asyncio.Event()
    async with rig() as paddock:

        async def slowly(sandbox_id):
            paddock.lookups.append(sandbox_id)
            await told.wait()
            raise NotFoundError("no")

        paddock.on_look = slowly
        await paddock.upstream(OK, "ended")
        ended = paddock.routes.get("ended")
        assert ended is not None
        paddock.routes.remove(ended.key, ended.version + 1)
        names = [f"new{number}" for number in range(16)]
        asking = [asyncio.create_task(paddock.get(e2b_sandbox_id=name)) for name in names]
        await eventually(lambda: sorted(paddock.lookups) == sorted(names))
        answer = await paddock.get(e2b_sandbox_id="another")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert json.loads(answer.body)["message"].startswith("too many sandboxes")
        # Who waits for an answer already, and what is known to be gone, need no lookup.
        asking.append(asyncio.create_task(paddock.get(e2b_sandbox_id="new3")))
        assert (await paddock.get(e2b_sandbox_id="ended")).status == 502
        told.set()
        assert {(await task).status for task in asking} == {502}
        assert (await paddock.get(e2b_sandbox_id="another")).status == 502
        assert paddock.lookups.count("new3") == 1


async def test_a_sandbox_resumed_a_moment_ago_is_found_running() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, state=SandboxState.PAUSED)
        paddock.elsewhere["abc"] = route("abc", version=5)
        assert (await paddock.get()).status == 200


async def test_nothing_is_served_before_the_first_sync_but_the_api() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK)
        paddock.dialer.api_port = paddock.dialer.targets["abc", 8000]
        paddock.routes.is_ready = False
        answer = await paddock.get()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert (await paddock.ask(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")).status == 200


async def test_traffic_is_counted_and_told_for_idle_pauses() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK)
        await paddock.ask(get(method="POST", content_length="3") + b"abc")
        traffic = paddock.activity.by_sandbox()["abc"]
        assert (traffic.requests, traffic.request_bytes, traffic.response_bytes) == (1, 3, 2)
        assert traffic.seconds > 0
        now = paddock.clock.monotonic()
        assert paddock.activity.drain(now).keys() == {"uid-abc"}
        assert paddock.activity.drain(now) == {}
        families = {family.name: family for family in paddock.activity.collect()}
        samples = families["paddock_gateway_sandbox_requests"].samples
        assert [(sample.labels["sandbox"], sample.value) for sample in samples] == [("abc", 1)]


async def test_requests_are_logged_without_their_queries_where_that_is_set(caplog) -> None:
    caplog.set_level("INFO", logger="paddock.gateway.access")
    async with rig(options=GatewayOptions(logs_requests=True)) as paddock:
        await paddock.upstream(OK)
        await paddock.get("/a?signature=secret")
    [record] = [item for item in caplog.records if item.name == "paddock.gateway.access"]
    text = str(record.__dict__)
    assert "abc" in text
    assert "'/a'" in text
    assert "secret" not in text
