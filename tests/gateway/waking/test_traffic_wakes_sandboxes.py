"""Held requests: one wake for all, each forwarded once, all limits enforced."""

import asyncio
import gc
import json
from datetime import timedelta

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


async def test_a_hundred_requests_to_a_paused_sandbox_wake_it_once() -> None:
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen), **ASLEEP)
        responses = await asyncio.gather(*(paddock.get(f"/{number}") for number in range(100)))
        assert [response.status for response in responses] == [200] * 100
        assert paddock.wakes == ["abc"]
        assert sorted(line.split()[1] for line, _, _ in seen) == sorted(f"/{n}" for n in range(100))
        traffic = paddock.activity.get("uid-abc")
        assert traffic is not None
        assert (traffic.wakes, traffic.requests, paddock.activity.held) == (1, 100, 0)


async def test_a_request_at_the_end_of_a_wake_does_not_start_another() -> None:
    woken = asyncio.Event()
    async with rig() as paddock:
        await paddock.upstream(OK, **ASLEEP)

        async def when_told(asleep):
            paddock.wakes.append(asleep.id)
            await woken.wait()
            return structs.replace(asleep, state=SandboxState.RUNNING, version=2)

        paddock.on_resume = when_told
        first = asyncio.create_task(paddock.get())
        await eventually(lambda: paddock.activity.held == 1)
        hold = paddock.gateway._hold

        def held_when_it_wakes(*request):
            # Still paused in the table; the wake ends before this request is handled.
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
async def test_a_held_request_is_forwarded_unchanged_with_its_body(state: SandboxState) -> None:
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen), state=state, wakes=True)
        response = await paddock.request(
            get("/x?y", method="POST", transfer_encoding="chunked", x_a="b")
            + b"3\r\nabc\r\n2\r\nde\r\n0\r\nX-T: 1\r\n\r\n"
        )
        assert response.status == 200
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


async def test_a_large_body_is_not_buffered_while_its_sandbox_is_paused() -> None:
    woken = asyncio.Event()
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen), **ASLEEP)

        async def slowly(asleep):
            await woken.wait()
            return structs.replace(asleep, state=SandboxState.RUNNING, version=2)

        paddock.on_resume = slowly
        wire = await paddock.connect()
        size = 20_000_000
        wire.send(get(method="POST", content_length=str(size)) + b"x" * size)
        await eventually(lambda: paddock.activity.held == 1)
        [exchange] = paddock.gateway._inflight.in_flight["uid-abc"]
        await eventually(lambda: exchange.held_bytes > 64 * 1024)
        assert exchange.held_bytes < 1_000_000
        woken.set()
        assert (await wire.response()).status == 200
        assert len(seen[0][2]) == size
        await wire.close()


async def test_a_client_disconnect_ends_only_its_own_wait() -> None:
    seen = []
    woken = asyncio.Event()
    async with rig() as paddock:
        await paddock.upstream(recording(seen), **ASLEEP)

        async def slowly(asleep):
            paddock.wakes.append(asleep.id)
            await woken.wait()
            return structs.replace(asleep, state=SandboxState.RUNNING, version=2)

        paddock.on_resume = slowly
        gone, stays = await paddock.connect(), await paddock.connect()
        gone.send(get("/gone"))
        stays.send(get("/stays"))
        await eventually(lambda: paddock.activity.held == 2)
        gone.reset()
        await eventually(lambda: paddock.activity.held == 1)
        woken.set()
        assert (await stays.response()).status == 200
        await stays.close()
        assert [line for line, _, _ in seen] == ["GET /stays HTTP/1.1"]
        assert paddock.wakes == ["abc"]


async def test_a_sandbox_without_wake_on_traffic_is_not_woken() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, state=SandboxState.PAUSED)
        response = await paddock.get()
        assert response.status == 502
        assert json.loads(response.body)["message"] == "The sandbox was not found"
        assert paddock.wakes == []


async def test_waking_can_be_switched_off_for_a_whole_gateway() -> None:
    async with rig(options=GatewayOptions(wakes=False)) as paddock:
        await paddock.upstream(OK, **ASLEEP)
        assert (await paddock.get()).status == 502
        assert paddock.wakes == []


async def test_the_number_of_held_requests_is_limited() -> None:
    woken = asyncio.Event()
    async with rig(GatewayLimits(held_requests_per_sandbox=2, held_requests=3)) as paddock:
        await paddock.upstream(OK, **ASLEEP)
        await paddock.upstream(OK, "xyz", **ASLEEP)

        async def slowly(asleep):
            await woken.wait()
            return structs.replace(asleep, state=SandboxState.RUNNING, version=2)

        paddock.on_resume = slowly
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

        paddock.on_resume = slowly
        post = get(method="POST", content_length="20") + b"x" * 20
        first = asyncio.create_task(paddock.request(post))
        await eventually(lambda: paddock.activity.held == 1)
        assert (await paddock.request(post)).status == 503
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
async def test_wake_errors_reveal_no_internals(error: Exception, status: int, words: str) -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, **ASLEEP)

        async def fails(_):
            raise error

        paddock.on_resume = fails
        response = await paddock.get()
        assert response.status == status
        assert words in json.loads(response.body)["message"]
        assert str(error) not in response.body.decode()
        assert ("retry-after" in response.headers) == (status == 429)


async def test_a_wake_timeout_returns_retry_after() -> None:
    async with rig(wake_seconds=0.05) as paddock:
        await paddock.upstream(OK, **ASLEEP)
        paddock.on_resume = lambda _: asyncio.Event().wait()  # type: ignore[assignment]
        response = await paddock.get()
        assert (response.status, response.headers["retry-after"]) == (503, "5")


@pytest.mark.parametrize("error", [ConflictError("pausing"), UnavailableError("restarting")])
async def test_transient_wake_errors_are_retried(error: Exception) -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, **ASLEEP)
        tries = 0

        async def third_time(asleep):
            nonlocal tries
            tries += 1
            if tries < 3:
                raise error
            return structs.replace(asleep, state=SandboxState.RUNNING, version=9)

        paddock.on_resume = third_time
        assert (await paddock.get()).status == 200


async def test_a_new_sandbox_with_the_same_name_is_never_woken_for_the_old_one() -> None:
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen), **ASLEEP)

        async def replaced(asleep):
            paddock.routes.remove(asleep.key, asleep.version)
            paddock.routes.put(route("abc", uid="uid-new", version=7))
            return structs.replace(asleep, uid="uid-new", state=SandboxState.RUNNING, version=7)

        paddock.on_resume = replaced
        assert (await paddock.get()).status == 502
        assert seen == []


async def test_requests_fail_at_once_when_their_sandbox_is_killed() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, **ASLEEP)
        ends = asyncio.Event()

        async def never(asleep):
            await ends.wait()
            return asleep

        paddock.on_resume = never
        asking = asyncio.create_task(paddock.get())
        await eventually(lambda: paddock.activity.held == 1)
        known = paddock.routes.get("abc")
        assert known is not None
        paddock.routes.remove(known.key, 99)
        assert (await asking).status == 502
        await eventually(lambda: paddock.activity.held == 0)
        ends.set()


async def test_a_new_request_is_held_when_its_sandbox_is_paused() -> None:
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

        paddock.on_resume = thaw
        asking = asyncio.create_task(paddock.get())
        await asyncio.wait_for(arrived.wait(), PATIENCE_SECONDS)
        paddock.change(state=SandboxState.PAUSED)
        assert (await asking).body == b"ok"
        assert paddock.wakes == ["abc"]


async def test_an_older_request_is_aborted_by_a_pause_and_wakes_nothing() -> None:
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
        response = await wire.response()
        assert response.status == 502
        assert json.loads(response.body)["message"] == "The sandbox was paused before it answered"
        await wire.close()
        assert paddock.wakes == []


@pytest.mark.parametrize(("late", "is_held"), [(600.0, True), (0.0, False), (-600.0, False)])
async def test_the_age_of_a_request_counts_from_the_pause_not_from_when_the_gateway_learns_of_it(
    late: float, is_held: bool
) -> None:
    arrived, thawed = asyncio.Event(), asyncio.Event()

    async def serve(reader, writer) -> None:
        await read_request(reader)
        arrived.set()
        await thawed.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()

    async with rig(GatewayLimits(pause_grace_seconds=0)) as paddock:
        await paddock.upstream(serve, wakes=True)

        async def thaw(asleep):
            thawed.set()
            return structs.replace(asleep, state=SandboxState.RUNNING, version=99)

        paddock.on_resume = thaw
        asking = asyncio.create_task(paddock.get())
        await asyncio.wait_for(arrived.wait(), PATIENCE_SECONDS)
        requested = paddock.clock.now() - timedelta(seconds=late)
        paddock.change(state=SandboxState.PAUSING, pause_requested_at=requested)
        assert (await asking).status == (200 if is_held else 502)
        thawed.set()


@pytest.mark.parametrize(
    ("wakes", "change"),
    [
        (True, {"state": SandboxState.PAUSED}),
        (False, {"state": SandboxState.PAUSED}),
        (True, {"incarnation": 1}),
    ],
)
async def test_changes_during_a_connect_apply_to_its_request(wakes: bool, change: dict) -> None:
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
        paddock.on_resume = thaw
        wire = await paddock.connect()
        wire.send(get())
        if wakes and "state" in change:
            assert (await wire.response()).body == b"ok"
        else:
            assert (await wire.response()).status == 502
        assert thawed.is_set() == (wakes and "state" in change)
        await wire.close()


@pytest.mark.parametrize(
    ("headers", "response", "status"),
    [
        ({}, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n", 200),
        (
            {"Connection": "Upgrade", "Upgrade": "websocket"},
            b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
            101,
        ),
    ],
)
async def test_streams_are_aborted_when_their_sandbox_is_paused_or_ends(
    headers: dict[str, str], response: bytes, status: int
) -> None:
    async def serve(reader, writer) -> None:
        await read_request(reader)
        writer.write(response)
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": SandboxState.PAUSED}, "The sandbox was paused before it answered"),
        (
            {"state": SandboxState.PAUSING, "wakes": True, "loses_processes": True},
            "The sandbox was paused before it answered",
        ),
        ({"state": SandboxState.DEAD}, "The sandbox ended before it answered"),
        ({"incarnation": 1}, "The sandbox was restarted before it answered"),
    ],
)
async def test_an_unanswered_request_gets_a_502_when_its_sandbox_is_paused_or_ends(
    change: dict, message: str
) -> None:
    arrived = asyncio.Event()

    async def serve(reader, writer) -> None:
        await read_request(reader)
        arrived.set()
        await reader.read()

    async with rig() as paddock:
        await paddock.upstream(serve)
        wire = await paddock.connect()
        wire.send(get())
        await asyncio.wait_for(arrived.wait(), PATIENCE_SECONDS)
        paddock.change(**change)
        response = await wire.response()
        assert (response.status, json.loads(response.body)["message"]) == (502, message)
        # The client's connection is kept.
        assert "connection" not in response.headers
        assert paddock.wakes == []
        await wire.close()


@pytest.mark.parametrize("opens", [True, False])
async def test_a_request_waits_for_the_server_of_a_rebooted_sandbox(opens: bool) -> None:
    async with rig(GatewayLimits(boot_seconds=60 if opens else 0.2)) as paddock:
        await paddock.upstream(OK, **ASLEEP)
        target = paddock.dialer.targets.pop(("abc", 8000))

        async def reboot(asleep):
            return structs.replace(
                asleep, state=SandboxState.RUNNING, version=9, incarnation=1, is_rebooted=True
            )

        paddock.on_resume = reboot
        asking = asyncio.create_task(paddock.get())
        await eventually(lambda: paddock.dialer.dials > 1)
        if opens:
            paddock.dialer.targets["abc", 8000] = target
            assert (await asking).status == 200
        else:
            response = await asking
            assert (response.status, response.headers["retry-after"]) == (502, "5")
            assert json.loads(response.body)["port"] == 8000


async def test_a_closed_port_of_a_sandbox_that_kept_its_memory_fails_at_once() -> None:
    async with rig(GatewayLimits(boot_seconds=60)) as paddock:
        await paddock.upstream(OK, **ASLEEP)
        paddock.dialer.targets.clear()
        response = await paddock.get()
        assert response.status == 502
        assert "retry-after" not in response.headers


async def test_a_sandbox_that_ends_during_a_request_leaves_no_unawaited_coroutine() -> None:
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
        # A coroutine that was never awaited would warn here.
        gc.collect()


async def test_a_connection_to_an_earlier_incarnation_is_never_reused() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK)
        wire = await paddock.connect()
        for incarnation in range(3):
            wire.send(get())
            assert (await wire.response()).status == 200
            paddock.change(incarnation=incarnation + 1)
        await wire.close()
        assert paddock.dialer.dials == 3


async def test_requests_to_a_sandbox_being_created_are_held_without_a_wake() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, state=SandboxState.CREATING)
        asking = asyncio.create_task(paddock.get())
        await eventually(lambda: paddock.activity.held == 1)
        paddock.change(state=SandboxState.RUNNING)
        assert (await asking).status == 200
        assert paddock.wakes == []


async def test_a_missing_route_is_looked_up_once_and_absence_is_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Lookups may take long on a slow machine.
    monkeypatch.setattr(route_lookup, "ABSENT_SECONDS", PATIENCE_SECONDS)
    async with rig() as paddock:
        await paddock.upstream(OK, "other")
        paddock.dialer.targets["new", 8000] = paddock.dialer.targets["other", 8000]
        paddock.elsewhere["new"] = route("new")
        responses = await asyncio.gather(*(paddock.get(e2b_sandbox_id="new") for _ in range(5)))
        assert [response.status for response in responses] == [200] * 5
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


async def test_an_unavailable_control_plane_does_not_make_a_sandbox_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(route_lookup, "_TIMEOUT_SECONDS", 0.3)
    async with rig() as paddock:
        paddock.absences = [UnavailableError("dead")] * 100
        response = await paddock.get(e2b_sandbox_id="new")
        assert response.status == 503, "unknown is not absent"
        assert response.headers["retry-after"] == "1"
        # And absence is not cached.
        paddock.absences.clear()
        assert (await paddock.get(e2b_sandbox_id="new")).status == 502


async def test_an_ended_sandbox_is_absent_without_a_control_plane(
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


async def test_lookups_above_the_limit_get_a_503_not_a_502() -> None:
    told = asyncio.Event()
    async with rig() as paddock:

        async def slowly(sandbox_id):
            paddock.lookups.append(sandbox_id)
            await told.wait()
            raise NotFoundError("no")

        paddock.on_fetch = slowly
        await paddock.upstream(OK, "ended")
        ended = paddock.routes.get("ended")
        assert ended is not None
        paddock.routes.remove(ended.key, ended.version + 1)
        names = [f"new{number}" for number in range(16)]
        asking = [asyncio.create_task(paddock.get(e2b_sandbox_id=name)) for name in names]
        await eventually(lambda: sorted(paddock.lookups) == sorted(names))
        response = await paddock.get(e2b_sandbox_id="another")
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert json.loads(response.body)["message"].startswith("too many sandboxes")
        # A lookup in flight is shared, and a sandbox known to be gone needs none.
        asking.append(asyncio.create_task(paddock.get(e2b_sandbox_id="new3")))
        assert (await paddock.get(e2b_sandbox_id="ended")).status == 502
        told.set()
        assert {(await task).status for task in asking} == {502}
        assert (await paddock.get(e2b_sandbox_id="another")).status == 502
        assert paddock.lookups.count("new3") == 1


async def test_a_just_resumed_sandbox_is_looked_up() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, state=SandboxState.PAUSED)
        paddock.elsewhere["abc"] = route("abc", version=5)
        assert (await paddock.get()).status == 200


async def test_before_the_first_sync_only_the_api_is_served() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK)
        paddock.dialer.api_port = paddock.dialer.targets["abc", 8000]
        paddock.routes.is_ready = False
        response = await paddock.get()
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert (await paddock.request(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")).status == 200


async def test_traffic_is_counted_and_reported_for_idle_pauses() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK)
        await paddock.request(get(method="POST", content_length="3") + b"abc")
        traffic = paddock.activity.by_sandbox()["abc"]
        assert (traffic.requests, traffic.request_bytes, traffic.response_bytes) == (1, 3, 2)
        assert traffic.seconds > 0
        now = paddock.clock.monotonic()
        assert paddock.activity.drain(now).keys() == {"uid-abc"}
        assert paddock.activity.drain(now) == {}
        families = {family.name: family for family in paddock.activity.collect()}
        samples = families["paddock_gateway_sandbox_requests"].samples
        assert [(sample.labels["sandbox"], sample.value) for sample in samples] == [("abc", 1)]


async def test_requests_are_logged_without_queries_if_enabled(caplog) -> None:
    caplog.set_level("INFO", logger="paddock.gateway.access")
    async with rig(options=GatewayOptions(logs_requests=True)) as paddock:
        await paddock.upstream(OK)
        await paddock.get("/a?signature=secret")
    [record] = [item for item in caplog.records if item.name == "paddock.gateway.access"]
    text = str(record.__dict__)
    assert "abc" in text
    assert "'/a'" in text
    assert "secret" not in text
