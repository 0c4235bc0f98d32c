"""The audit log under a flood, when it cannot be written, and when a call has no response."""

import asyncio
import contextlib

import pytest

from paddock.api.audit.collapse import MAX_SENDERS, WINDOW_SECONDS
from paddock.api.audit.described import describe_e2b
from paddock.api.audit.log import _FAILURES
from paddock.api.audit.middleware import Audited
from tests.api.audit.recorded import recording
from tests.scenario.paddock import paddock

pytestmark = pytest.mark.looptime


def failures() -> float:
    return _FAILURES._value.get()


async def test_repeated_refusals_of_an_address_are_one_line_and_a_count() -> None:
    lines, audit = recording()
    async with paddock(pool_size=0, audit=audit) as world:
        for number in range(500):
            sent = {"X-API-Key": f"e2b_{number:040x}", "X-Real-Ip": "192.0.2.1"}
            await world.http.get(f"/sandboxes/guess{number}", headers=sent)
        first = lines.take()
        # The first wrong key, and the first that was not checked any more.
        assert [event["responseStatus"]["code"] for event in first] == [401, 429]
        await asyncio.sleep(WINDOW_SECONDS + 10)
        counted = lines.take()
        codes = {
            event["responseStatus"]["code"]: int(event["annotations"]["paddock.dev/repeated"])
            for event in counted
        }
        assert sum(codes.values()) == 498
        assert {event["sourceIPs"][0] for event in counted} == {"192.0.2.1"}
        await world.http.get("/sandboxes", headers={"X-API-Key": "e2b_x"})
        assert len(lines.take()) == 1, "a new minute has begun"


async def test_a_flood_of_many_addresses_is_bounded() -> None:
    lines, audit = recording()
    async with paddock(pool_size=0, audit=audit) as world:
        for number in range(10 * MAX_SENDERS):
            sent = {"X-API-Key": "", "X-Real-Ip": f"2001:db8:{number:x}::1"}
            await world.http.delete("/sandboxes/absent", headers=sent)
        assert len(lines.take()) == MAX_SENDERS + 1
        await asyncio.sleep(WINDOW_SECONDS + 10)
        [rest] = lines.take()
        assert rest["sourceIPs"] == []
        assert rest["annotations"]["paddock.dev/repeated"] == str(9 * MAX_SENDERS - 1)


async def test_what_was_counted_is_written_at_the_end() -> None:
    lines, audit = recording()
    async with paddock(pool_size=0, audit=audit) as world:
        for _ in range(3):
            await world.http.get("/sandboxes", headers={"X-API-Key": ""})
    audit.close()
    assert lines.take()[-1]["annotations"]["paddock.dev/repeated"] == "2"


async def test_calls_succeed_when_the_log_is_full_and_lost_lines_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines, audit = recording()
    async with paddock(pool_size=0, audit=audit) as world:
        before, lines.is_full = failures(), True
        for _ in range(3):
            made = await world.http.post("/sandboxes", json={"templateID": "base"})
            assert made.status_code == 201
        assert failures() - before == 3
        assert [item.message for item in caplog.records].count("audit log not written") == 1
        lines.is_full = False
        await world.http.delete(f"/sandboxes/{made.json()['sandboxID']}")
    lost, deleted = lines.take()
    assert lost["annotations"] == {"paddock.dev/lost-lines": "3"}
    assert lost["user"]["username"] == "paddock:system"
    assert deleted["verb"] == "delete"


async def test_a_required_log_refuses_changes_until_it_can_be_written() -> None:
    lines, audit = recording(is_required=True)
    async with paddock(pool_size=0, audit=audit) as world:
        lines.is_full = True
        noticed = await world.http.post("/sandboxes", json={"templateID": "base"})
        assert noticed.status_code == 201, "the change had happened before its line failed"
        refused = await world.http.post("/sandboxes", json={"templateID": "base"})
        assert refused.status_code == 503
        assert "audit log" in refused.json()["message"]
        assert len((await world.http.get("/sandboxes")).json()) == 1
        lines.is_full = False
        assert (await world.http.post("/sandboxes", json={"templateID": "base"})).status_code == 201
    assert [event["verb"] for event in lines.take()] == ["audit", "create"]


async def call(app) -> list[int]:
    """Send a POST to an application; return the recorded codes."""
    lines, audit = recording()

    async def ignore(_message) -> None: ...

    scope = {"type": "http", "method": "POST", "path": "/sandboxes", "headers": []}
    with contextlib.suppress(asyncio.CancelledError, RuntimeError):
        await Audited(app, audit, describe_e2b)(scope, None, ignore)  # pyright: ignore[reportArgumentType]
    return [event["responseStatus"]["code"] for event in lines.take()]


async def test_calls_without_a_response_are_recorded() -> None:
    async def fails(_scope, _receive, _send) -> None:
        raise RuntimeError

    async def is_cancelled(_scope, _receive, _send) -> None:
        raise asyncio.CancelledError

    async def responds_nothing(_scope, _receive, _send) -> None: ...

    async def fails_later(_scope, _receive, send) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": []})
        raise RuntimeError

    assert await call(fails) == [500]
    assert await call(is_cancelled) == [499]
    assert await call(responds_nothing) == [499]
    assert await call(fails_later) == [201]


async def test_gateways_are_recorded_only_when_they_are_refused() -> None:
    lines, audit = recording()
    async with paddock(pool_size=0, audit=audit) as world:
        body = {"url": "http://127.0.0.1:1", "seen": {}}
        refused = await world.http.post("/_paddock/activity", json=body)
        assert refused.status_code == 401
        [event] = lines.take()
        assert event["requestURI"] == "/_paddock/activity"
        token = {"Authorization": f"Bearer {world.plane.secrets.token}"}
        assert (await world.http.post("/_paddock/activity", json=body, headers=token)).is_success
        assert lines.take() == []
