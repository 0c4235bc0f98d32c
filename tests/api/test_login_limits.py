"""Wrong API keys and bearer tokens are slowed down by client address, in both APIs."""

import asyncio

import httpx
import pytest
from starlette.requests import HTTPConnection

from paddock.api import login_limits
from paddock.api.login_limits import LoginLimits, limited_address
from paddock.kit.clock import ManualClock
from paddock.kit.errors import RateLimitedError, UnauthenticatedError
from tests.api.kube.objects import SANDBOXES
from tests.scenario.paddock import SECRETS, World, paddock

pytestmark = pytest.mark.looptime

GUESSER, OTHER = "192.0.2.1", "192.0.2.2"
BURST, INTERVAL = 20, 3.0


async def call(
    world: World, api: str, credential: str, address: str | None = GUESSER
) -> httpx.Response:
    """Call an API through a gateway that reports this client address."""
    client = {"X-Real-Ip": address} if address is not None else {}
    if api == "e2b":
        return await world.http.get("/v2/sandboxes", headers={"X-API-Key": credential, **client})
    bearer = {"Authorization": f"Bearer {credential}"}
    return await world.http.get(SANDBOXES, headers={**bearer, **client})


def right(api: str) -> str:
    return SECRETS.api_key if api == "e2b" else SECRETS.token


@pytest.mark.parametrize("api", ["e2b", "declarative"])
async def test_guessing_is_slowed_down_and_others_are_not(api: str) -> None:
    async with paddock() as world:
        for number in range(BURST):
            assert (await call(world, api, f"wrong{number}")).status_code == 401
        refused = await call(world, api, "wrong")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "3"
        assert (await call(world, api, right(api), OTHER)).status_code == 200
        assert (await call(world, api, right(api), None)).status_code == 200
        # From here on, one more is checked in each interval.
        statuses: list[int] = []
        for _ in range(60):
            await asyncio.sleep(INTERVAL / 6)
            statuses.append((await call(world, api, "wrong")).status_code)
        assert set(statuses) == {401, 429}
        assert 9 <= statuses.count(401) <= 11


@pytest.mark.parametrize("api", ["e2b", "declarative"])
async def test_a_right_key_is_accepted_beside_a_guesser_behind_the_same_address(api: str) -> None:
    async with paddock() as world:
        assert (await call(world, api, right(api))).status_code == 200
        for _ in range(2 * BURST):
            await call(world, api, "wrong")
        assert (await call(world, api, "wrong")).status_code == 429
        assert (await call(world, api, right(api))).status_code == 200


@pytest.mark.parametrize("api", ["e2b", "declarative"])
async def test_a_right_key_that_is_new_to_an_address_is_accepted_after_the_wait(api: str) -> None:
    async with paddock() as world:
        for _ in range(2 * BURST):
            await call(world, api, "wrong")
        refused = await call(world, api, right(api))
        assert refused.status_code == 429
        await asyncio.sleep(int(refused.headers["retry-after"]))
        assert (await call(world, api, right(api))).status_code == 200


async def test_wrong_keys_of_one_api_count_for_the_other() -> None:
    async with paddock() as world:
        for _ in range(BURST):
            await call(world, "e2b", "wrong")
        assert (await call(world, "declarative", "wrong")).status_code == 429


async def test_missing_keys_are_not_guesses() -> None:
    async with paddock() as world:
        for _ in range(2 * BURST):
            assert (await call(world, "e2b", "")).status_code == 401
        assert (await call(world, "e2b", right("e2b"))).status_code == 200


def connection(address: str | None, peer: str = "127.0.0.1") -> HTTPConnection:
    headers = [(b"x-real-ip", address.encode())] if address is not None else []
    return HTTPConnection({"type": "http", "headers": headers, "client": (peer, 1)})


def fail() -> None:
    raise UnauthenticatedError("no")


def guess(limits: LoginLimits, address: str, credential: str = "x") -> None:
    with pytest.raises(UnauthenticatedError):
        limits.check(connection(address), credential, fail)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_limits, "MAX_ADDRESSES", 100)
    monkeypatch.setattr(login_limits, "MAX_ACCEPTED", 100)
    limits = LoginLimits(ManualClock())
    for number in range(1_000):
        guess(limits, f"10.0.{number // 250}.{number % 250}")
        assert limits.check(connection(GUESSER), f"key{number}", lambda: True)
    assert len(limits._failures) == len(limits._accepted) == 100


def test_an_address_is_forgotten_once_it_has_recovered() -> None:
    clock = ManualClock()
    limits = LoginLimits(clock, burst=2, interval_seconds=10)
    guess(limits, GUESSER)
    guess(limits, GUESSER)
    with pytest.raises(RateLimitedError) as error:
        limits.check(connection(GUESSER), "x", fail)
    assert error.value.retry_after_seconds == 10
    clock.advance(20)
    assert limits.check(connection(GUESSER), "key", lambda: True)
    assert not limits._failures


def test_a_refused_credential_is_not_verified() -> None:
    limits = LoginLimits(ManualClock(), burst=1)
    guess(limits, GUESSER)
    with pytest.raises(RateLimitedError):
        limits.check(connection(GUESSER), "key", lambda: pytest.fail("verified"))


def test_the_limit_can_be_turned_off() -> None:
    limits = LoginLimits(ManualClock(), burst=0)
    for _ in range(100):
        guess(limits, GUESSER)


@pytest.mark.parametrize(
    ("address", "peer", "expected"),
    [
        (GUESSER, "127.0.0.1", GUESSER),
        ("2001:db8::1:2:3:4", "127.0.0.1", "2001:db8::/64"),
        ("::ffff:192.0.2.1", "127.0.0.1", GUESSER),
        (None, "192.0.2.9", "192.0.2.9"),
        (None, "127.0.0.1", None),
        (None, "::1", None),
    ],
)
def test_a_client_counts_by_the_address_that_the_gateway_reports(address, peer, expected) -> None:
    assert limited_address(connection(address, peer)) == expected
