"""Calls of the declarative API in the audit log: every kind and method, once."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from paddock.api.audit.collapse import MAX_SENDERS, WINDOW_SECONDS
from paddock.api.kube import routes
from paddock.api.kube.scheme import ResourceTarget, base_path, group_version, subresources
from paddock.resources.registry import ALL
from tests.api.audit.recorded import Lines, recording
from tests.scenario.paddock import SECRETS, World, paddock

pytestmark = pytest.mark.looptime

VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}
POOL = {
    "apiVersion": "paddock.dev/v1alpha1",
    "kind": "SandboxPool",
    "metadata": {"generateName": "audited-", "namespace": "default"},
    "spec": {"templateRef": {"name": "base"}, "replicas": 0},
}
POOLS = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxpools"


def targets() -> list[tuple[ResourceTarget, str]]:
    """Every collection, object and subresource, with its path."""
    found: list[tuple[ResourceTarget, str]] = []
    for info in ALL:
        space = "default" if info.cls.NAMESPACED else None
        prefix = base_path(*group_version(info))
        path = f"{prefix}/namespaces/{space}" if space else prefix
        path += f"/{info.cls.PLURAL}"
        found.append((ResourceTarget(info, space), path))
        found.append((ResourceTarget(info, space, "absent"), f"{path}/absent"))
        found += [
            (ResourceTarget(info, space, "absent", part), f"{path}/absent/{part}")
            for part in subresources(info)
        ]
    return found


def verb_of(method: str, target: ResourceTarget) -> str:
    if method == "GET":
        return "get" if target.name else "list"
    if method == "DELETE":
        return "delete" if target.name else "deletecollection"
    return VERBS[method]


@pytest.fixture
async def recorded() -> AsyncIterator[tuple[World, Lines]]:
    lines, audit = recording()
    async with paddock(pool_size=0, audit=audit) as world:
        world.http.headers = httpx.Headers({"Authorization": f"Bearer {SECRETS.token}"})
        yield world, lines


async def test_every_kind_and_method_is_recorded_when_it_changes_something(
    recorded: tuple[World, Lines],
) -> None:
    world, lines = recorded
    count = 0
    for target, path in targets():
        for method in routes.handlers_of(target):
            if method == "DELETE" and target.name is None:
                # A deleted collection would take the keys of the test with it.
                path += "?labelSelector=paddock.dev%2Fnone%3Dnone"
            answer = await world.http.request(method, path, json={})
            events = lines.take()
            if method == "GET":
                assert events == []
                continue
            [event] = events
            count += 1
            wanted = {
                "resource": target.info.cls.PLURAL,
                "namespace": target.namespace,
                "name": target.name,
                "subresource": target.subresource,
                "apiGroup": group_version(target.info)[0],
                "apiVersion": group_version(target.info)[1],
            }
            assert event["objectRef"] == {key: value for key, value in wanted.items() if value}
            assert event["verb"] == verb_of(method, target)
            assert event["responseStatus"]["code"] == answer.status_code
            assert event["requestURI"] == path.partition("?")[0]
            assert event["user"]["username"] == "paddock:operator"
            assert event["auditID"] == answer.headers["audit-id"]
    assert count > 60


async def test_every_kind_and_method_is_recorded_when_a_token_is_wrong(
    recorded: tuple[World, Lines],
) -> None:
    world, lines = recorded
    number = 0
    for target, path in targets():
        for method in routes.handlers_of(target):
            number += 1
            if number % MAX_SENDERS == 0:
                await asyncio.sleep(WINDOW_SECONDS + 1)  # further ones would be counted only
            sent = {"Authorization": "Bearer guess", "X-Real-Ip": f"2001:db8:{number:x}::1"}
            refused = await world.http.request(method, path, headers=sent)
            assert refused.status_code == 401
            [event] = lines.take()
            assert event["objectRef"]["resource"] == target.info.cls.PLURAL
            assert event["verb"] == verb_of(method, target)
            assert event["user"]["username"] == "system:anonymous"
            assert event["annotations"] == {"paddock.dev/credential": "wrong"}


async def test_generated_names_and_dry_runs_are_recorded(recorded: tuple[World, Lines]) -> None:
    world, lines = recorded
    made = (await world.http.post(POOLS, json=POOL)).json()["metadata"]["name"]
    [event] = lines.take()
    assert event["objectRef"]["name"] == made
    assert event["responseStatus"] == {"code": 201}
    assert event["annotations"]["authorization.k8s.io/decision"] == "allow"
    await world.http.delete(f"{POOLS}/{made}?dryRun=All")
    [event] = lines.take()
    assert event["annotations"]["paddock.dev/dry-run"] == "true"


async def test_a_refused_watch_is_recorded_and_an_access_review_is_not(
    recorded: tuple[World, Lines],
) -> None:
    world, lines = recorded
    await world.http.get(f"{POOLS}?watch=true", headers={"Authorization": ""})
    [event] = lines.take()
    assert (event["verb"], event["responseStatus"]["code"]) == ("watch", 401)
    review = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    assert (await world.http.post(review, json={})).status_code == 201
    assert lines.take() == []
