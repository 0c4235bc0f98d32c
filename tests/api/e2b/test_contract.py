"""The contract of E2B's API: statuses, bodies, headers, paging, keys, quotas, extensions."""

import asyncio
from datetime import datetime, timedelta
from urllib.parse import quote

import pytest

from paddock.claims.caller import SYSTEM_NAMESPACE
from paddock.resources.kinds.builtin import Secret
from paddock.resources.kinds.pool import SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import PauseStrategy, SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import Key, ObjectMeta
from paddock.runtime.port import LogLine
from tests.scenario.paddock import SECRETS, World, paddock

pytestmark = pytest.mark.looptime


RETENTION = "paddock.dev/paused-retention"


async def create(world: World, expected: int = 201, headers: dict | None = None, **body):
    response = await world.http.post(
        "/v2/sandboxes", json={"templateID": "base", **body}, headers=headers
    )
    assert response.status_code == expected, response.text
    return response.json()


async def new_key(world: World, **body) -> dict[str, str]:
    made = await world.http.post("/api-keys", json={"name": "robot", **body})
    assert made.status_code == 201, made.text
    return {"X-API-Key": made.json()["key"], "id": made.json()["id"]}


async def test_a_created_sandbox_is_visible_at_once_everywhere() -> None:
    async with paddock() as world:
        made = await create(world, metadata={"a": "1"})
        assert made["envdVersion"] == "0.6.13"
        assert made["envdAccessToken"]
        path = f"/sandboxes/{made['sandboxID']}"
        detail = (await world.http.get(path)).json()
        assert (detail["state"], detail["metadata"]) == ("running", {"a": "1"})
        assert detail["lifecycle"] == {"autoResume": False, "onTimeout": "kill"}
        listed = (await world.http.get("/v2/sandboxes")).json()
        assert [item["sandboxID"] for item in listed] == [made["sandboxID"]]
        assert (await world.http.delete(path)).status_code == 204
        for response in (await world.http.get(path), await world.http.delete(path)):
            assert response.status_code == 404
            assert response.json()["code"] == 404
        assert (await world.http.get("/v2/sandboxes")).json() == []


async def test_log_entries_can_be_read_in_both_directions() -> None:
    async with paddock() as world:
        path = f"/v2/sandboxes/{(await create(world))['sandboxID']}/logs"

        async def told(query: str) -> list[str]:
            response = await world.http.get(f"{path}?{query}")
            assert response.status_code == 200, response.text
            return [entry["message"].partition(" ")[0] for entry in response.json()["logs"]]

        first, *_, last = await told("")
        assert {first, last} == {"started", "handed"}
        assert await told("limit=1") == [first]
        assert await told(f"limit=1&search={last}&level=info") == [last]
        assert await told("limit=1&direction=backward") == [last]
        assert await told("direction=backward&cursor=1000") == []
        assert await told("direction=forward&cursor=99999999999999") == []
        refused = await world.http.get(f"{path}?level=loud")
        assert refused.status_code == 400
        assert "level" in refused.json()["message"]


@pytest.mark.parametrize("direction", ["forward", "backward"])
async def test_every_log_entry_is_found_page_by_page(direction: str) -> None:
    async with paddock() as world:
        path = f"/v2/sandboxes/{(await create(world))['sandboxID']}/logs?direction={direction}"
        (box,) = (item for item in world.provider.all(Sandbox) if item.spec.claim)
        now, step = world.plane.clock.now(), 1 if direction == "forward" else -1
        lines = [
            LogLine(at=now + timedelta(seconds=n), level="info", message=f"said {n}")
            for n in range(1, 3001)
        ]
        world.runtime._logs[box.metadata.uid] = lines
        found: list[str] = []
        page = (await world.http.get(f"{path}&search=said")).json()["logs"]
        while page:
            found += [entry["message"] for entry in page]
            at = datetime.fromisoformat(page[-1]["timestamp"]).timestamp()
            cursor = int(at * 1000) + step
            page = (await world.http.get(f"{path}&search=said&cursor={cursor}")).json()["logs"]
        assert found == [line.message for line in lines][::step]


async def test_pages_end_without_a_token_and_bad_tokens_are_refused() -> None:
    async with paddock() as world:
        made = []
        for _ in range(5):
            made.append((await create(world))["sandboxID"])
            await asyncio.sleep(1)
        seen, token = [], None
        for expected in (2, 2, 1):
            query = f"?limit=2&order=asc{f'&nextToken={quote(token)}' if token else ''}"
            page = await world.http.get(f"/v2/sandboxes{query}")
            assert len(page.json()) == expected
            seen += [item["sandboxID"] for item in page.json()]
            token = page.headers.get("X-Next-Token")
        assert token is None
        assert seen == made
        assert (await world.http.get("/v2/sandboxes?nextToken=nonsense")).status_code == 400
        for bad in ("limit=0", "limit=101", "state=gone", "order=up", "startedAfter=yesterday"):
            assert (await world.http.get(f"/v2/sandboxes?{bad}")).status_code == 400
        assert (await world.http.get("/v2/sandboxes?template=other")).json() == []


async def test_started_after_includes_a_sandbox_started_at_that_moment() -> None:
    async with paddock() as world:
        made = await create(world)
        at = (await world.http.get(f"/sandboxes/{made['sandboxID']}")).json()["startedAt"]
        later = datetime.fromisoformat(at) + timedelta(microseconds=1)

        async def listed(since: str) -> list[str]:
            found = await world.http.get(f"/v2/sandboxes?startedAfter={quote(since)}")
            return [item["sandboxID"] for item in found.json()]

        assert await listed(at) == [made["sandboxID"]]
        assert await listed(later.isoformat()) == []


async def test_whatever_a_sandbox_can_be_created_from_exists_as_a_template() -> None:
    async with paddock() as world:
        made = await create(world)
        path = f"/sandboxes/{made['sandboxID']}/snapshots"
        stored = (await world.http.post(path, json={"name": "trained"})).json()
        pool = SandboxPoolSpec(template=SandboxTemplateSpec(), replicas=0)
        await world.store.create(
            SandboxPool(metadata=ObjectMeta(name="inline", namespace="default"), spec=pool)
        )
        await world.until(lambda: world.provider.get(SandboxPool, Key("default", "inline")))
        for reference, identity in (
            ("base", "base"),
            ("inline", "inline"),
            ("trained", stored["snapshotID"]),
            (stored["snapshotID"], stored["snapshotID"]),
        ):
            found = await world.http.get(f"/templates/aliases/{quote(reference)}")
            assert (found.status_code, found.json()["templateID"]) == (200, identity)
            await create(world, templateID=reference)
        for reference in ("other", "not a name"):
            found = await world.http.get(f"/templates/aliases/{quote(reference)}")
            assert found.status_code == 404


async def test_an_unknown_template_is_a_404_with_the_next_step() -> None:
    async with paddock() as world:
        missing = (await create(world, 404, templateID="other"))["message"]
        assert missing.startswith("template 'other' not found (")
        for way in ("Template.build()", "paddock template build", "paddock apply"):
            assert way in missing
        assert "templates that exist: base" in missing
        interpreter = (await create(world, 404, templateID="code-interpreter-v1"))["message"]
        assert "`paddock template install code-interpreter`" in interpreter
        assert "templates that exist: base" in interpreter


async def test_metadata_filters_may_be_encoded_three_times() -> None:
    async with paddock() as world:
        wanted = await create(world, metadata={"user": "a b", "k": "v&x=y/%"})
        await create(world, metadata={"user": "a b"})
        pairs = "&".join(
            f"{quote(quote(key))}={quote(quote(value, safe=''), safe='')}"
            for key, value in (("user", "a b"), ("k", "v&x=y/%"))
        )
        found = await world.http.get(f"/v2/sandboxes?metadata={quote(pairs, safe='')}")
        assert [item["sandboxID"] for item in found.json()] == [wanted["sandboxID"]]


async def test_an_idempotency_key_creates_one_sandbox_and_a_bad_one_is_refused() -> None:
    async with paddock() as world:
        key = {"Idempotency-Key": "once-1"}
        first, second = await asyncio.gather(create(world, headers=key), create(world, headers=key))
        assert first["sandboxID"] == second["sandboxID"]
        assert len([item for item in world.provider.all(Sandbox) if item.spec.claim]) == 1
        await create(world, 400, headers={"Idempotency-Key": "no spaces"})
        await create(world, 409, headers=key, metadata={"another": "request"})


async def test_a_quota_is_a_429_without_retry_and_can_be_raised() -> None:
    async with paddock() as world:
        limit = {"dimension": "sandbox.count", "scope": "all", "limit": 1}
        key = await new_key(world, quota={"limits": [limit]})
        headers = {"X-API-Key": key["X-API-Key"]}
        await create(world, headers=headers)
        refused = await world.http.post(
            "/v2/sandboxes", json={"templateID": "base"}, headers=headers
        )
        assert refused.status_code == 429
        assert refused.headers["Should-Retry"] == "false"
        patch = {"quota": {"limits": [{**limit, "limit": 2}]}}
        changed = await world.http.patch(f"/api-keys/{key['id']}", json=patch)
        assert changed.status_code == 200
        await create(world, headers=headers)
        await create(world, 429, headers=headers)
        everybody = {"quota": {"limits": [{**limit, "limit": 2}]}}
        assert (await world.http.patch("/teams/default", json=everybody)).status_code == 200
        await create(world, 429)
        own = await world.http.patch("/teams/default", json=everybody, headers=headers)
        assert own.status_code == 403
        for path in ("/teams/default", "/api-keys"):
            method = "POST" if path == "/api-keys" else "PATCH"
            wrong = {"quota": {"limits": [limit, {**limit, "limit": -1}]}}
            named = {"name": "k", **wrong} if method == "POST" else wrong
            response = await world.http.request(method, path, json=named)
            assert response.status_code == 400
            assert response.json()["message"] == "quota.limits[1].limit: must be at least 0"


async def test_a_reader_can_read_and_change_nothing() -> None:
    async with paddock() as world:
        made = await create(world)
        headers = {"X-API-Key": (await new_key(world, role="reader"))["X-API-Key"]}
        path = f"/sandboxes/{made['sandboxID']}"
        assert (await world.http.get(path, headers=headers)).status_code == 200
        assert (await world.http.get("/v2/sandboxes", headers=headers)).status_code == 200
        await create(world, 403, headers=headers)
        for method, target in (
            ("POST", f"{path}/pause"),
            ("POST", f"{path}/connect"),
            ("POST", f"{path}/fork"),
            ("POST", f"{path}/snapshots"),
            ("DELETE", path),
            ("POST", "/api-keys"),
        ):
            response = await world.http.request(
                method, target, json={"name": "x"} if "keys" in target else {}, headers=headers
            )
            assert response.status_code == 403, (method, target)


async def test_a_revoked_key_is_refused_at_once_and_last_uses_are_recorded() -> None:
    async with paddock() as world:
        key = await new_key(world)
        headers = {"X-API-Key": key["X-API-Key"]}
        assert (await world.http.get("/v2/sandboxes", headers=headers)).status_code == 200
        await asyncio.sleep(120)
        listed = (await world.http.get("/api-keys")).json()
        assert next(item for item in listed if item["id"] == key["id"])["lastUsed"]
        assert key["X-API-Key"] not in str(listed)
        assert (await world.http.delete(f"/api-keys/{key['id']}")).status_code == 204
        refused = await world.http.get("/v2/sandboxes", headers=headers)
        assert refused.status_code == 401
        # Another process on the same store refuses it too.
        stored = await world.store.list(Secret, namespace=SYSTEM_NAMESPACE)
        assert key["id"] not in [item.metadata.name for item in stored.items]


async def test_another_teams_sandboxes_are_not_found() -> None:
    async with paddock() as world:
        made = await create(world)
        headers = {"X-API-Key": (await new_key(world, teamName="strangers"))["X-API-Key"]}
        response = await world.http.get(f"/sandboxes/{made['sandboxID']}", headers=headers)
        assert response.status_code == 404
        assert (await world.http.get("/v2/sandboxes", headers=headers)).json() == []
        kill = await world.http.delete(f"/sandboxes/{made['sandboxID']}", headers=headers)
        assert kill.status_code == 404


async def test_everything_is_served_below_kruise_api_too_with_its_extension_keys() -> None:
    async with paddock() as world:
        metadata = {
            "user": "ada",
            "e2b.agents.kruise.io/never-timeout": "true",
            "label:tier": "gold",
        }
        body = {"templateID": "base", "metadata": metadata}
        made = (await world.http.post("/kruise/api/sandboxes", json=body)).json()
        path = f"/kruise/api/sandboxes/{made['sandboxID']}"
        detail = (await world.http.get(path)).json()
        assert detail["metadata"] == {"user": "ada", "tier": "gold"}
        assert detail["endAt"].startswith("0001-01-01")
        await asyncio.sleep(10_000)
        assert (await world.http.get(path)).status_code == 200
        unknown = {"templateID": "base", "metadata": {"e2b.agents.kruise.io/unknown": "1"}}
        refused = await world.http.post("/kruise/api/sandboxes", json=unknown)
        assert refused.status_code == 400
        none = {"e2b.agents.kruise.io/create-on-no-stock": "false"}
        for _ in range(2):
            await create(world)
        await create(world, 429, metadata=none)
        header = {"x-e2b-kruise-reserve-paused-sandbox-duration": "1h"}
        asleep = await create(world, metadata={"e2b.agents.kruise.io/never-timeout": "true"})
        asleep_path = f"/kruise/api/sandboxes/{asleep['sandboxID']}"
        assert (await world.http.post(f"{asleep_path}/pause")).is_success
        body = (await world.http.get(asleep_path)).json()
        assert body["state"] == "paused"
        assert body["endAt"].startswith("0001-01-01")
        paused = await world.http.post(f"{path}/pause", headers=header)
        assert paused.status_code == 204
        bad = {"x-e2b-kruise-reserve-paused-sandbox-duration": "soon"}
        assert (await world.http.post(f"{path}/pause", headers=bad)).status_code == 400


@pytest.mark.parametrize(
    ("retention", "seconds"),
    [({}, 14 * 86400), ({RETENTION: "90m"}, 5400), ({RETENTION: "7d"}, 7 * 86400)],
)
async def test_a_paused_sandbox_shows_the_end_of_its_retention(retention, seconds) -> None:
    async with paddock() as world:
        made = await create(world, metadata=retention)
        path = f"/sandboxes/{made['sandboxID']}"
        assert (await world.http.post(f"{path}/pause")).is_success
        listed = (await world.http.get("/v2/sandboxes?state=paused")).json()
        for body in ((await world.http.get(path)).json(), *listed):
            left = datetime.fromisoformat(body["endAt"]) - world.plane.clock.now()
            assert left.total_seconds() == pytest.approx(seconds, abs=10)


@pytest.mark.parametrize(("setting", "metadata"), [(14 * 86400, {RETENTION: "forever"}), (0, {})])
async def test_a_paused_sandbox_that_is_kept_indefinitely_shows_no_end(setting, metadata) -> None:
    """Neither the end of its timeout nor the instant of its pause: nothing ends it."""
    async with paddock(paused_retention_seconds=setting) as world:
        unlimited = await create(
            world, metadata={"e2b.agents.kruise.io/never-timeout": "true", **metadata}
        )
        end = (await world.http.get(f"/sandboxes/{unlimited['sandboxID']}")).json()["endAt"]
        made = await create(world, metadata=metadata)
        path = f"/sandboxes/{made['sandboxID']}"
        assert (await world.http.post(f"{path}/pause")).is_success
        await asyncio.sleep(3600)
        listed = (await world.http.get("/v2/sandboxes?state=paused")).json()
        for body in ((await world.http.get(path)).json(), *listed):
            assert (body["state"], body["endAt"]) == ("paused", end)
        assert end.startswith("0001-01-01")


async def test_the_pause_strategy_can_be_set_at_create() -> None:
    async with paddock() as world:
        key = "paddock.dev/pause-strategy"
        made = await create(world, metadata={key: "Hibernate", "user": "ada"})
        await world.http.post(f"/sandboxes/{made['sandboxID']}/pause")
        (sandbox,) = (item for item in world.provider.all(Sandbox) if item.spec.claim)
        assert sandbox.status.pause_strategy is PauseStrategy.HIBERNATE
        assert sandbox.spec.claim.metadata == {"user": "ada"}
        refused = await create(world, 400, metadata={key: "Sleep"})
        assert "Freeze or Hibernate" in refused["message"]


async def test_request_ids_are_kept_or_generated_and_a_missing_key_is_a_401() -> None:
    async with paddock() as world:
        given = await world.http.get("/v2/sandboxes", headers={"X-Request-ID": "mine-1"})
        assert given.headers["X-Request-ID"] == "mine-1"
        made = await world.http.get("/v2/sandboxes/nothing")
        assert made.status_code == 404
        assert made.headers["X-Request-ID"] == made.json()["request_id"]
        response = await world.http.get("/v2/sandboxes", headers={"X-API-Key": ""})
        assert response.status_code == 401
        assert response.json()["code"] == 401


async def test_routes_not_offered_say_what_to_do_instead() -> None:
    async with paddock() as world:
        for method, path in (
            *(("POST", "/templates"), ("GET", "/volumes"), ("GET", "/volumecontent/v/dir")),
            *(("GET", "/secrets"), ("POST", "/access-tokens"), ("GET", "/nodes")),
            *(("GET", "/teams/default/metrics/max"), ("POST", "/admin/teams/x/builds/cancel")),
        ):
            response = await world.http.request(method, path)
            assert response.status_code == 501
            assert "(" in response.json()["message"]


async def test_the_first_key_is_an_administrator_key() -> None:
    async with paddock() as world:
        teams = (await world.http.get("/teams")).json()
        assert [team["name"] for team in teams if team["isDefault"]] == ["default"]
        assert teams[0]["apiKey"] in ("", SECRETS.api_key)


async def test_only_its_own_team_can_publish_and_withdraw_a_template() -> None:
    async with paddock() as world:
        mine = SandboxTemplate(
            metadata=ObjectMeta(name="mine", namespace="default"),
            spec=SandboxTemplateSpec(aliases=("alias",), public=False),
        )
        await world.provider.write.create(mine)
        for path, public in (("/v2/templates/mine", True), ("/templates/alias", False)):
            response = await world.http.patch(path, json={"public": public})
            assert (response.status_code, response.json()) == (
                200,
                {"names": ["default/mine", "default/alias"]},
            )
            shown = (await world.http.get("/templates/mine")).json()
            assert shown["public"] is public
        await world.http.patch("/v2/templates/mine", json={"public": True})
        _, other = await world.plane.keyring.create(name="other", team="others")
        refused = await world.http.patch(
            "/v2/templates/mine", json={"public": False}, headers={"X-API-Key": other}
        )
        assert refused.status_code == 403
        assert (await world.http.patch("/v2/templates/none", json={})).status_code == 404
