"""Rights in E2B's API: every route with every role and scope, as the table of rights says."""

import base64
import json
from typing import Any

import pytest
from msgspec import structs

from paddock.api.e2b.context import ROUTE_ACCESS
from paddock.claims.caller import Role
from paddock.resources.kinds.builtin import Secret
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import Key, ObjectMeta
from paddock.resources.rights import AccessRequest, Subject, decide
from tests.scenario.paddock import World, paddock

pytestmark = pytest.mark.looptime
SCOPES = ((), ("read",), ("create",), ("template:none",), ("create", "template:none"))
"""There is no template of this name: each call fails, but not for lack of rights."""


async def key_for(world: World, team: str = "red", **options: Any) -> tuple[str, dict[str, str]]:
    key, plain = await world.plane.keyring.create(name="k", team=team, **options)
    return key.id, {"X-API-Key": plain}


@pytest.mark.parametrize("role", list(Role))
async def test_every_route_follows_the_table_for_every_role_and_scope(role: Role) -> None:
    async with paddock() as world:
        for scopes in SCOPES:
            key_id, headers = await key_for(world, role=role, scopes=scopes)
            subject = Subject("red", key_id, role, scopes)
            for (method, path), access in ROUTE_ACCESS.items():
                url = path.replace("{id:path}", "none").replace("{alias:path}", "none")
                url = url.replace("{rest:path}", "x")
                for name in ("id", "name", "hash", "build"):
                    url = url.replace(f"{{{name}}}", "no")
                response = await world.http.request(method, url, headers=headers, json={})
                is_allowed = access is None or (
                    decide(
                        subject, AccessRequest(verb=access.verb, resource=access.resource)
                    ).is_allowed
                )
                is_refused = response.status_code == 403
                assert is_refused is not is_allowed, (method, path, scopes, response.text)
                assert response.status_code not in (401, 500), (method, path, response.text)
                if access is None:
                    assert response.status_code == 501, (method, path)


async def test_a_key_with_the_scope_create_uses_only_what_it_requested() -> None:
    async with paddock() as world:
        _, scoped = await key_for(world, scopes=("create",))
        _, member = await key_for(world)
        body = {"templateID": "base"}
        own = (await world.http.post("/v2/sandboxes", json=body, headers=scoped)).json()
        other = (await world.http.post("/v2/sandboxes", json=body, headers=member)).json()
        listed = (await world.http.get("/v2/sandboxes", headers=scoped)).json()
        assert [item["sandboxID"] for item in listed] == [own["sandboxID"]]
        assert len((await world.http.get("/v2/sandboxes", headers=member)).json()) == 2
        for suffix, method in (
            ("", "GET"),
            ("/pause", "POST"),
            ("/connect", "POST"),
            ("", "DELETE"),
        ):
            url = f"/sandboxes/{other['sandboxID']}{suffix}"
            response = await world.http.request(method, url, headers=scoped)
            assert response.status_code == 404, response.text
        url = f"/sandboxes/{own['sandboxID']}"
        assert (await world.http.get(url, headers=scoped)).json()["envdAccessToken"]
        assert (await world.http.post(f"{url}/pause", headers=scoped)).status_code == 204
        assert (await world.http.delete(url, headers=scoped)).status_code == 204


async def test_a_key_with_the_scope_create_gets_no_sandbox_of_another_by_idempotency_key() -> None:
    async with paddock() as world:
        _, scoped = await key_for(world, scopes=("create",))
        _, member = await key_for(world)
        call = {"json": {"templateID": "base"}}
        again = {"Idempotency-Key": "one"}
        made = await world.http.post("/v2/sandboxes", **call, headers=member | again)
        assert made.status_code == 201
        refused = await world.http.post("/v2/sandboxes", **call, headers=scoped | again)
        assert refused.status_code == 409
        assert made.json()["sandboxID"] not in refused.text


async def test_a_key_with_the_scope_of_a_template_uses_only_that_one() -> None:
    async with paddock() as world:
        meta = ObjectMeta(name="other", namespace="default")
        await world.store.create(SandboxTemplate(metadata=meta, spec=SandboxTemplateSpec()))
        _, scoped = await key_for(world, scopes=("template:base",))
        _, member = await key_for(world)

        async def made(template: str, headers: dict[str, str]) -> Any:
            body = {"templateID": template}
            return await world.http.post("/v2/sandboxes", json=body, headers=headers)

        assert (await made("other", scoped)).status_code == 403
        assert (await made("base", scoped)).status_code == 201
        other = (await made("other", member)).json()["sandboxID"]
        assert (await world.http.get(f"/sandboxes/{other}", headers=scoped)).status_code == 404
        listed = (await world.http.get("/v2/sandboxes", headers=scoped)).json()
        assert [item["templateID"] for item in listed] == ["base"]
        listed = (await world.http.get("/templates", headers=scoped)).json()
        assert [item["templateID"] for item in listed] == ["base"]
        hidden = await world.http.get("/templates/other", headers=scoped)
        assert hidden.status_code == 404
        hidden = await world.http.get("/templates/aliases/other", headers=scoped)
        assert hidden.status_code == 403


async def test_an_admin_manages_keys_of_its_team_up_to_its_own_role() -> None:
    async with paddock() as world:
        _, admin = await key_for(world, role=Role.ADMIN)
        blue, _ = await key_for(world, team="blue")
        for role, expected in (("reader", 201), ("member", 201), ("admin", 201), ("operator", 403)):
            body = {"name": "n", "role": role}
            made = await world.http.post("/api-keys", json=body, headers=admin)
            assert made.status_code == expected, made.text
        elsewhere = {"name": "n", "teamName": "blue"}
        refused = await world.http.post("/api-keys", json=elsewhere, headers=admin)
        assert refused.status_code == 403
        for method, url in (
            ("PATCH", f"/api-keys/{blue}"),
            ("DELETE", f"/api-keys/{blue}"),
            ("POST", f"/api-keys/{blue}/rotate"),
        ):
            hidden = await world.http.request(method, url, json={}, headers=admin)
            assert hidden.status_code == 404
        teams = {key["team"] for key in (await world.http.get("/api-keys", headers=admin)).json()}
        assert teams == {"red"}
        quota = {"quota": {"limits": []}}
        refused = await world.http.patch("/teams/red", json=quota, headers=admin)
        assert refused.status_code == 403


async def test_a_misspelt_scope_or_role_creates_no_key() -> None:
    async with paddock() as world:
        before = len((await world.http.get("/api-keys")).json())
        for body in ({"scopes": ["reed"]}, {"role": "legacy-member"}, {"scope": ["read"]}):
            made = await world.http.post("/api-keys", json={"name": "n", **body})
            assert made.status_code == 400, made.text
        refused = await world.http.post(
            "/api-keys", json={"name": "n", "teamName": world.plane.keyring.namespace}
        )
        assert refused.status_code == 400
        assert len((await world.http.get("/api-keys")).json()) == before


async def stored_before(world: World, key_id: str, role: str) -> None:
    """Write a record as versions before scopes did."""
    secret = await world.store.get(Secret, Key(world.plane.keyring.namespace, key_id))
    record = json.loads(base64.b64decode(secret.data["record"]))
    for field in ("scopes", "version", "expires_at", "previous_hash", "previous_until"):
        del record[field]
    record["role"] = role
    data = {"record": base64.b64encode(json.dumps(record).encode()).decode()}
    await world.store.update(structs.replace(secret, data=data))


async def test_keys_that_were_stored_before_keep_the_rights_that_they_had() -> None:
    async with paddock() as world:
        shown = {}
        for role in ("admin", "member", "reader"):
            key_id, shown[role] = await key_for(world)
            await stored_before(world, key_id, role)
        keyring = world.plane.keyring

        def role_of(role: str) -> Role:
            return keyring.authenticate(shown[role]["X-API-Key"]).role

        await world.until(lambda: role_of("admin") is Role.OPERATOR)
        await world.until(lambda: role_of("reader") is Role.READER)
        assert role_of("member") is Role.LEGACY_MEMBER
        quota = {"quota": {"limits": []}}
        http = world.http
        changed = await http.patch("/teams/blue", json=quota, headers=shown["admin"])
        assert changed.status_code == 200
        new = {"name": "n"}
        made = await http.post("/api-keys", json=new, headers=shown["member"])
        assert made.status_code == 201
        assert made.json()["role"] == "member"
        for more in ({"role": "admin"}, {"teamName": "blue"}, quota):
            refused = await http.post("/api-keys", json=new | more, headers=shown["member"])
            assert refused.status_code == 403
        refused = await http.post("/api-keys", json=new, headers=shown["reader"])
        assert refused.status_code == 403
        # Writing such a record again does not change its rights.
        await keyring.flush_last_used()
        assert role_of("admin") is Role.OPERATOR


async def test_a_member_key_stored_before_does_not_change_shared_templates() -> None:
    async with paddock() as world:
        _, headers = await key_for(world, team="default", role=Role.LEGACY_MEMBER)
        change = {"public": False}
        hidden = await world.http.patch("/templates/base", json=change, headers=headers)
        deleted = await world.http.delete("/templates/base", headers=headers)
        assert (hidden.status_code, deleted.status_code) == (403, 403)
