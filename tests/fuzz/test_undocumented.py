"""Random requests to servers without an OpenAPI document: never a 5xx.

The control plane's API for gateways, for other clusters and for access reviews, a gateway's admin
server, the admission webhook, and the node agent. With and without valid credentials.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine

import aiohttp
import httpx
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paddock.adapters.gateway import admin_server
from paddock.adapters.pod_admission import pod_check
from paddock.adapters.replicas import PATH as WRITTEN
from paddock.adapters.replicas import Replicas
from paddock.api import admission_webhook
from paddock.api.kube.verbs import reviews
from paddock.app.roles import node
from paddock.gateway.activity import Activity
from paddock.gateway.routing import peers
from paddock.gateway.routing.routes import RouteTable
from paddock.kit.clock import SystemClock
from paddock.manager.federation.protocol import SIGNATURE, Signer
from paddock.resources.tokens import TokenSeed
from paddock.settings import Settings
from tests.fuzz import fuzz_budget
from tests.scenario.paddock import SECRETS, paddock

KEYS = (
    "id", "uid", "url", "seen", "request", "kind", "object", "oldObject", "operation", "metadata",
    "spec", "name", "namespace", "template", "podTemplate", "routes", "fences", "digest", "news",
    "pod_uid", "frozen", "podUid", "sandbox_id", "team", "role", "wanted", "method", "path",
    "query", "body", "status",
)  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["", "/", "..", "default", "admin", "member", "CREATE", "UPDATE", "Sandbox"]),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from(KEYS), TREES, max_size=8)
BODIES = st.one_of(
    TREES.map(lambda tree: json.dumps(tree).encode()),
    OBJECTS.map(lambda tree: json.dumps(tree).encode()),
    OBJECTS.map(lambda tree: msgspec.msgpack.encode(json.loads(json.dumps(tree), parse_int=float))),
    st.binary(max_size=40),
    st.sampled_from([b"", b"[" * 20_000, b'{"request":' * 2_000, b"\x91" * 20_000, b"\xff\xfe"]),
)
VALUES = st.sampled_from(
    ["", "Bearer ", "Bearer token", "\xff", "a;b;c;d", "1;2;\xe9;4", "9" * 400]
)
Ask = Callable[[str, str, dict[str, str], bytes], Coroutine[None, None, int]]


@contextlib.asynccontextmanager
async def control_plane() -> AsyncGenerator[Ask]:
    """A control plane with replicas and another cluster, so that every route is served."""
    peer = {"cluster_id": "here", "federation_peers": "there=http://127.0.0.1:1"}
    async with paddock(pool_size=0, clock=SystemClock(), **peer) as world:
        there = Signer(TokenSeed(SECRETS.seed.encode()), "there", world.plane.clock)
        inner = world.plane.application()
        app = Replicas("", SECRETS.token).application(inner, world.provider)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)  # pyright: ignore[reportArgumentType]
        async with httpx.AsyncClient(transport=transport, base_url="http://paddock") as client:

            async def ask(method: str, path: str, headers: dict[str, str], body: bytes) -> int:
                if headers.pop("rightly", None):
                    headers["Authorization"] = f"Bearer {SECRETS.token}"
                    headers[SIGNATURE] = there.sign("here", method, path, body)
                raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
                answer = await client.request(method, path, headers=raw, content=body)
                return answer.status_code

            yield ask


@contextlib.asynccontextmanager
async def served(app: web.Application, rightly: Callable[..., dict[str, str]]):
    async with TestServer(app) as server, aiohttp.ClientSession() as session:

        async def ask(method: str, path: str, headers: dict[str, str], body: bytes) -> int:
            if headers.pop("rightly", None):
                headers |= rightly(method, body)
            async with session.request(
                method, server.make_url(path), headers=headers, data=body
            ) as answer:
                return answer.status

        yield ask


def gateway():
    seed, clock = TokenSeed(b"seed"), SystemClock()
    routes = RouteTable(clock)
    endpoint = peers.PeerEndpoint(routes, peers.MessageVerifier(seed, clock))

    def rightly(method: str, body: bytes) -> dict[str, str]:
        now = clock.now().timestamp()
        return peers.sign(seed, method, body, now=now, nonce=f"{now}")

    return served(admin_server.create_app(routes, Activity(), endpoint, clock), rightly)


def agent():
    return served(node.create_app("token"), lambda *_: {"Authorization": "Bearer token"})


@contextlib.asynccontextmanager
async def hook() -> AsyncGenerator[Ask]:
    app = admission_webhook.create_app([pod_check(Settings())])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://webhook") as client:

        async def ask(method: str, path: str, _headers: dict[str, str], body: bytes) -> int:
            return (await client.request(method, path, content=body)).status_code

        yield ask


SERVERS = {
    "control plane": (
        control_plane,
        (
            "POST /_paddock/wake", "POST /_paddock/activity", "GET /_paddock/sandboxes/x",
            f"POST {WRITTEN}", "GET /_federation/snapshot", "POST /_federation/claims",
            "POST /_federation/abandon", "POST /_federation/calls",
            "GET /_federation/sandboxes/x", "GET /metrics",
            *(f"POST {path}" for path in reviews.PATHS), f"POST {reviews.PATHS[0][:-1]}%73",
        ),
        ("authorization", SIGNATURE, "x-paddock-kind", "x-paddock-gone", "x-paddock-from"),
    ),
    "gateway": (
        gateway,
        (
            f"POST {peers.PATH}", f"PUT {peers.PATH}", f"POST {peers.PAUSE_PATH}",
            "GET /sandboxes", "GET /activity", "GET /metrics", "GET /healthz", "GET /nothing",
        ),
        ("Paddock-Time", "Paddock-Nonce", "Paddock-Signature"),
    ),
    "node's agent": (
        agent, ("POST /freeze", "GET /healthz", "GET /nothing"), ("Authorization",)
    ),
    "webhook": (hook, (f"POST {admission_webhook.PATH}",), ("Accept",)),
}  # fmt: skip


@pytest.mark.timeout(fuzz_budget.seconds(120))
@pytest.mark.parametrize("name", SERVERS)
def test_no_request_is_a_server_error_of_an_undocumented_server(name: str) -> None:
    opened, requests, headers = SERVERS[name]
    answered = Counter[int]()
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        ask = runner.run(stack.enter_async_context(opened()))

        @settings(
            max_examples=fuzz_budget.examples(200),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(
            request=st.sampled_from(requests),
            said=st.dictionaries(st.sampled_from(headers), VALUES, max_size=2),
            other=st.sampled_from([None] * 7 + ["PUT", "GET", "DELETE"]),
            is_ours=st.sampled_from([True, True, False]),
            body=BODIES,
        )
        def fuzz(request: str, said: dict, other: str | None, is_ours: bool, body: bytes) -> None:
            method, _, path = request.partition(" ")
            asked = (other or method, path, said, is_ours, body[:80])
            if is_ours:
                said = {**said, "rightly": "yes"}
                said.pop("authorization", None)
            status = runner.run(ask(other or method, path, said, body))
            answered[status] += 1
            assert status < 500, (status, asked)

        try:
            fuzz()
        finally:
            runner.run(stack.aclose())
    assert answered[405] < answered.total() // 2, answered
    assert answered[400] > 5, answered
