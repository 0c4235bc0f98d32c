"""What pulls of one team may bring to a node, and what makes room for more."""

import asyncio
from pathlib import Path

import pytest

from paddock.kit.errors import QuotaExceededError
from paddock.runtime.local.images.registry.puller import PulledImage, Puller
from paddock.runtime.local.images.registry.settings import ANY_HOST, RegistrySettings
from paddock.runtime.local.images.registry.team_share import PullShares
from paddock.runtime.local.images.store import ImageStore
from tests.runtime.local.images import builders
from tests.runtime.local.images.registry.servers import Registry, push

ANYWHERE = RegistrySettings(private=frozenset({ANY_HOST}))
SIZE = 400_000


class Case:
    """A store, and what its pullers are allowed."""

    def __init__(self, store: ImageStore, server: Registry, directory: Path) -> None:
        self.store = store
        self.server = server
        self.directory = directory
        self.asked: list[tuple[str, int]] = []

    def make_room(self, team: str, size: int) -> None:
        self.asked.append((team, size))

    def shares(self, limit: int) -> PullShares:
        return PullShares(self.store, limit, self.make_room)

    async def pull(self, name: str, shares: PullShares, team: str | None = "red") -> PulledImage:
        puller = Puller(self.store, self.directory / "downloads", ANYWHERE, shares=shares)
        return await puller.pull(f"{self.server.host}/{name}", team=team)


@pytest.fixture
def case(store: ImageStore, server: Registry, tmp_path: Path) -> Case:
    shared = builders.tar(builders.entry("shared", b"s" * SIZE))
    for name in ("share/one:1", "share/two:1"):
        own = builders.tar(builders.entry(name, name.encode() * (SIZE // 10)))
        layout = builders.oci_layout(tmp_path / name[6:9], (shared, own))
        push(layout, server, name)
    return Case(store, server, tmp_path)


async def test_a_team_counts_for_each_layer_of_its_pulls_once(case: Case) -> None:
    shares = case.shares(100 * SIZE)
    await case.pull("share/one:1", shares)
    first = shares.stored_bytes("red")
    assert first >= 2 * SIZE
    await case.pull("share/two:1", shares)
    assert shares.stored_bytes("red") < first + 2 * SIZE
    assert shares.stored_bytes("blue") == 0


async def test_a_pull_beyond_the_share_is_refused_and_leaves_nothing(case: Case) -> None:
    shares = case.shares(3 * SIZE)
    await case.pull("share/one:1", shares)
    stored = set((case.directory / "images" / "layers").iterdir())
    with pytest.raises(QuotaExceededError, match="is not pulled") as refused:
        await case.pull("share/two:1", shares)
    assert "image_max_team_bytes" in (refused.value.hint or "")
    assert case.asked[0][0] == "red"
    assert set((case.directory / "images" / "layers").iterdir()) == stored
    # Other teams and the operator have their own.
    await case.pull("share/two:1", shares, team="blue")


async def test_the_operator_has_no_share(case: Case) -> None:
    shares = case.shares(1)
    await case.pull("share/one:1", shares, team=None)
    assert shares.stored_bytes("") >= 2 * SIZE
    assert case.asked == []


async def test_images_of_the_team_that_nobody_needs_make_room(case: Case) -> None:
    def make_room(team: str, size: int) -> None:
        for manifest in tuple(case.store.refs.all()):
            if manifest.pulled_by == team:
                case.store.refs.remove(manifest.name)

    shares = PullShares(case.store, 3 * SIZE, make_room)
    first = await case.pull("share/one:1", shares)
    second = await case.pull("share/two:1", shares)
    assert case.store.has(second.image.name)
    assert not case.store.has(first.image.name)


async def test_pulls_at_the_same_time_count_together(case: Case) -> None:
    shares = case.shares(3 * SIZE)
    pulls = (case.pull(name, shares) for name in ("share/one:1", "share/two:1"))
    results = await asyncio.gather(*pulls, return_exceptions=True)
    assert sum(isinstance(result, QuotaExceededError) for result in results) >= 1
    assert shares.stored_bytes("red") <= 3 * SIZE + SIZE
