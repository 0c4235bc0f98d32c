"""A missing image of a sandbox is pulled: once, within limits, and for the right teams."""

import asyncio
import contextlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paddock.kit import clock
from paddock.kit.errors import (
    DiskFullError,
    ForbiddenError,
    ImageMissingError,
    NotFoundError,
    QuotaExceededError,
    RateLimitedError,
    UnavailableError,
)
from paddock.resources.kinds.template import ImagePullPolicy
from paddock.runtime.local.images import provider as provider_module
from paddock.runtime.local.images.provider import ImageProvider, ImageRequest
from paddock.runtime.local.images.registry.puller import PulledImage, Puller
from paddock.runtime.local.images.registry.settings import ANY_HOST, RegistrySettings, parse_mirrors
from paddock.runtime.local.images.registry.team_share import PullShares
from paddock.runtime.local.images.store import ImageStore
from paddock.runtime.local.node.heavy_work import HeavyLimits, HeavyWork
from paddock.runtime.local.storage.reserve import DiskReserve
from paddock.runtime.port import ReadyImage, RegistryCredentials
from tests.runtime.local.images import builders
from tests.runtime.local.images.registry.conftest import LAYERS
from tests.runtime.local.images.registry.relay import Relay
from tests.runtime.local.images.registry.servers import (
    PASSWORD,
    USER,
    Registry,
    basic_auth,
    push,
    registry,
    write_config,
)

ALWAYS, NEVER = ImagePullPolicy.ALWAYS, ImagePullPolicy.NEVER
MakeProvider = Callable[..., ImageProvider]


@pytest.fixture
def make_provider(store: ImageStore, tmp_path: Path) -> MakeProvider:
    """Return a function that creates a provider of images for the store."""

    def make(
        settings: RegistrySettings | None = None,
        reserve: DiskReserve | None = None,
        slots: HeavyLimits | None = None,
        shares: PullShares | None = None,
    ) -> ImageProvider:
        work = HeavyWork(slots or HeavyLimits.of_settings(), clock.system())
        puller = Puller(
            store,
            tmp_path / "downloads",
            settings or RegistrySettings(private=frozenset({ANY_HOST})),
            reserve=reserve,
            shares=shares,
        )
        return ImageProvider(store, puller, work, clock.system(), node_name="here")

    return make


async def ensure(
    provider: ImageProvider, reference: str, team: str = "a", **more: object
) -> ReadyImage:
    return await provider.ensure(ImageRequest(reference=reference, team=team, **more))


def login(server: Registry | Relay, password: str = PASSWORD) -> tuple[RegistryCredentials, ...]:
    return (RegistryCredentials(host=server.host, username=USER, password=password),)


async def test_a_missing_image_is_pulled_and_found_afterwards(
    server: Registry, make_provider: MakeProvider
) -> None:
    provider, name = make_provider(), f"{server.host}/app:1"
    with pytest.raises(ImageMissingError):
        provider.find(name, team="a")
    ready = await ensure(provider, name)
    assert ready.digest.startswith("sha256:")
    assert (ready.identity, ready.location) == (ready.digest, "here")
    assert ready.pulled_bytes > 0
    assert provider.find(name, team="a").digest == ready.digest
    assert provider.find(name, digest=ready.digest, team="b").digest == ready.digest


async def test_an_image_that_is_present_is_not_asked_for_again(
    relay: Relay, make_provider: MakeProvider
) -> None:
    provider, name = make_provider(), f"{relay.host}/app:1"
    await ensure(provider, name)
    before = relay.count()
    assert before > 0
    again = await ensure(provider, name)
    assert (again.pulled_bytes, again.seconds) == (0, 0.0)
    assert relay.count() == before


async def test_twenty_requests_for_one_image_pull_it_once(
    server: Registry, relay: Relay, make_provider: MakeProvider, tmp_path: Path
) -> None:
    layer = builders.tar(builders.entry("big", bytes(range(256)) * 20_000))
    push(builders.oci_layout(tmp_path / "twenty", (layer,)), server, "twenty:1")
    provider, name = make_provider(), f"{relay.host}/twenty:1"
    found = await asyncio.gather(*(ensure(provider, name, f"team-{n % 3}") for n in range(20)))
    assert len({one.digest for one in found}) == 1
    assert relay.count("/v2/twenty/manifests/") == 1
    assert relay.count("/v2/twenty/blobs/") == 2  # the config and the layer


async def test_a_caller_that_leaves_does_not_stop_the_pull(
    server: Registry, make_provider: MakeProvider
) -> None:
    provider, name = make_provider(), f"{server.host}/app:1"
    leaving = asyncio.create_task(ensure(provider, name))
    while not any(not pull.is_waiting for pull in provider.pulls()):
        await asyncio.sleep(0)
    leaving.cancel()
    [pull] = provider.pulls()
    assert (pull.reference, pull.team) == (name, "a")
    await ensure(provider, name)
    assert provider.pulls() == ()


class Busy:
    """A provider whose team `busy` has all its slots in use, by a pull that waits for its test."""

    def __init__(self, provider: ImageProvider, monkeypatch: pytest.MonkeyPatch) -> None:
        self.provider = provider
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        pull = Puller.pull

        async def slow(puller: Puller, text: str, **options: Any) -> PulledImage:
            if text.endswith("/slow:1"):
                self.reached.set()
                await self.go_on.wait()
            return await pull(puller, text, **options)

        monkeypatch.setattr(Puller, "pull", slow)

    async def begin(self, host: str) -> None:
        self.task = asyncio.create_task(ensure(self.provider, f"{host}/slow:1", "busy"))
        await self.reached.wait()

    async def end(self) -> None:
        self.go_on.set()
        with contextlib.suppress(NotFoundError):
            await self.task


async def test_closing_ends_pulls_and_those_that_follow_them(
    server: Registry, make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = make_provider()
    busy = Busy(provider, monkeypatch)
    await busy.begin(server.host)
    following = asyncio.create_task(ensure(provider, f"{server.host}/slow:1", "other"))
    while len(provider.pulls()) < 2 or any(pull.is_waiting for pull in provider.pulls()):
        await asyncio.sleep(0)
    busy.reached.clear()
    await provider.close()
    assert not busy.reached.is_set()
    results = await asyncio.gather(busy.task, following, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2


ONE_EACH = HeavyLimits(total=8, per_team=1)


async def test_a_team_does_not_wait_in_the_queue_of_another_one(
    server: Registry, make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, name = make_provider(slots=ONE_EACH), f"{server.host}/app:1"
    busy = Busy(provider, monkeypatch)
    await busy.begin(server.host)
    waiting = asyncio.create_task(ensure(provider, name, "busy"))
    while len(provider.pulls()) < 2:
        await asyncio.sleep(0)
    assert (await ensure(provider, name, "free")).digest
    assert not waiting.done()
    await busy.end()
    assert (await waiting).digest


async def test_a_pull_that_waits_is_withdrawn_with_its_last_caller(
    server: Registry, make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, name = make_provider(slots=ONE_EACH), f"{server.host}/app:1"
    busy = Busy(provider, monkeypatch)
    await busy.begin(server.host)
    callers = [asyncio.create_task(ensure(provider, name, "busy")) for _ in range(2)]
    while len(provider.pulls()) < 2:
        await asyncio.sleep(0)
    callers[0].cancel()
    await asyncio.wait(callers[:1])
    assert len(provider.pulls()) == 2
    # Callers ask again and again: for a moment there may be none.
    callers[1].cancel()
    await asyncio.wait(callers)
    joined, join = asyncio.Event(), ImageProvider._join  # type: ignore[attr-defined]

    def noted(provider: ImageProvider, request: ImageRequest) -> object:
        joined.set()
        return join(provider, request)

    monkeypatch.setattr(ImageProvider, "_join", noted)
    again = asyncio.create_task(ensure(provider, name, "busy"))
    await joined.wait()
    assert len(provider.pulls()) == 2
    monkeypatch.setattr(provider_module, "_UNNEEDED_SECONDS", 0.0)
    again.cancel()
    while len(provider.pulls()) > 1:
        await asyncio.sleep(0)
    await busy.end()
    with pytest.raises(ImageMissingError):
        provider.find(name, team="busy")


async def test_the_pulls_of_a_team_are_bounded_and_those_of_others_go_on(
    server: Registry, make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_module, "_MAX_FLIGHTS", 2)
    provider = make_provider(slots=ONE_EACH)
    busy = Busy(provider, monkeypatch)
    await busy.begin(server.host)
    waiting = asyncio.create_task(ensure(provider, f"{server.host}/app:1", "busy"))
    while len(provider.pulls()) < 2:
        await asyncio.sleep(0)
    with pytest.raises(RateLimitedError, match="team 'busy' has 2 pulls"):
        await ensure(provider, f"{server.host}/app:zstd", "busy")
    assert (await ensure(provider, f"{server.host}/app:zstd", "free")).digest
    await busy.end()
    await waiting


async def test_a_team_whose_share_is_full_stops_no_pull_of_others(
    server: Registry, store: ImageStore, make_provider: MakeProvider, tmp_path: Path
) -> None:
    """Another team waits for the same pull, which counts for the first one."""
    layer = builders.tar(builders.entry("own", random.randbytes(300_000)))
    push(builders.oci_layout(tmp_path / "first", (layer,)), server, "shared:1")
    shares = PullShares(store, 1_000_000, lambda _team, _bytes: None)
    shares.add("full", "other", 900_000)
    provider, name = make_provider(shares=shares), f"{server.host}/shared:1"
    full, other = await asyncio.gather(
        *(ensure(provider, name, team) for team in ("full", "other")), return_exceptions=True
    )
    assert isinstance(full, QuotaExceededError)
    assert isinstance(other, ReadyImage)


async def test_a_moved_tag_is_followed_with_the_policy_always_only(
    server: Registry, make_provider: MakeProvider, tmp_path: Path
) -> None:
    provider, name = make_provider(), f"{server.host}/moves:1"
    push(builders.oci_layout(tmp_path / "one", LAYERS[:1]), server, "moves:1")
    first = await ensure(provider, name)
    push(builders.oci_layout(tmp_path / "two", LAYERS), server, "moves:1")
    assert (await ensure(provider, name)).digest == first.digest
    second = await ensure(provider, name, policy=ALWAYS)
    assert second.digest != first.digest
    assert provider.find(name, team="a").digest == second.digest
    # What was pinned to the first version still starts from it.
    assert len(provider.find(name, digest=first.digest, team="a").layers) == 1


async def test_an_image_that_has_lost_a_layer_is_pulled_again(
    server: Registry, make_provider: MakeProvider
) -> None:
    provider, name = make_provider(), f"{server.host}/app:1"
    digest = (await ensure(provider, name)).digest
    shutil.rmtree(provider.find(name, team="a").layers[0])
    with pytest.raises(ImageMissingError, match="lost its layer"):
        provider.find(name, team="a")
    assert (await ensure(provider, name)).digest == digest
    assert all(layer.is_dir() for layer in provider.find(name, team="a").layers)


async def test_an_image_that_was_found_present_counts_as_used(
    server: Registry, store: ImageStore, make_provider: MakeProvider, tmp_path: Path
) -> None:
    provider, name = make_provider(), f"{server.host}/app:1"
    await ensure(provider, name)
    [ref] = (tmp_path / "images" / "refs").glob("*app%3A1.json")
    os.utime(ref, (1.0, 1.0))
    await ensure(provider, name)
    assert store.refs.last_used(name) > 1.0


async def test_the_policy_never_leaves_the_registry_alone(
    relay: Relay, make_provider: MakeProvider
) -> None:
    with pytest.raises(NotFoundError, match="policy is Never"):
        await ensure(make_provider(), f"{relay.host}/app:1", policy=NEVER)
    assert relay.count() == 0


async def test_names_of_this_machine_never_cause_a_network_call(
    relay: Relay, store: ImageStore, make_provider: MakeProvider, tmp_path: Path
) -> None:
    tree = tmp_path / "tree" / "bin"
    tree.mkdir(parents=True)
    mirrors = parse_mirrors(f"docker.io=http://{relay.host}")
    provider = make_provider(RegistrySettings(mirrors=mirrors))
    store.add_directory(tree.parent, "python:3.12")
    ready = await ensure(provider, "python:3.12", policy=ALWAYS)
    assert ready.digest == ""
    assert ready.identity.startswith("sha256:")
    assert (await ensure(provider, "host", policy=ALWAYS)).identity == "host"
    assert relay.count() == 0


async def test_the_reason_of_the_registry_is_distinguished(
    server: Registry, make_provider: MakeProvider, tmp_path: Path
) -> None:
    with pytest.raises(NotFoundError, match="/none:1' not found"):
        await ensure(make_provider(), f"{server.host}/none:1")
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await ensure(make_provider(), "127.0.0.1:9/app:1")
    auth = basic_auth(tmp_path / "private")
    with (
        registry(tmp_path / "private", auth=auth) as private,
        pytest.raises(ForbiddenError, match="access denied to"),
    ):
        await ensure(make_provider(), f"{private.host}/app:1")


async def test_a_team_cannot_reach_this_machine_unless_the_operator_allows_it(
    server: Registry, make_provider: MakeProvider
) -> None:
    name = f"{server.host}/app:1"
    with pytest.raises(ForbiddenError, match="private address"):
        await ensure(make_provider(RegistrySettings()), name)
    allowed = RegistrySettings(private=frozenset({server.host}))
    assert (await ensure(make_provider(allowed), name)).digest


async def test_a_team_never_uses_the_credentials_of_the_operator(
    make_provider: MakeProvider, store: ImageStore, tmp_path: Path
) -> None:
    with registry(tmp_path / "private", auth=basic_auth(tmp_path / "private")) as private:
        layout = builders.oci_layout(tmp_path / "layout", LAYERS)
        push(layout, private, "app:1", "--dest-creds", f"{USER}:{PASSWORD}")
        name = f"{private.host}/app:1"
        settings = RegistrySettings(
            private=frozenset({ANY_HOST}),
            docker_config=write_config(tmp_path, private.host, USER, PASSWORD),
        )
        with pytest.raises(ForbiddenError, match="access denied"):
            await ensure(make_provider(settings), name)
        assert not store.has(name)
        puller = Puller(store, tmp_path / "downloads", settings)
        assert (await puller.pull(name, team=None)).is_new


async def test_a_private_image_is_for_the_teams_with_access_only(
    make_provider: MakeProvider, tmp_path: Path
) -> None:
    provider = make_provider()
    auth = basic_auth(tmp_path / "private")
    with registry(tmp_path / "private", auth=auth) as origin:
        layout = builders.oci_layout(tmp_path / "layout", LAYERS)
        push(layout, origin, "app:1", "--dest-creds", f"{USER}:{PASSWORD}")
        async with Relay(origin) as private:
            name = f"{private.host}/app:1"
            digest = (await ensure(provider, name, "a", credentials=login(private))).digest
            # It is cached, but another team has to show credentials of its own.
            for reference in (name, f"{private.host}/app@{digest}"):
                with pytest.raises(ImageMissingError):
                    provider.find(reference, team="b")
                with pytest.raises(ForbiddenError):
                    await ensure(provider, reference, "b")
                with pytest.raises(ForbiddenError):
                    await ensure(provider, reference, "b", credentials=login(private, "wrong"))
            blobs = private.count("/blobs/")
            await ensure(provider, name, "b", credentials=login(private))
            assert private.count("/blobs/") == blobs > 0  # the layers are there
    for team in ("a", "b"):
        assert provider.find(name, team=team).digest == digest
    with pytest.raises(ImageMissingError):
        provider.find(name, team="c")


async def test_a_checksum_does_not_give_access_to_a_private_layer(
    server: Registry, make_provider: MakeProvider, tmp_path: Path
) -> None:
    """Team b pushes an image that names the layer, and its registry does not have the content."""
    provider = make_provider()
    secret = builders.tar(builders.entry("secret", random.randbytes(10_000)))
    layout = builders.oci_layout(tmp_path / "layout", (secret,))
    with registry(tmp_path / "private", auth=basic_auth(tmp_path / "private")) as private:
        push(layout, private, "app:1", "--dest-creds", f"{USER}:{PASSWORD}")
        await ensure(provider, f"{private.host}/app:1", "a", credentials=login(private))
    push(layout, server, "stolen:1")
    blobs = (layout / "blobs/sha256").iterdir()
    server.lose_blobs({blob.name for blob in blobs if blob.stat().st_size > 10_000})
    with pytest.raises(NotFoundError):
        await ensure(provider, f"{server.host}/stolen:1", "b")


async def test_no_pull_starts_below_the_reserve_of_the_disk(
    server: Registry, make_provider: MakeProvider, tmp_path: Path
) -> None:
    full = DiskReserve(tmp_path, reserve_bytes=1 << 60)
    with pytest.raises(DiskFullError, match="cannot pull image"):
        await ensure(make_provider(reserve=full), f"{server.host}/app:1")
    assert server.requests('"GET /v2/app/blobs/') == [] or not list(
        (tmp_path / "downloads").rglob("*.part")
    )
