"""Control planes that serve each other's claims over HTTP, also when one is cut off."""

import asyncio

import httpx
import msgspec
import pytest

from paddock.app.roles import api as serving
from paddock.app.wiring import backends
from paddock.claims.caller import Role
from paddock.claims.requests import NewSandbox
from paddock.kit.clock import ManualClock
from paddock.kit.errors import ConflictError, InvalidError, UnauthenticatedError
from paddock.kit.tasks import background
from paddock.manager.environments.member_choice import MemberCandidate
from paddock.manager.federation import service
from paddock.manager.federation.protocol import (
    ForwardedClaim,
    Signer,
    parse_peers,
    remote_id,
    tag_in,
    tag_of,
)
from paddock.resources.kinds.env import ScalingGroup
from paddock.resources.tokens import TokenSeed
from paddock.settings import Settings
from paddock.store.memory import MemoryStore
from tests.controllers.env.clusters import KEYS, SEED, Cluster, clusters, until
from tests.controllers.env.make import environment, member
from tests.ports import free_port

pytestmark = pytest.mark.timeout(180)

FRESH_SECONDS = service.FRESH_SECONDS


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeouts: all clusters run in this process, which may be slow."""
    for name in ("POLL_TIMEOUT_SECONDS", "FRESH_SECONDS", "TAKE_SECONDS", "HAND_OVER_SECONDS"):
        monkeypatch.setattr(service, name, 60.0)


def can_help(item: MemberCandidate) -> bool:
    return item.can_serve or item.can_grow or item.pending > 0


def where(three: tuple[Cluster, ...], sandbox_id: str) -> list[str]:
    return [item.name for item in three if item.sandbox(sandbox_id) is not None]


async def test_local_idle_sandboxes_come_first_then_remote_ones_and_all_accept_their_token() -> (
    None
):
    async with clusters("a", "b", "c") as three:
        a, b, c = three
        await a.give({"near": member(1, priority=9)})
        await b.give({"far": member(2, priority=0)})
        await c.give({"far": member(0)})
        await until(lambda: a.sees("b", 2) and any(item.can_serve for item in a.here()))
        made = [(await a.create()).json() for _ in range(3)]
        places = [where(three, item["sandboxID"]) for item in made]
        assert places == [["a"], ["b"], ["b"]]
        # Its own control plane answers, whichever one receives the call.
        far = made[1]["sandboxID"]
        seen = await a.api.get(f"/sandboxes/{far}")
        assert seen.status_code == 200
        assert seen.json()["sandboxID"] == far
        assert seen.json().get("envdAccessToken") == made[1].get("envdAccessToken")
        killed = await a.api.delete(f"/sandboxes/{far}")
        assert killed.status_code == 204
        await until(lambda: b.sandbox(far) is None)
        assert (await a.api.get(f"/sandboxes/{far}")).status_code == 404
        stranger = httpx.Headers({"X-API-Key": "e2b_" + "0" * 40})
        refused = await a.api.get(f"/sandboxes/{made[2]['sandboxID']}", headers=stranger)
        assert refused.status_code == 401


async def test_a_sandbox_of_another_cluster_is_reached_through_the_local_gateway() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        line = head.split(b"\r\n")[0]
        body = b"you asked: " + line
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    inside = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = inside.sockets[0].getsockname()[1]
    async with inside, clusters("a", "b") as (a, b):
        await a.give({})
        await b.give({"far": member(1)})
        await until(lambda: a.knows("b"))
        made = (await a.create()).json()
        assert where((a, b), made["sandboxID"]) == ["b"]
        async with httpx.AsyncClient(timeout=20) as client:
            answer = await client.get(
                f"http://127.0.0.1:{a.port}/hello?x=1",
                headers={"E2b-Sandbox-Id": made["sandboxID"], "E2b-Sandbox-Port": str(port)},
            )
            assert answer.status_code == 200, answer.text
            assert answer.text == "you asked: GET /hello?x=1 HTTP/1.1"
            nobody = await client.get(
                f"http://127.0.0.1:{a.port}/hello",
                headers={"E2b-Sandbox-Id": remote_id("b"), "E2b-Sandbox-Port": str(port)},
            )
            assert nobody.status_code == 502
            await a.api.delete(f"/sandboxes/{made['sandboxID']}")
            await until(lambda: b.sandbox(made["sandboxID"]) is None)


async def test_a_list_shows_the_sandboxes_of_all_clusters_page_by_page() -> None:
    async with clusters("a", "b", "c") as (a, b, c):
        await a.give({"near": member(1)})
        await b.give({"far": member(2)})
        await c.give({})
        await until(lambda: any(item.can_serve for item in a.here()))
        await until(lambda: a.sees("b", 2) and c.knows("b") and c.knows("a"))
        made = [(await a.create()).json()["sandboxID"] for _ in range(3)]

        async def pages(limit: int, **options: str) -> list[list[str]]:
            found, token = list[list[str]](), ""
            while True:
                params = {"limit": str(limit), "nextToken": token, **options}
                answer = await c.api.get("/v2/sandboxes", params=params)
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-total-running"] == "3"
                found.append([item["sandboxID"] for item in answer.json()])
                token = answer.headers.get("x-next-token", "")
                if not token:
                    return found

        newest_first = made[::-1]
        assert await pages(2) == [newest_first[:2], newest_first[2:]]
        assert await pages(1, order="asc") == [[item] for item in made]
        older = await c.api.get("/sandboxes")
        assert [item["sandboxID"] for item in older.json()] == newest_first
        assert (await c.api.get("/v2/sandboxes", params={"limit": "0"})).status_code == 400
        stranger = httpx.Headers({"X-API-Key": "e2b_" + "0" * 40})
        assert (await c.api.get("/v2/sandboxes", headers=stranger)).status_code == 401
        # The reply names the cluster that is cut off, so the list is known to be incomplete.
        await b.cut_off()
        rest = await c.api.get("/v2/sandboxes")
        assert [item["sandboxID"] for item in rest.json()] == made[:1]
        assert rest.headers["x-paddock-missing-clusters"] == "b"


async def test_an_api_without_controllers_takes_part_in_the_federation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = {name: (free_port(), free_port()) for name in "ab"}
    b = Cluster("b", ports)
    store = MemoryStore()
    await store.create(environment({}, cluster="a"))

    async def open_store(_settings: Settings) -> MemoryStore:
        return store

    monkeypatch.setattr(backends, "open_store", open_store)
    settings = Settings(
        cluster_id="a",
        api_port=ports["a"][0],
        federation_peers=f"b=http://127.0.0.1:{ports['b'][0]}",
        store="kubernetes",
        runtime="simulated",
        seed=SEED,
        token="token of a",
        api_key=KEYS["a"],
    )
    stop, ready = asyncio.Event(), asyncio.Event()
    run = serving.run(settings, stop, ready.set)
    async with b.run(), background(run, name="api of a") as running:
        await b.give({"far": member(1)})
        await ready.wait()
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{settings.api_port}",
            headers={"X-API-Key": KEYS["a"]},
            timeout=60,
        ) as api:
            body = {"templateID": "agents"}
            async with asyncio.timeout(60):
                while (made := await api.post("/sandboxes", json=body)).status_code != 201:
                    await asyncio.sleep(0.2)
            sandbox_id = made.json()["sandboxID"]
            assert b.sandbox(sandbox_id) is not None
            seen = await api.get(f"/sandboxes/{sandbox_id}")
            assert seen.json()["sandboxID"] == sandbox_id
            listed = await api.get("/v2/sandboxes")
            assert [item["sandboxID"] for item in listed.json()] == [sandbox_id]
        # The other one receives this one's segment, too.
        parts = b.plane.federation
        assert parts is not None
        await until(lambda: "a" in parts.federation._known)
        stop.set()
        await running


async def test_a_cluster_that_is_cut_off_delays_no_other_and_rejoins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with clusters("a", "b", "c") as three:
        a, b, c = three
        await a.give({})
        await b.give({"far": member(3, priority=0)})
        await c.give({"far": member(30, priority=5)})
        await until(lambda: a.sees("b", 3) and a.sees("c", 30))
        first = await a.create()
        assert where(three, first.json()["sandboxID"]) == ["b"]
        await b.cut_off()
        # Its announcement is still fresh, so it is called without success; the next one serves.
        answers = await asyncio.gather(*(a.create() for _ in range(10)))
        assert [answer.status_code for answer in answers] == [201] * 10
        got = [answer.json()["sandboxID"] for answer in answers]
        assert {tuple(where(three, item)) for item in got} == {("c",)}
        # The one that is cut off continues by itself.
        own = await b.plane.manager.claims.create(
            b.plane.keyring.authenticate("e2b_" + "b" * 40), NewSandbox(template="agents")
        )
        assert own.spec.claim is not None
        # Its last announcement expires soon.
        monkeypatch.setattr(service, "FRESH_SECONDS", FRESH_SECONDS)
        await until(lambda: not a.knows("b"))
        await b.connect()
        await until(lambda: a.knows("b"))
        again = await a.create()
        assert where(three, again.json()["sandboxID"]) == ["b"]


async def test_the_local_pool_grows_first_then_a_remote_one_then_the_claim_is_refused() -> None:
    async with clusters("a", "b") as two:
        a, b = two
        await a.give({"near": member(0, max_replicas=1)}, group=ScalingGroup())
        await b.give({"far": member(0, max_replicas=1)}, group=ScalingGroup())
        await until(lambda: a.here() and a.elsewhere())
        first, second = await a.create(), await a.create()
        assert where(two, first.json()["sandboxID"]) == ["a"]
        assert where(two, second.json()["sandboxID"]) == ["b"]
        await until(lambda: not any(can_help(item) for item in (*a.here(), *a.elsewhere())))
        third = await a.create()
        assert third.status_code == 429, third.text
        assert int(third.headers["retry-after"]) >= 1


async def test_a_forwarded_claim_is_never_forwarded_again() -> None:
    async with clusters("a", "b", "c") as three:
        a, b, c = three
        await a.give({})
        await b.give({"far": member(0)})
        await c.give({"far": member(5)})
        await until(lambda: a.knows("c") and b.knows("c"))
        parts = b.plane.federation
        assert parts is not None
        wanted = NewSandbox(template="default/agents", sandbox_id=remote_id("b"))
        sent = ForwardedClaim(team="default", role=Role.MEMBER, request=wanted, via=("a",))
        body = msgspec.json.encode(sent)
        signer = Signer(TokenSeed(b"the same for all"), "a", a.plane.clock)
        path = "/_federation/claims"
        headers = {"x-paddock-federation": signer.sign("b", "POST", path, body)}
        refused = await b.api.post(path, content=body, headers=headers)
        assert refused.status_code == 429, refused.text
        for via in (("b",), ("a", "c")):
            far = msgspec.structs.replace(sent, via=via)
            with pytest.raises(ConflictError, match="forwarded too often"):
                parts.federation.admit(far)


async def test_only_messages_of_peers_with_the_seed_are_accepted_and_only_once() -> None:
    async with clusters("a", "b") as (a, _b):
        path = "/_federation/snapshot"
        assert (await a.api.get(path)).status_code == 401
        stranger = Signer(TokenSeed(b"another"), "b", a.plane.clock)
        headers = {"x-paddock-federation": stranger.sign("a", "GET", path, b"")}
        assert (await a.api.get(path, headers=headers)).status_code == 401
        friend = Signer(TokenSeed(b"the same for all"), "b", a.plane.clock)
        headers = {"x-paddock-federation": friend.sign("a", "GET", path, b"")}
        assert (await a.api.get(path, headers=headers)).status_code == 200
        assert (await a.api.get(path, headers=headers)).status_code == 401


async def test_an_unsigned_body_is_not_read_beyond_the_message_limit() -> None:
    async with clusters("a", "b") as (a, _b):
        body = b"x" * (3 << 20)
        refused = await a.api.post("/_federation/claims", content=body)
        assert refused.status_code == 413
        assert "is larger than" in refused.json()["message"]


async def test_an_abandoned_claim_is_ended() -> None:
    async with clusters("a", "b") as two:
        a, b = two
        await a.give({})
        await b.give({"far": member(1)})
        await until(lambda: a.knows("b"))
        made = (await a.create()).json()["sandboxID"]
        parts = a.plane.federation
        assert parts is not None
        peer = parts.federation.owner_cluster(made)
        assert peer is not None
        await parts.federation._abandon(peer, made)
        await until(lambda: b.sandbox(made) is None)


def test_a_signature_is_valid_for_one_receiver_one_body_and_a_short_time() -> None:
    clock, seed = ManualClock(), TokenSeed(b"s")
    a, b, c = (Signer(seed, name, clock) for name in "abc")
    for attempt in (
        lambda: b.check(a.sign("b", "POST", "/x", b"1"), "POST", "/x", b"2"),
        lambda: b.check(a.sign("b", "POST", "/x", b"1"), "POST", "/y", b"1"),
        lambda: c.check(a.sign("b", "POST", "/x", b"1"), "POST", "/x", b"1"),
        lambda: b.check("nonsense", "POST", "/x", b"1"),
    ):
        with pytest.raises(UnauthenticatedError):
            attempt()
    old = a.sign("b", "POST", "/x", b"1")
    clock.advance(31)
    with pytest.raises(UnauthenticatedError, match="old"):
        b.check(old, "POST", "/x", b"1")


def test_ids_contain_their_cluster_and_cluster_names_must_differ() -> None:
    assert tag_in(remote_id("east")) == tag_of("east")
    assert tag_in("i" + "a" * 20) == ""
    assert [peer.cluster for peer in parse_peers("b=http://x:1, c=https://y/", "a")] == ["b", "c"]
    for text in ("b", "b=ftp://x", "a=http://x:1", "b=http://x:1,b=http://y:1"):
        with pytest.raises(InvalidError, match="federation_peers"):
            parse_peers(text, "a")
