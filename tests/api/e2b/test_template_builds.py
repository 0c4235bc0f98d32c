"""The build API of E2B on objects: names, tags, limits, messages. The steps do not run here.

The controller of builds does nothing here: the tests write the status as it does.
"""

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from msgspec import structs

from paddock.builds.files import BuildFiles
from paddock.claims.caller import Role
from paddock.controllers.template_build.controller import TemplateBuildController
from paddock.engine.controller import Done
from paddock.manager.templates.builds import MAX_WAITING, WAITING_SECONDS
from paddock.manager.templates.names import MAX_BUILD_TAGS
from paddock.resources.kinds.pool import CONDITION_DEGRADED, SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import (
    Resources,
    SandboxTemplate,
    SandboxTemplateSpec,
    TemplateRef,
)
from paddock.resources.kinds.template_build import BuildPhase, TemplateBuild
from paddock.resources.meta import ConditionStatus, Key, ObjectMeta, condition
from paddock.resources.transitions.template_tags import MAX_TAGS
from tests.api.audit.recorded import recording
from tests.scenario.paddock import World, paddock

pytestmark = pytest.mark.looptime
HASH = "a" * 64
ZERO = "00000000-0000-0000-0000-000000000000"
AWS_IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/tools:1"
AWS = {
    "type": "aws",
    "awsAccessKeyId": "AKIDEXAMPLE",
    "awsSecretAccessKey": "hunter2",
    "awsRegion": "eu-west-1",
}


@pytest.fixture(autouse=True)
def idle_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reconcile(_self: object, _key: Key) -> Done:
        return Done()

    monkeypatch.setattr(TemplateBuildController, "reconcile", reconcile)


async def key_of(world: World, team: str = "red", **options: Any) -> dict[str, str]:
    _, plain = await world.plane.keyring.create(name="k", team=team, **options)
    return {"X-API-Key": plain}


class Client:
    """Calls of one team."""

    def __init__(self, world: World, headers: dict[str, str], team: str = "red") -> None:
        self.world = world
        self.headers = headers
        self.team = team

    async def ask(self, method: str, path: str, expected: int, **json: Any) -> Any:
        body = {"json": json} if method != "GET" else {"params": json}
        answer = await self.world.http.request(method, path, headers=self.headers, **body)
        assert answer.status_code == expected, answer.text
        return answer.json() if answer.content else None

    async def request(self, name: str, expected: int = 202, **options: Any) -> Any:
        return await self.ask("POST", "/v3/templates", expected, name=name, **options)

    async def start(self, build: Any, expected: int = 202, **options: Any) -> Any:
        path = f"/v2/templates/{build['templateID']}/builds/{build['buildID']}"
        return await self.ask("POST", path, expected, **{"fromImage": "base", **options})

    async def status(self, build: Any, expected: int = 200, **query: Any) -> Any:
        path = f"/templates/{build['templateID']}/builds/{build['buildID']}/status"
        return await self.ask("GET", path, expected, **query)

    async def finish(
        self, build: Any, phase: BuildPhase = BuildPhase.READY, image: str = "base", **status: Any
    ) -> None:
        """Write the status of a build as its controller does."""
        key = Key(self.team, build["buildID"])
        resources = Resources(cpu="4", memory="256Mi")
        template = SandboxTemplateSpec(image=image, resources=resources)
        await self.world.provider.write.mutate(
            TemplateBuild,
            key,
            lambda item: structs.replace(
                item,
                status=structs.replace(item.status, phase=phase, template=template, **status),
            ),
            is_status=True,
        )

    async def built(self, name: str, **options: Any) -> Any:
        build = await self.request(name, **options)
        await self.finish(build)
        return build


async def red(world: World, **options: Any) -> Client:
    return Client(world, await key_of(world, **options))


def stored(world: World, build: Any, team: str = "red") -> TemplateBuild:
    found = world.provider.get(TemplateBuild, Key(team, build["buildID"]))
    assert found is not None
    return found


def files(world: World) -> BuildFiles:
    found = world.plane.assembly.build_files
    assert found is not None
    return found


# ---- request ---------------------------------------------------------------------------------


async def test_a_member_registers_a_build_and_gets_ids_names_and_tags() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        build = await client.request(" My-App ", tags=["V2", "v1"], cpuCount=4, memoryMB=512)
        assert str(UUID(build["buildID"])) == build["buildID"]
        assert build | {"buildID": ""} == {
            "templateID": "my-app",
            "buildID": "",
            "public": False,
            "names": ["red/my-app"],
            "tags": ["v2", "v1"],
            "aliases": ["my-app"],
        }
        made = stored(world, build)
        assert (made.spec.owner, made.spec.template_name) == ("red", "my-app")
        assert made.spec.resources == Resources(cpu="4", memory="512Mi")
        assert made.metadata.owner_references[0].kind == "SandboxTemplate"


@pytest.mark.parametrize("name", ["_private", "trailing-", "-x", "__", "a" * 128, "9_9-"])
async def test_names_of_the_service_are_accepted_and_found_again(name: str) -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        made = await client.built(f"{name}:v1")
        assert made["aliases"] == [name]
        again = await client.request(f"red/{name}")
        assert again["templateID"] == made["templateID"]
        found = await client.ask("GET", f"/templates/aliases/{name}", 200)
        assert found["templateID"] == made["templateID"]
        await client.ask("DELETE", f"/templates/{name}", 204)


async def test_names_that_no_object_can_have_become_aliases() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        first = await client.request("my_app")
        assert (first["aliases"], first["names"]) == (["my_app"], ["red/my_app"])
        again = await client.request("red/my_app")
        assert again["templateID"] == first["templateID"] != "my_app"
        await client.finish(again)
        await client.ask("GET", "/templates/aliases/my_app", 200)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Name is required"),
        ({"name": "  "}, "Name is required"),
        ({"name": "a b"}, "Invalid name: "),
        ({"name": ":x"}, "Invalid name: "),
        ({"name": "n:"}, "Invalid tag: "),
        ({"name": "n:a b"}, "Invalid tag: "),
        ({"name": f"n:{ZERO}"}, "Invalid tag: "),
        ({"name": "blue/n"}, "namespace 'blue' must match your team 'red'"),
        ({"name": "n", "cpuCount": 0}, "CPU count must be at least 1"),
        ({"name": "n", "cpuCount": 64}, "CPU count must be at most 32"),
        ({"name": "n", "cpuCount": 3}, "CPU count must be 1 or an even number"),
        ({"name": "n", "memoryMB": 64}, "Memory must be at least 128 MiB"),
        ({"name": "n", "memoryMB": 129}, "Memory must be divisible by 2"),
        ({"name": "n", "memoryMB": 8194}, "Memory must be at most 8192 MiB"),
        ({"name": "n", "minFreeDiskMb": -1}, "Free disk space must be between"),
        ({"name": "n", "tags": [""]}, "Invalid tag: "),
        ({"name": "n", "teamID": "blue"}, "team 'blue' is not the team of this API key"),
    ],
)
async def test_a_request_out_of_range_is_refused_by_name(body: Any, message: str) -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        refused = await client.ask("POST", "/v3/templates", 400, **body)
        assert refused["message"].startswith(message)
        assert world.provider.all(TemplateBuild) == ()


async def test_a_name_of_a_pool_an_environment_or_a_snapshot_is_taken() -> None:
    async with paddock(pool_size=1) as world:
        client = await red(world)
        pool = SandboxPool(
            metadata=ObjectMeta(name="busy", namespace="red"),
            spec=SandboxPoolSpec(template=SandboxTemplateSpec(), replicas=0),
        )
        await world.provider.write.create(pool)
        refused = await client.request("busy", 409)
        assert "used by a pool" in refused["message"]
        made = await client.ask("POST", "/v2/sandboxes", 201, templateID="base")
        path = f"/sandboxes/{made['sandboxID']}/snapshots"
        await client.ask("POST", path, 201, name="kept")
        refused = await client.request("kept", 409)
        assert "used by a snapshot" in refused["message"]
        await client.request("mine")
        refused = await client.ask("POST", path, 409, name="mine:v1")
        assert "used by a template" in refused["message"]


async def test_only_an_operator_builds_a_template_that_serves_every_team() -> None:
    async with paddock(pool_size=0) as world:
        member = Client(world, await key_of(world, team="default"), "default")
        refused = await member.request("base", 403)
        assert "serves every team" in refused["message"]
        build = await member.request("own")
        assert build["public"] is False
        own = await red(world)
        assert (await own.request("base"))["names"] == ["red/base"]
        await own.ask("GET", f"/templates/own/builds/{build['buildID']}/status", 403)


async def test_a_member_cannot_replace_a_template_that_was_declared() -> None:
    async with paddock(pool_size=0) as world:
        meta = ObjectMeta(name="declared", namespace="red")
        await world.provider.write.create(SandboxTemplate(metadata=meta))
        await (await red(world)).request("declared", 403)
        await (await red(world, role=Role.ADMIN)).request("declared")


async def test_readers_and_keys_for_sandboxes_do_not_build() -> None:
    async with paddock(pool_size=0) as world:
        for options in ({"role": Role.READER}, {"scopes": ("create",)}, {"scopes": ("read",)}):
            await (await red(world, **options)).request("app", 403)
        scoped = await red(world, scopes=("template:app",))
        await scoped.request("app")
        await scoped.request("other", 403)


async def test_a_key_for_one_template_builds_from_no_other_one_and_from_no_snapshot() -> None:
    async with paddock(pool_size=0) as world:
        await (await red(world)).built("app")
        scoped = await red(world, scopes=("template:app",))
        build = await scoped.request("app")
        for base in ("other", "app:v1", "blue/app", "snapshot"):
            await scoped.start(build, 403, fromImage="", fromTemplate=base)
        await scoped.start(build, fromImage="", fromTemplate="app")


async def test_a_template_that_was_declared_meanwhile_is_not_replaced() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        build = await client.request("app")
        template = world.provider.get(SandboxTemplate, Key("red", "app"))
        assert template is not None
        declared = structs.replace(template.metadata, labels={})
        await world.provider.write.update(structs.replace(template, metadata=declared))
        await client.start(build, 403)
        assert not stored(world, build).spec.started


# ---- start, limits, superseded ---------------------------------------------------------------


async def test_steps_have_a_largest_size() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        build = await client.request("app")
        steps = [{"type": "RUN", "args": ["x" * 70_000]}] * 2
        refused = await client.start(build, 400, steps=steps)
        assert "a build has at most 131072" in refused["message"]
        await client.start(build, steps=steps[:1])


async def test_templates_of_a_team_are_bounded() -> None:
    async with paddock(pool_size=0, templates_per_team=2) as world:
        client = await red(world)
        for name in ("one", "two"):
            await client.built(name)
        refused = await client.request("three", 429)
        assert "has 2 templates, as many as the setting templates_per_team" in refused["message"]
        await client.request("one")


async def test_builds_of_one_second_are_listed_in_the_order_of_their_requests() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        requested: list[str] = []
        for _ in range(8):
            requested.append((await client.request("app"))["buildID"])
            await asyncio.sleep(0.001)  # of virtual time
        shown = await client.ask("GET", "/templates/app", 200)
        assert [item["buildID"] for item in shown["builds"]] == requested[::-1]


async def test_a_build_is_started_once() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        build = await client.request("app")
        assert (await client.status(build)) == {
            "templateID": "app",
            "buildID": build["buildID"],
            "status": "waiting",
            "logs": [],
            "logEntries": [],
        }
        await client.start(
            build,
            steps=[
                {"type": "RUN", "args": ["true"], "force": True, "forceUpload": None},
                {"type": "COPY", "args": ["a", "b", "", ""], "filesHash": HASH},
            ],
            startCmd="serve",
            readyCmd="check",
        )
        spec = stored(world, build).spec
        assert spec.started
        assert [(step.type, step.force) for step in spec.steps] == [("RUN", True), ("COPY", False)]
        assert (spec.start_command, spec.ready_command) == ("serve", "check")
        refused = await client.start(build, 400)
        assert refused["message"] == "build is not in waiting state"


@pytest.mark.parametrize(
    "body",
    [
        {"fromImage": None},
        {"fromTemplate": "base"},
        {"steps": [{"type": "run", "args": []}]},
        {"steps": [{"type": "RUN", "filesHash": "x"}]},
        {"fromImageRegistry": {"type": "ftp"}},
        {"fromImageRegistry": {"type": "aws"}},
        {"fromImageRegistry": AWS},
    ],
)
async def test_a_start_that_cannot_be_built_is_refused(body: Any) -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        build = await client.request("app")
        await client.start(build, 400, **body)
        assert not stored(world, build).spec.started


async def test_credentials_of_a_registry_are_not_stored() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        build = await client.request("app")
        secret = {"type": "registry", "username": "user", "password": "hunter2"}
        await client.start(build, fromImage="private/image", fromImageRegistry=secret)
        made = stored(world, build)
        assert "hunter2" not in repr(made)


async def test_aws_keys_are_accepted_for_registries_of_their_region_and_not_stored() -> None:
    image = AWS_IMAGE
    async with paddock(pool_size=0) as world:
        client = await red(world)
        build = await client.request("app")
        await client.start(build, fromImage=image, fromImageRegistry=AWS)
        made = stored(world, build)
        assert made.spec.started
        assert "hunter2" not in repr(made)


async def test_too_many_builds_at_once_are_refused_for_good() -> None:
    async with paddock(pool_size=0, template_builds_per_team=2) as world:
        client = await red(world)
        waiting = [await client.request(f"app{number}") for number in range(3)]
        for build in waiting[:2]:
            await client.start(build)
        answer = await world.http.post(
            "/v3/templates", json={"name": "more"}, headers=client.headers
        )
        assert (answer.status_code, answer.headers["Should-Retry"]) == (429, "false")
        assert "maximum number of concurrent template builds (2)" in answer.json()["message"]
        await client.start(waiting[2], 429)
        other = Client(world, await key_of(world, team="blue"), "blue")
        await other.request("app")
        await client.finish(waiting[0])
        await client.request("more")


async def test_builds_that_are_never_started_are_bounded() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        for number in range(MAX_WAITING):
            await client.request(f"app{number}")
        await client.request("more", 429)
        await asyncio.sleep(WAITING_SECONDS + 1)
        await client.request("more")


async def test_a_newer_build_supersedes_those_that_share_a_tag() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        first = await client.request("app", tags=["v1", "v2"])
        other = await client.request("app:v3")
        await client.request("app", tags=["v2"])
        superseded = await client.status(first)
        assert superseded["status"] == "error"
        assert superseded["reason"]["message"] == (
            "The build was canceled because it was superseded by a newer one."
        )
        refused = await client.start(first, 400)
        assert refused["message"] == "build is not in waiting state"
        assert (await client.status(other))["status"] == "waiting"


async def test_parallel_builds_with_different_tags_do_not_disturb_each_other() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        builds = await asyncio.gather(*(client.request(f"app:v{n}") for n in range(4)))
        assert {build["templateID"] for build in builds} == {"app"}
        for build in builds:
            assert (await client.status(build))["status"] == "waiting"
            await client.finish(build)
        listed = await client.ask("GET", "/templates/app/tags", 200)
        assert {(item["tag"], item["buildID"]) for item in listed} == {
            (f"v{number}", build["buildID"]) for number, build in enumerate(builds)
        }


# ---- status and logs -------------------------------------------------------------------------


async def test_the_first_status_after_the_start_is_building() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        build = await client.request("app")
        await client.start(build, steps=[{"type": "RUN", "args": ["sleep 10"]}])
        assert (await client.status(build))["status"] == "building"


async def test_the_log_is_read_from_an_offset_within_the_level(tmp_path: Path) -> None:
    async with paddock(pool_size=0, state_dir=str(tmp_path)) as world:
        client = await red(world)
        build = await client.request("app")
        uid = stored(world, build).metadata.uid
        for number in range(150):
            level = "warn" if number % 50 == 0 else "info"
            files(world).logs.append(uid, f"line {number}", level=level, step="2")
        await client.finish(build, BuildPhase.FAILED, message="it broke", failed_step="2")
        page = await client.status(build)
        assert [item["message"] for item in page["logEntries"]] == [
            f"line {number}" for number in range(100)
        ]
        rest = await client.status(build, logsOffset=100)
        assert [item["message"] for item in rest["logEntries"]][-1] == "line 149"
        assert (await client.status(build, logsOffset=150))["logEntries"] == []
        warned = await client.status(build, level="warn", logsOffset=1)
        assert [item["message"] for item in warned["logEntries"]] == ["line 50", "line 100"]
        assert page["status"] == "error"
        assert page["reason"]["message"] == "it broke"
        assert page["reason"]["step"] == "2"
        assert len(page["reason"]["logEntries"]) == 3
        path = f"/templates/app/builds/{build['buildID']}/logs"
        last = await client.ask("GET", path, 200, direction="backward", limit=2)
        assert [item["message"] for item in last["logs"]] == ["line 149", "line 148"]


async def test_an_unknown_build_is_a_400_and_one_of_another_team_a_403() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        build = await client.request("app")
        other = Client(world, await key_of(world, team="blue"), "blue")
        unknown = {"templateID": "app", "buildID": ZERO}
        assert (await client.status(unknown, 400))["message"] == f"Build '{ZERO}' not found"
        await client.status({"templateID": "app", "buildID": "x"}, 400)
        await client.status({"templateID": "other", "buildID": build["buildID"]}, 400)
        await other.status(build, 403)
        await other.start(build, 403)
        await other.ask("GET", f"/templates/app/files/{HASH}", 404)


# ---- uploads ---------------------------------------------------------------------------------


async def test_files_are_uploaded_once_for_a_team_without_an_api_key(tmp_path: Path) -> None:
    async with paddock(pool_size=0, state_dir=str(tmp_path)) as world:
        client = await red(world)
        await client.request("app")
        headers = client.headers | {"Host": "sandboxes.example:8443", "X-Forwarded-Proto": "https"}
        answer = await world.http.get(f"/kruise/api/templates/app/files/{HASH}", headers=headers)
        assert answer.status_code == 201
        link = answer.json()
        assert link["present"] is False
        assert link["url"].startswith(
            "https://sandboxes.example:8443/kruise/api/templates/uploads/"
        )
        path = link["url"].removeprefix("https://sandboxes.example:8443")
        put = await world.http.put(path, content=b"archive", headers={"X-API-Key": ""})
        assert put.status_code == 204, put.text
        again = await world.http.put(path, content=b"other", headers={"X-API-Key": ""})
        assert again.status_code == 401
        found = files(world).uploads.path("red", HASH)
        assert found is not None
        assert found.read_bytes() == b"archive"
        assert (await client.ask("GET", f"/templates/app/files/{HASH}", 201))["present"] is True
        other = Client(world, await key_of(world, team="blue"), "blue")
        await other.request("app")
        assert (await other.ask("GET", f"/templates/app/files/{HASH}", 201))["present"] is False
        await client.ask("GET", "/templates/app/files/nope", 400)
        await client.ask("GET", f"/templates/none/files/{HASH}", 404)


async def test_the_audit_log_shows_who_uploads_and_not_the_url(tmp_path: Path) -> None:
    lines, audit = recording()
    async with paddock(pool_size=0, audit=audit, state_dir=str(tmp_path)) as world:
        client = await red(world)
        await client.request("app")
        link = await client.ask("GET", f"/templates/app/files/{HASH}", 201)
        token = link["url"].rpartition("/")[2]
        lines.take()
        await world.http.put(f"/templates/uploads/{token}", content=b"x", headers={"X-API-Key": ""})
        [event] = lines.take()
        assert event["requestURI"] == "/templates/uploads/..."
        assert (event["verb"], event["objectRef"]["subresource"]) == ("update", "files")
        assert event["user"]["groups"][0] == "red"
        assert token not in repr(event)


# ---- names, tags, sandboxes ------------------------------------------------------------------


async def test_a_name_exists_from_the_request_on_and_its_default_once_it_is_ready() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        await client.ask("GET", "/templates/aliases/app", 404)
        build = await client.request("app")
        for name in ("app", "red%2Fapp"):
            found = await client.ask("GET", f"/templates/aliases/{name}", 200)
            assert found == {"templateID": "app", "public": False}
        await client.ask("GET", "/templates/aliases/app%3Adefault", 404)
        await client.ask("POST", "/v2/sandboxes", 404, templateID="app")
        await client.finish(build)
        await world.provider.write.mutate(
            SandboxTemplate,
            Key("red", "app"),
            lambda item: structs.replace(
                item, status=structs.replace(item.status, build=build["buildID"])
            ),
            is_status=True,
        )
        await client.ask("GET", "/templates/aliases/app%3Adefault", 200)
        other = Client(world, await key_of(world, team="blue"), "blue")
        await other.ask("GET", "/templates/aliases/red%2Fapp", 404)


async def test_sandboxes_start_from_the_build_of_a_tag_or_of_an_id() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        one, two = await client.request("app:v1"), await client.request("app:v2")
        await client.finish(one, image="one")
        await client.finish(two, image="two")
        await client.ask("POST", "/v2/sandboxes", 404, templateID="app")
        await client.ask("POST", "/v2/sandboxes", 404, templateID="app:v3")
        for reference, image in (
            ("app:v1", "one"),
            ("red/app:v2", "two"),
            (f"app:{one['buildID']}", "one"),
        ):
            made = await client.ask("POST", "/v2/sandboxes", 201, templateID=reference)
            sandbox = world.provider.claimed_sandbox(made["sandboxID"])
            assert sandbox is not None
            assert sandbox.spec.template is not None
            assert sandbox.spec.template.image == image
        other = Client(world, await key_of(world, team="blue"), "blue")
        await other.ask("POST", "/v2/sandboxes", 404, templateID="red/app:v1")


async def test_tags_are_assigned_moved_and_removed() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        one, two = await client.built("app:v1"), await client.built("app:v2")
        moved = await client.ask(
            "POST", "/templates/tags", 201, target="app:v1", tags=["stable", "latest"]
        )
        assert moved == {"tags": ["stable", "latest"], "buildID": one["buildID"]}
        await client.ask("POST", "/templates/tags", 201, target="red/app:v2", tags=["stable"])
        listed = await client.ask("GET", "/templates/red%2Fapp/tags", 200)
        assert {item["tag"]: item["buildID"] for item in listed} == {
            "v1": one["buildID"],
            "v2": two["buildID"],
            "latest": one["buildID"],
            "stable": two["buildID"],
        }
        await client.ask("DELETE", "/templates/tags", 204, name="app", tags=["stable", "v1"])
        listed = await client.ask("GET", "/templates/app/tags", 200)
        assert [item["tag"] for item in listed] == ["v2", "latest"]


async def test_only_an_operator_changes_the_tags_of_a_template_that_serves_every_team() -> None:
    async with paddock(pool_size=0) as world:
        member = Client(world, await key_of(world, team="default"), "default")
        build = await member.built("shared", tags=["v1"])
        assign = {"target": "shared:v1", "tags": ["default"]}
        await member.ask("POST", "/templates/tags", 201, **assign)
        await world.provider.write.mutate(
            SandboxTemplate,
            Key("default", build["templateID"]),
            lambda now: structs.replace(now, spec=structs.replace(now.spec, public=True)),
        )
        for tag in ("default", "v2"):
            refused = await member.ask(
                "POST", "/templates/tags", 403, target="shared:v1", tags=[tag]
            )
            assert "serves every team" in refused["message"]
        await member.ask("DELETE", "/templates/tags", 403, name="shared", tags=["v1"])
        operator = Client(world, await key_of(world, team="default", role=Role.OPERATOR), "default")
        await operator.ask("POST", "/templates/tags", 201, **assign)
        await operator.ask("DELETE", "/templates/tags", 204, name="shared", tags=["v1"])


async def test_a_member_does_not_tag_over_a_declared_template() -> None:
    async with paddock(pool_size=0) as world:
        admin, member = await red(world, role=Role.ADMIN), await red(world)
        meta = ObjectMeta(name="declared", namespace="red")
        await world.provider.write.create(SandboxTemplate(metadata=meta))
        await admin.built("declared:v1")
        assign = {"target": "declared:v1", "tags": ["default"]}
        await member.ask("POST", "/templates/tags", 403, **assign)
        await admin.ask("POST", "/templates/tags", 201, **assign)


async def test_a_build_with_too_many_tags_leaves_nothing() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        await client.built("app:v1")
        tags = [f"t{number}" for number in range(MAX_TAGS - 1)]
        await client.ask("POST", "/templates/tags", 201, target="app:v1", tags=tags)
        refused = await client.request("app", 400, tags=["more"])
        assert "256 tags already" in refused["message"]
        assert len(world.provider.all(TemplateBuild)) == 1
        too_many = tags[:MAX_BUILD_TAGS]
        refused = await client.request("other:one-more", 400, tags=too_many)
        assert "at most 64 tags, not 65" in refused["message"]
        assert world.provider.get(SandboxTemplate, Key("red", "other")) is None


async def test_a_pool_of_a_template_waits_for_its_first_build() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        build = await client.request("app:v1")
        pool = SandboxPool(
            metadata=ObjectMeta(name="warm", namespace="red"),
            spec=SandboxPoolSpec(template_ref=TemplateRef(name="app"), replicas=1),
        )
        await world.provider.write.create(pool)

        def problem() -> str:
            found = condition(world.pool("warm", "red").status.conditions, CONDITION_DEGRADED)
            return found.message if found and found.status is ConditionStatus.TRUE else ""

        await world.until(lambda: "has no ready build" in problem())
        await client.finish(build)
        await client.ask("POST", "/templates/tags", 201, target="app:v1", tags=["default"])
        members = world.plane.pool_members.members
        await world.until(lambda: members(pool.key).available, seconds=600)


async def test_a_build_that_gets_the_tag_default_replaces_the_specification() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        one = await client.request("app:v1")
        await client.finish(one, image="one")
        await client.ask("POST", "/v2/sandboxes", 404, templateID="app")
        await client.ask("POST", "/templates/tags", 201, target="app:v1", tags=["default"])
        made = await client.ask("POST", "/v2/sandboxes", 201, templateID="app")
        sandbox = world.provider.claimed_sandbox(made["sandboxID"])
        assert sandbox is not None
        assert sandbox.spec.template is not None
        assert sandbox.spec.template.image == "one"
        template = world.provider.get(SandboxTemplate, Key("red", "app"))
        assert template is not None
        assert (template.spec.image, template.status.build) == ("one", one["buildID"])


@pytest.mark.parametrize(
    ("method", "body", "status"),
    [
        ("POST", {"target": "app:v9", "tags": ["x"]}, 404),
        ("POST", {"target": "none:v1", "tags": ["x"]}, 404),
        ("POST", {"target": "app:v1", "tags": []}, 400),
        ("POST", {"target": "app:v1", "tags": [""]}, 400),
        ("POST", {"target": "app:", "tags": ["x"]}, 400),
        ("DELETE", {"name": "app", "tags": ["default"]}, 400),
        ("DELETE", {"name": "app:v1", "tags": ["v1"]}, 400),
        ("DELETE", {"name": "app", "tags": []}, 400),
        ("DELETE", {"name": "none", "tags": ["v1"]}, 404),
    ],
)
async def test_tags_that_cannot_be_changed_are_refused(method: str, body: Any, status: int) -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        await client.built("app:v1")
        await client.ask(method, "/templates/tags", status, **body)


# ---- lists, publish, delete ------------------------------------------------------------------


async def test_a_list_shows_the_ready_default_build_and_the_status_of_the_latest() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        await client.request("fresh")
        listed = await client.ask("GET", "/templates", 200)
        shown = next(item for item in listed if item["templateID"] == "fresh")
        assert (shown["buildID"], shown["cpuCount"], shown["buildStatus"]) == (ZERO, 0, "waiting")
        build = await client.built("app", cpuCount=4, memoryMB=256)
        await asyncio.sleep(1)
        newer = await client.request("app")
        await client.finish(newer, BuildPhase.FAILED, message="no")
        listed = await client.ask("GET", "/templates", 200)
        shown = next(item for item in listed if item["templateID"] == "app")
        assert shown["buildID"] == build["buildID"]
        assert (shown["cpuCount"], shown["memoryMB"]) == (4, 256)
        assert (shown["buildStatus"], shown["buildCount"]) == ("error", 2)
        detail = await client.ask("GET", "/templates/app", 200)
        assert {item["status"] for item in detail["builds"]} == {"ready", "error"}
        base = next(item for item in listed if item["templateID"] == "base")
        assert (base["buildStatus"], base["buildCount"]) == ("ready", 1)
        await client.ask("GET", "/templates", 400, teamID="blue")


async def test_templates_are_listed_page_by_page_newest_first() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        for number in range(5):
            await client.request(f"app{number}")
            await asyncio.sleep(1)
        found, token = [], None
        while True:
            query = {"limit": 2} | ({"nextToken": token} if token else {})
            answer = await world.http.get("/v2/templates", params=query, headers=client.headers)
            found += [item["templateID"] for item in answer.json()]
            token = answer.headers.get("X-Next-Token")
            if token is None:
                break
        assert found[:5] == [f"app{number}" for number in reversed(range(5))]
        assert found[5:] == ["base"]


async def test_a_template_with_sandboxes_is_not_deleted() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        await client.built("app:v1")
        made = await client.ask("POST", "/v2/sandboxes", 201, templateID="app:v1")
        refused = await client.ask("DELETE", "/templates/app", 400)
        assert "running or paused sandboxes" in refused["message"]
        await client.ask("POST", f"/sandboxes/{made['sandboxID']}/pause", 204)
        await client.ask("DELETE", "/templates/app", 400)
        await client.ask("DELETE", f"/sandboxes/{made['sandboxID']}", 204)
        await world.until(lambda: not world.provider.all(Sandbox, namespace="red"))
        await client.ask("DELETE", "/templates/app", 204)
        await client.ask("GET", "/templates/aliases/app", 404)
        assert world.provider.all(SandboxTemplate, namespace="red") == ()


async def test_builds_of_a_deleted_template_are_gone_and_its_name_is_free() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        build = await client.request("app")
        await client.ask("DELETE", "/templates/app", 204)
        await world.until(lambda: not world.provider.all(TemplateBuild))
        await client.start(build, 400)
        again = await client.request("app")
        assert again["buildID"] != build["buildID"]


async def test_an_admin_publishes_a_built_template() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world, role=Role.ADMIN)
        await client.built("app:v1")
        changed = await client.ask("PATCH", "/v2/templates/app", 200, public=True)
        assert changed == {"names": ["red/app"]}
        other = Client(world, await key_of(world, team="blue"), "blue")
        await other.ask("POST", "/v2/sandboxes", 201, templateID="red/app:v1")
        await other.ask("DELETE", "/templates/red%2Fapp", 404)


# ---- runtimes --------------------------------------------------------------------------------


async def test_a_runtime_that_cannot_store_sandboxes_refuses_builds_with_the_reason() -> None:
    async with paddock(pool_size=0) as world:
        client = await red(world)
        world.manager.builds._files = None  # pyright: ignore[reportPrivateUsage]
        refused = await client.request("app", 501)
        assert "not supported" in refused["message"]
        await client.ask("GET", f"/templates/base/files/{HASH}", 501)
        document = (await world.http.get("/openapi.json")).json()
        assert "501" in document["paths"]["/v3/templates"]["post"]["responses"]


async def test_no_501_is_documented_where_templates_are_built() -> None:
    async with paddock(pool_size=0) as world:
        document = (await world.http.get("/openapi.json")).json()
        assert "501" not in document["paths"]["/v3/templates"]["post"]["responses"]


async def test_a_create_says_that_its_template_is_being_built_or_why_it_is_not() -> None:
    async with paddock() as world:
        operator = Client(world, {}, team="default")
        member = Client(world, await key_of(world))
        for client, name in ((operator, "code-interpreter-v1"), (member, "web")):
            build = await client.request(name)
            await client.start(build, steps=[{"type": "RUN", "args": ["true"]}])
            advice = await member.ask("POST", "/sandboxes", 404, templateID=name)
            assert "is being built (0 of 1 steps are done)" in advice["message"]
            await client.finish(build, BuildPhase.FAILED)
            advice = await member.ask("POST", "/sandboxes", 404, templateID=name)
            assert f"paddock template logs {name}" in advice["message"]
        # Other teams' builds are not told.
        other = Client(world, await key_of(world, team="blue"), team="blue")
        advice = await other.ask("POST", "/sandboxes", 404, templateID="web")
        assert "build failed" not in advice["message"]
