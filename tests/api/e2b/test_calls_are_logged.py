"""The log of calls to E2B's API: complete, and not forgeable."""

import pytest

from tests.scenario.paddock import paddock

pytestmark = pytest.mark.looptime


async def test_every_change_is_logged_with_its_caller_and_outcome(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="paddock.api.calls")
    async with paddock(pool_size=0) as world:
        made = (await world.http.post("/sandboxes", json={"templateID": "base"})).json()
        box = made["sandboxID"]
        await world.http.get(f"/sandboxes/{box}")
        gone = await world.http.delete("/sandboxes/no%0aone", headers={"X-Request-Id": "mine"})
        assert gone.status_code == 404
        await world.http.delete(f"/sandboxes/{box}")
    lines = [item.paddock_fields for item in caplog.records if item.name == "paddock.api.calls"]
    assert [(line["method"], line["path"], line["result"], line["made"]) for line in lines] == [
        ("POST", "/sandboxes", "done", box),
        ("DELETE", "/sandboxes/no%0Aone", "NotFound", "-"),
        ("DELETE", f"/sandboxes/{box}", "done", "-"),
    ]
    assert {line["team"] for line in lines} == {"default"}
    assert all(line["key"] for line in lines)
    assert lines[1]["request"] == "mine"


async def test_created_ids_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="paddock.api.calls")
    async with paddock(pool_size=0) as world:
        body = {"templateID": "base", "count": 2}
        batch = (await world.http.post("/v2/sandboxes:batch", json=body)).json()["results"]
        boxes = [item["sandbox"]["sandboxID"] for item in batch]
        forked = await world.http.post(f"/sandboxes/{boxes[0]}/fork", json={"count": 2})
        clones = [item["sandbox"]["sandboxID"] for item in forked.json()]
        stored = await world.http.post(f"/sandboxes/{boxes[0]}/snapshots", json={})
    lines = [item.paddock_fields for item in caplog.records if item.name == "paddock.api.calls"]
    made = [",".join(boxes), ",".join(clones), stored.json()["snapshotID"]]
    assert [line["made"] for line in lines] == made
