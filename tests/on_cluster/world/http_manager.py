"""The manager and keyring of the scenarios, over HTTP to replicas in turn."""

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from paddock.api.internal import WakeBody
from paddock.claims.caller import DEFAULT_TEAM, LABEL_KIND, SYSTEM_NAMESPACE, Caller, Role
from paddock.claims.quota.ledger import Quota
from paddock.claims.requests import NewSandbox
from paddock.kit import errors
from paddock.manager.keys import KIND_TEAM
from paddock.resources import codec
from paddock.resources.kinds.builtin import Secret
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.selectors import parse_labels
from tests.on_cluster.world.catch_up import received_events
from tests.on_cluster.world.installation import API_KEY

if TYPE_CHECKING:
    from tests.on_cluster.world.control_world import ClusterWorld

_NEVER = "paddock.dev/never-timeout"
_KRUISE = "e2b.agents.kruise.io/"
_ERRORS: dict[int, type[errors.PaddockError]] = {
    400: errors.InvalidError,
    401: errors.UnauthenticatedError,
    403: errors.ForbiddenError,
    404: errors.NotFoundError,
    409: errors.ConflictError,
    501: errors.UnsupportedError,
    503: errors.UnavailableError,
    504: errors.DeadlineExceededError,
}


class HttpOnly:
    """The part of an object that is available over HTTP; other uses skip the test."""

    def __getattr__(self, name: str) -> Any:
        pytest.skip(f"it needs {name}, which is in other processes here")


class RoundRobinTransport(httpx.AsyncBaseTransport):
    """Sends requests to the replicas in turn."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = itertools.cycle(ports)
        self._inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(host="127.0.0.1", port=next(self._ports))
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()


class HttpManager:
    """The use cases that scenarios call, over HTTP; grouped as in `Manager`."""

    def __init__(self, world: "ClusterWorld") -> None:
        self.claims = self.lifecycle = self.queries = HttpSandboxes(world)


class HttpSandboxes:
    """Creates, reads and changes sandboxes over HTTP."""

    def __init__(self, world: "ClusterWorld") -> None:
        self._world = world
        self._keys = {"default": API_KEY}

    async def _request(
        self, caller: Caller, method: str, path: str, body: Any = None, **headers: str
    ) -> httpx.Response:
        headers["X-API-Key"] = await self._key(caller)
        answer = await self._world.http.request(method, path, json=body, headers=headers)
        if answer.status_code >= 400:
            raise _error(answer)
        return answer

    async def _key(self, caller: Caller) -> str:
        if caller.team not in self._keys:
            await self._world.namespace(caller.team)
            body = {"name": caller.team, "teamName": caller.team}
            made = await self._world.http.post("/api-keys", json=body)
            assert made.status_code < 300, made.text
            self._keys[caller.team] = made.json()["key"]
        return self._keys[caller.team]

    async def create(self, caller: Caller, wanted: NewSandbox) -> Sandbox:
        headers = {"Idempotency-Key": wanted.idempotency_key} if wanted.idempotency_key else {}
        made = await self._request(caller, "POST", "/v2/sandboxes", _body(wanted), **headers)
        return await self._world.claimed(made.json()["sandboxID"])

    async def get(self, caller: Caller, sandbox_id: str) -> Sandbox:
        await self._request(caller, "GET", f"/sandboxes/{sandbox_id}")
        return await self._world.claimed(sandbox_id)

    async def pause(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        memory: bool = True,
        retention_seconds: int | None = None,
    ) -> Sandbox:
        headers = {}
        if retention_seconds is not None:
            header = "x-e2b-kruise-reserve-paused-sandbox-duration"
            headers[header] = f"{retention_seconds}s"
        path = f"/sandboxes/{sandbox_id}/pause"
        await self._request(caller, "POST", path, {"memory": memory}, **headers)
        return await self._world.claimed(sandbox_id)

    async def connect(
        self, caller: Caller, sandbox_id: str, *, timeout_seconds: int
    ) -> tuple[Sandbox, bool]:
        path = f"/sandboxes/{sandbox_id}/connect"
        answer = await self._request(caller, "POST", path, {"timeout": timeout_seconds})
        return await self._world.claimed(sandbox_id), answer.status_code == 201

    async def set_timeout(
        self, caller: Caller, sandbox_id: str, *, timeout_seconds: int
    ) -> Sandbox:
        path = f"/sandboxes/{sandbox_id}/timeout"
        await self._request(caller, "POST", path, {"timeout": timeout_seconds})
        return await self._world.claimed(sandbox_id)

    async def kill(self, caller: Caller, sandbox_id: str) -> None:
        await self._request(caller, "DELETE", f"/sandboxes/{sandbox_id}")

    async def wake(self, sandbox: Sandbox) -> Sandbox:
        """Wake a sandbox as a gateway does."""
        assert sandbox.spec.claim is not None
        body = WakeBody(sandbox.spec.claim.sandbox_id, sandbox.metadata.uid)
        answer = await self._world.http.post(
            "/_paddock/wake",
            content=msgspec.json.encode(body),
            headers={"Authorization": "Bearer token"},
        )
        if answer.status_code != 200:
            problem = answer.json()
            raise getattr(errors, problem["kind"])(problem["message"])
        return self._world.seen(codec.decode(Sandbox, answer.content))


class HttpKeyring(HttpOnly):
    """Keys and quotas, set over HTTP."""

    def __init__(self, world: "ClusterWorld") -> None:
        self._world = world

    async def set_team_quota(self, team: str, quota: Quota) -> None:
        """Set a quota, and wait until all processes have observed it."""
        ports = self._world.paddock.controller_ports
        before, versions = await received_events(ports, Secret.KIND), await self._versions()
        body = {"quota": msgspec.to_builtins(quota)}
        answer = await self._world.http.patch(f"/teams/{team}", json=body)
        assert answer.status_code == 200, answer.text
        if await self._versions() == versions:
            return  # unchanged

        async def all_heard() -> bool:
            now = await received_events(ports, Secret.KIND)
            return all(now.get(port) != counts for port, counts in before.items())

        await self._world.paddock.eventually(all_heard)

    async def _versions(self) -> set[str]:
        labels = parse_labels(f"{LABEL_KIND}={KIND_TEAM}")
        found = await self._world.store.list(Secret, namespace=SYSTEM_NAMESPACE, labels=labels)
        return {item.metadata.resource_version for item in found.items}

    async def create(
        self,
        *,
        name: str,
        team: str = DEFAULT_TEAM,
        role: Role = Role.MEMBER,
        quota: Quota | None = None,
    ) -> tuple[Any, str]:
        body: dict[str, Any] = {"name": name, "role": role, "teamName": team}
        if quota is not None:
            body["quota"] = msgspec.to_builtins(quota)
        made = await self._world.http.post("/api-keys", json=body)
        assert made.status_code < 300, made.text
        return SimpleNamespace(**made.json()), made.json()["key"]


def _error(answer: httpx.Response) -> errors.PaddockError:
    message = answer.json().get("message", "")
    if answer.status_code == 429:
        # Being out of stock can be retried; a quota does not grow by waiting.
        if answer.headers.get("should-retry") == "true":
            return errors.RateLimitedError(message, retry_after_seconds=1)
        return errors.QuotaExceededError(message)
    return _ERRORS.get(answer.status_code, errors.PaddockError)(message)


def _body(wanted: NewSandbox) -> dict[str, Any]:
    metadata = dict(wanted.metadata)
    metadata |= {f"label:{name}": value for name, value in wanted.labels.items()}
    body: dict[str, Any] = {
        "templateID": wanted.template,
        "metadata": metadata,
        "envVars": dict(wanted.env_vars),
        "autoPause": wanted.auto_pause,
        "autoResume": {"enabled": wanted.auto_resume},
    }
    if wanted.timeout_seconds is None:
        metadata[_NEVER] = "true"
    else:
        body["timeout"] = wanted.timeout_seconds
    if not wanted.create_on_no_stock:
        metadata[f"{_KRUISE}create-on-no-stock"] = "false"
    if wanted.claim_timeout_seconds != 60.0:
        metadata[f"{_KRUISE}claim-timeout-seconds"] = str(int(wanted.claim_timeout_seconds))
    if wanted.resources is not None:
        metadata[f"{_KRUISE}cpu-limit"] = wanted.resources.cpu or ""
    if wanted.network is not None:
        body["allow_internet_access"] = wanted.network.allow_internet_access
    return body
