"""API keys in the declarative API: what they may do, and whose objects they see."""

import contextlib
import json
from collections.abc import AsyncGenerator

import httpx
import pytest

from paddock.api.call_limits import CallLimits
from paddock.api.kube import key_access
from paddock.api.kube.app import create_app
from paddock.api.kube.settings import KubeApiSettings
from paddock.api.login_limits import LoginLimits
from paddock.claims.caller import Caller, Role
from paddock.controllers.template_build.layers import ANNOTATION_CONTEXT
from paddock.kit.clock import system
from paddock.kit.errors import UnauthenticatedError
from paddock.resources import rights
from paddock.resources.kinds.builtin import Event, Secret
from paddock.resources.kinds.checkpoint import Checkpoint, CheckpointSpec
from paddock.resources.kinds.claim import SandboxClaim, SandboxClaimSpec
from paddock.resources.kinds.sandbox import ClaimIdentity, Sandbox, SandboxSpec
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec
from paddock.resources.kinds.template_build import (
    LABEL_BUILD,
    BuildStep,
    TemplateBuild,
    TemplateBuildSpec,
)
from paddock.resources.meta import Key, ObjectMeta, Resource, with_meta
from paddock.resources.rights import AccessRequest
from paddock.store.memory import MemoryStore
from paddock.store.port import Store

TOKEN = "correct-horse"
KEYS = {
    "reader": Caller("red", "k1", Role.READER),
    "member": Caller("red", "k2", Role.MEMBER),
    "admin": Caller("red", "k3", Role.ADMIN),
    "operator": Caller("red", "k4", Role.OPERATOR),
    "blue": Caller("blue", "k5", Role.MEMBER),
    "shared": Caller("default", "k6", Role.ADMIN),
    "narrow": Caller("red", "k7", Role.MEMBER, ("create",)),
    "auditor": Caller("red", "k8", Role.OPERATOR, ("read",)),
    "read-only": Caller("red", "k9", Role.MEMBER, ("read",)),
}
PADDOCK = "/apis/paddock.dev/v1alpha1"
REVIEWS = "/apis/authorization.k8s.io/v1"


def sandbox(name: str, owner: str | None, namespace: str = "default", **env: str) -> Sandbox:
    claim = None
    if owner is not None:
        claim = ClaimIdentity(
            sandbox_id=name.replace("-", ""),
            owner=owner,
            lock=name,
            claim_time=system().now(),
            env_vars=env,
        )
    template = SandboxTemplateSpec(image="base", env={"PLAIN": "from-template", **env})
    return Sandbox(
        metadata=ObjectMeta(namespace=namespace, name=name),
        spec=SandboxSpec(template=template, claim=claim),
    )


def meta(name: str, namespace: str = "default") -> ObjectMeta:
    return ObjectMeta(namespace=namespace, name=name)


OBJECTS: tuple[Resource, ...] = (
    sandbox("red-shared", "red", API_KEY="s3cr3t"),
    sandbox("blue-shared", "blue", API_KEY="other"),
    sandbox("default-shared", "default"),
    sandbox("warm", None),
    sandbox("red-own", "red", "red", API_KEY="s3cr3t"),
    sandbox("red-warm", None, "red"),
    sandbox("blue-own", "blue", "blue"),
    Checkpoint(metadata=meta("c-red"), spec=CheckpointSpec(sandbox_name="x", owner="red")),
    Checkpoint(metadata=meta("c-blue"), spec=CheckpointSpec(sandbox_name="x", owner="blue")),
    SandboxClaim(metadata=meta("mine", "red"), spec=SandboxClaimSpec(template_name="base")),
    SandboxTemplate(metadata=meta("big", "red"), spec=SandboxTemplateSpec(image="base")),
    Event(metadata=meta("news", "red")),
    Event(metadata=meta("news")),
    Secret(metadata=meta("deep", "red")),
)


def find_key(key: str) -> Caller:
    if key not in KEYS:
        raise UnauthenticatedError("Invalid API key")
    return KEYS[key]


@pytest.fixture
async def store() -> AsyncGenerator[Store]:
    store = MemoryStore(history=50)
    for each in OBJECTS:
        await store.create(each)
    yield store
    await store.close()


@contextlib.asynccontextmanager
async def calling(
    store: Store, token: str, logins: LoginLimits | None = None
) -> AsyncGenerator[httpx.AsyncClient]:
    app = create_app(store, KubeApiSettings(tokens=(TOKEN,)), find_key=find_key, logins=logins)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://paddock.test",
        headers={"Authorization": f"Bearer {token}"},
    ) as client:
        yield client


async def names(store: Store, key: str, path: str) -> set[str] | int:
    """Return the names in a list, or the status of the refusal."""
    async with calling(store, key) as client:
        response = await client.get(PADDOCK + path)
    if response.status_code != 200:
        return response.status_code
    return {item["metadata"]["name"] for item in response.json()["items"]}


@pytest.mark.parametrize(
    ("key", "path", "seen"),
    [
        ("member", "/namespaces/default/sandboxes", {"red-shared"}),
        ("reader", "/namespaces/default/sandboxes", {"red-shared"}),
        ("blue", "/namespaces/default/sandboxes", {"blue-shared"}),
        ("shared", "/namespaces/default/sandboxes", {"default-shared"}),
        ("member", "/namespaces/red/sandboxes", {"red-own", "red-warm"}),
        ("blue", "/namespaces/red/sandboxes", 403),
        ("shared", "/namespaces/red/sandboxes", 403),
        ("member", "/sandboxes", {"red-own", "red-shared"}),
        ("member", "/namespaces/default/checkpoints", {"c-red"}),
        ("shared", "/namespaces/default/checkpoints", set()),
        ("member", "/namespaces/default/sandboxes?fieldSelector=spec.claim.owner=blue", set()),
        ("member", "/namespaces/default/sandboxes?limit=1", {"red-shared"}),
        ("member", "/namespaces/red/sandboxclaims", {"mine"}),
        ("member", "/namespaces/default/sandboxclaims", 403),
        ("member", "/sandboxclaims", 403),
        ("narrow", "/namespaces/red/sandboxes", 403),
        ("auditor", "/namespaces/blue/sandboxes", {"blue-own"}),
        ("operator", "/namespaces/default/sandboxes",
         {"red-shared", "blue-shared", "default-shared", "warm"}),
        (TOKEN, "/namespaces/blue/sandboxes", {"blue-own"}),
    ],
)  # fmt: skip
async def test_each_team_lists_its_own_objects(
    store: Store, key: str, path: str, seen: set[str] | int
) -> None:
    assert await names(store, key, path) == seen


@pytest.mark.parametrize(
    ("key", "path", "code"),
    [
        ("member", "/api/v1/namespaces/red/events", 200),
        ("member", "/api/v1/namespaces/default/events", 403),
        ("shared", "/api/v1/namespaces/default/events", 403),
        ("admin", "/api/v1/namespaces/red/secrets", 403),
        ("auditor", "/api/v1/namespaces/red/secrets", 403),
        ("operator", "/api/v1/namespaces/red/secrets", 200),
        ("admin", "/api/v1/namespaces", 403),
        ("unknown", "/api/v1/namespaces/red/events", 401),
        ("reader", "/apis", 200),
    ],
)
async def test_kinds_of_the_installation_are_closed(
    store: Store, key: str, path: str, code: int
) -> None:
    async with calling(store, key) as client:
        assert (await client.get(path)).status_code == code


async def test_a_sandbox_of_another_team_does_not_exist(store: Store) -> None:
    path = f"{PADDOCK}/namespaces/default/sandboxes/blue-shared"
    async with calling(store, "member") as client:
        for method in ("GET", "DELETE"):
            response = await client.request(method, path)
            assert response.status_code == 404
            absent = await client.request(method, path.replace("blue", "no"))
            assert response.json()["message"].replace("blue", "no") == absent.json()["message"]
    assert await store.get(Sandbox, Key("default", "blue-shared"))


@pytest.mark.parametrize("namespace", ["default", "red"])
async def test_sandboxes_of_builds_are_hidden_from_keys(store: Store, namespace: str) -> None:
    of_build = with_meta(sandbox("built", "red", namespace), labels={LABEL_BUILD: "b"})
    await store.create(of_build)
    path = f"/namespaces/{namespace}/sandboxes"
    shown, visible = await names(store, "operator", path), await names(store, "admin", path)
    assert isinstance(shown, set)
    assert isinstance(visible, set)
    assert shown - visible >= {"built"}
    assert await names(store, "admin", f"{path}?labelSelector={LABEL_BUILD}") == set()
    async with calling(store, "admin") as client:
        for method in ("GET", "DELETE"):
            gone = await client.request(method, f"{PADDOCK}{path}/built")
            assert gone.status_code == 404
        assert (await client.delete(PADDOCK + path)).status_code == 200
    assert await store.get(Sandbox, of_build.key)


async def test_members_delete_their_sandboxes_and_no_others(store: Store) -> None:
    async with calling(store, "member") as client:
        deleted = await client.delete(f"{PADDOCK}/namespaces/default/sandboxes")
        assert [item["metadata"]["name"] for item in deleted.json()["items"]] == ["red-shared"]
        one = await client.delete(f"{PADDOCK}/namespaces/red/sandboxes/red-own")
        assert one.status_code == 200
    async with calling(store, "reader") as client:
        refused = await client.delete(f"{PADDOCK}/namespaces/red/sandboxes/red-warm")
        assert refused.status_code == 403
    left = {item.metadata.name for item in (await store.list(Sandbox)).items}
    assert left == {"blue-shared", "default-shared", "warm", "red-warm", "blue-own"}


@pytest.mark.parametrize("key", ["reader", "member", "admin", "shared", "auditor", "read-only"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/sandboxclaims"),
        ("POST", "/sandboxes"),
        ("POST", "/checkpoints"),
        ("PUT", "/sandboxclaims/mine"),
        ("PATCH", "/sandboxtemplates/big"),
        ("PATCH", "/sandboxes/red-own/status"),
        ("PUT", "/sandboxpools/p/scale"),
    ],
)
async def test_keys_change_nothing_where_their_writes_are_not_checked(
    store: Store, key: str, method: str, path: str
) -> None:
    async with calling(store, key) as client:
        url = f"{PADDOCK}/namespaces/{KEYS[key].team}{path}"
        response = await client.request(method, url, content=b"{}")
    assert response.status_code == 403
    assert response.json()["reason"] == "Forbidden"


@pytest.mark.parametrize("accept", ["", "as=Table;g=meta.k8s.io;v=v1", "as=Stored;v=v1"])
@pytest.mark.parametrize("verb", ["get", "list", "watch"])
async def test_readers_see_no_values_of_environment_variables(
    store: Store, verb: str, accept: str
) -> None:
    path = f"{PADDOCK}/namespaces/red/sandboxes" + ("/red-own" if verb == "get" else "")
    options = {"includeObject": "Object"}
    if verb == "watch":
        options |= {"watch": "true", "timeoutSeconds": "1"}
    headers = {"Accept": f"application/json;{accept}, application/json"} if accept else {}
    texts: dict[str, str] = {}
    for key in ("reader", "read-only", "member"):
        async with calling(store, key) as client:
            response = await client.get(path, params=options, headers=headers)
            assert response.status_code == 200
            texts[key] = response.text
    assert "s3cr3t" in texts["member"]
    for key in ("reader", "read-only"):
        assert "s3cr3t" not in texts[key]
        assert "from-template" not in texts[key]
        assert "red-own" in texts[key]


def test_variables_are_hidden_wherever_they_are() -> None:
    obj = sandbox("x", "red", A="s3cr3t")
    applied = {"kubectl.kubernetes.io/last-applied-configuration": "s3cr3t", "other": "kept"}
    labelled = Sandbox(
        metadata=ObjectMeta(namespace="red", name="x", labels={"env": "prod"}, annotations=applied),
        spec=obj.spec,
    )
    hidden = key_access.without_variables(labelled)
    assert "s3cr3t" not in str(hidden)
    assert hidden.metadata.labels == {"env": "prod"}
    assert hidden.metadata.annotations["other"] == "kept"


def test_variables_of_builds_and_of_their_layers_are_hidden() -> None:
    steps = (
        BuildStep(type="RUN", args=("make",)),
        BuildStep(type="ENV", args=("A", "s3cr3t", "B", "s3cr3t")),
        BuildStep(type="ARG", args=("s3cr3t",)),
    )
    meta = ObjectMeta(namespace="red", name="x")
    built = TemplateBuild(metadata=meta, spec=TemplateBuildSpec(template_name="t", steps=steps))
    hidden = key_access.without_variables(built)
    assert isinstance(hidden, TemplateBuild)
    assert [step.args for step in hidden.spec.steps] == [
        ("make",),
        ("A", "(hidden)", "B", "(hidden)"),
        ("(hidden)",),
    ]
    annotations = {ANNOTATION_CONTEXT: '{"env":{"A":"s3cr3t"}}'}
    layer = Checkpoint(metadata=ObjectMeta(namespace="red", name="x", annotations=annotations))
    assert "s3cr3t" not in str(key_access.without_variables(layer))


@pytest.mark.parametrize(
    "field",
    [
        "spec.claim.envVars.API_KEY",
        "spec.template.env.PLAIN",
        "metadata.annotations.x",
    ],
)
async def test_readers_cannot_guess_values_by_selectors(store: Store, field: str) -> None:
    path = f"/namespaces/red/sandboxes?fieldSelector={field}=s3cr3t"
    assert await names(store, "reader", path) == 403
    assert isinstance(await names(store, "member", path), set)


async def test_a_watch_shows_a_sandbox_from_its_claim_to_its_return(store: Store) -> None:
    since = (await store.list(Sandbox)).version
    warm = await store.get(Sandbox, Key("default", "warm"))
    for owner in ("blue", "red", None):
        live = await store.get(Sandbox, Key("default", "warm"))
        await store.update(
            Sandbox(metadata=live.metadata, spec=sandbox("warm", owner).spec, status=warm.status)
        )
    async with calling(store, "member") as client:
        response = await client.get(
            f"{PADDOCK}/namespaces/default/sandboxes",
            params={"watch": "true", "timeoutSeconds": "1", "resourceVersion": since},
        )
    events = [json.loads(line) for line in response.text.splitlines()]
    assert [event["type"] for event in events] == ["ADDED", "DELETED"]
    assert "blue" not in response.text


async def test_reviews_answer_as_calls_do(store: Store) -> None:
    """For every kind, verb, namespace and key, `can-i` is what the decision is."""
    async with calling(store, "member") as client:
        for resource, verb, namespace, expected in (
            ("sandboxes", "list", "red", True),
            ("sandboxes", "list", "default", True),
            ("sandboxes", "list", "", True),
            ("sandboxes", "create", "red", False),
            ("sandboxes", "list", "blue", False),
            ("sandboxes", "*", "red", False),
            ("sandboxclaims", "delete", "red", True),
            ("something", "get", "red", False),
        ):
            asked = {"verb": verb, "group": "paddock.dev", "resource": resource}
            body = {"spec": {"resourceAttributes": {**asked, "namespace": namespace}}}
            response = await client.post(f"{REVIEWS}/selfsubjectaccessreviews", json=body)
            assert response.status_code == 201
            status = response.json()["status"]
            assert status["allowed"] is expected, (resource, verb, namespace)
            assert expected or status["reason"]
        for path, expected in (
            ("/version", True),
            ("/apis/paddock.dev", True),
            ("/metrics", False),
        ):
            body = {"spec": {"nonResourceAttributes": {"path": path, "verb": "get"}}}
            response = await client.post(f"{REVIEWS}/selfsubjectaccessreviews", json=body)
            assert response.json()["status"]["allowed"] is expected
        bad = await client.post(f"{REVIEWS}/selfsubjectaccessreviews", json={"spec": {}})
        assert bad.status_code == 400
        rules = await client.post(
            f"{REVIEWS}/selfsubjectrulesreviews", json={"spec": {"namespace": "red"}}
        )
        listed = {
            (resource, verb)
            for rule in rules.json()["status"]["resourceRules"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        assert ("sandboxes", "delete") in listed
        assert ("events", "list") in listed
        assert not {verb for _, verb in listed} - set(key_access.VERBS)
        who = await client.post("/apis/authentication.k8s.io/v1/selfsubjectreviews", json={})
        user = who.json()["status"]["userInfo"]
        assert user["username"] == "paddock:key:k2"
        assert {"red", "member"} <= set(user["groups"])


async def test_an_operator_may_do_everything(store: Store) -> None:
    for key in ("operator", TOKEN):
        async with calling(store, key) as client:
            body = {"spec": {"resourceAttributes": {"verb": "*", "group": "*", "resource": "*"}}}
            response = await client.post(f"{REVIEWS}/selfsubjectaccessreviews", json=body)
            assert response.json()["status"]["allowed"] is True


async def test_calls_of_keys_are_limited(store: Store) -> None:
    logins = LoginLimits(system(), calls=CallLimits(system(), per_key=0.5))
    async with calling(store, "member", logins) as client:
        codes = [(await client.get("/version")).status_code for _ in range(7)]
    assert codes == [200] * 5 + [429] * 2
    async with calling(store, TOKEN, logins) as client:
        assert (await client.get("/version")).status_code == 200


@pytest.mark.parametrize("key", KEYS)
def test_rights_here_never_exceed_those_of_the_table(key: str) -> None:
    """A key that may not do something by E2B's API may not do it by this one."""
    caller = KEYS[key]
    for resource in ("sandboxes", "sandboxpools", "secrets", "leases", "checkpoints", "events"):
        for verb in ("get", "list", "watch", "create", "update", "delete", "deletecollection"):
            for namespace in ("red", "blue", "default"):
                access = AccessRequest(verb=verb, resource=resource, namespace=namespace)
                if not key_access.decide(caller, access).is_allowed:
                    continue
                own = AccessRequest(verb=verb, resource=resource)
                assert rights.decide(caller, own).is_allowed
