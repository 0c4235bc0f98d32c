"""kill -9 of the node or the control plane while images are pulled: no part of an image is used,
nothing is left, and the pull continues where it was.

The registry and the sandboxes are real; a relay stops a pull at the wanted point. `--faults-kills`
sets how many rounds there are, `--faults-seed` which points are met in one round.
"""

import asyncio
import os
import random
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from paddock.runtime.local.images.store import ImageStore
from tests.builds.real import Builder, run
from tests.faults.clients import replayed_by, seed_of
from tests.faults.pulls import POINTS, Pull
from tests.installation import Installation
from tests.runtime.local.images.registry.conftest import server
from tests.runtime.local.images.registry.relay import Relay
from tests.runtime.local.images.registry.servers import (
    PASSWORD,
    USER,
    Registry,
    basic_auth,
    registry,
)
from tests.runtime.local.images.registry.small_images import CHECK, SmallImage, publish, small_root
from tests.runtime.local.nodes import eventually

__all__ = ["server"]
pytestmark = [
    pytest.mark.faults,
    pytest.mark.sandbox,
    pytest.mark.timeout(480),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes with checkpoints need root"),
]
MANY = 20_000
"""Files of a layer whose unpacking takes a moment."""
AT_ONCE = 2
"""Pulls of a team that run; others wait for their turn."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_root(tmp_path_factory.mktemp("roots"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def relay(server: Registry) -> AsyncGenerator[Relay]:
    async with Relay(server) as running:
        yield running


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Generator[Registry]:
    """A registry that wants a password."""
    directory = tmp_path_factory.mktemp("closed")
    with registry(directory, auth=basic_auth(directory)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def private(closed: Registry) -> AsyncGenerator[Relay]:
    async with Relay(closed) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def paddock(relay: Relay, private: Relay) -> AsyncGenerator[Installation]:
    async with Installation(
        pool_size=1,
        registry_private_hosts=f"{relay.host},{private.host}",
        heavy_work_per_team=AT_ONCE,
    ) as running:
        yield running


@pytest.fixture
def published(server: Registry, closed: Registry, root: Path) -> Any:
    """Return a function that publishes an image, also in the registry that wants a password."""

    def make(name: str, point: str = "", *, to: str = "") -> SmallImage:
        files = MANY if point == "unpacking" else 1
        if not to:
            return publish(server, root, name, files=files)
        return publish(closed, root, name, "--dest-creds", f"{USER}:{PASSWORD}", files=files)

    return make


async def test_a_killed_node_uses_no_part_of_an_image_and_continues_every_pull(
    paddock: Installation, relay: Relay, published: Any, request: pytest.FixtureRequest
) -> None:
    kills, seed = int(request.config.getoption("--faults-kills")), seed_of(request)
    dice = random.Random(seed)
    with replayed_by(f"--faults-kills {kills} --faults-seed {seed}"):
        for number in range(max(kills, 1)):
            points = list(POINTS)
            dice.shuffle(points)
            # The one that is unpacked does not stay there: it comes last.
            for turn in (points[:AT_ONCE], points[AT_ONCE:]):
                turn.sort(key=lambda point: point == "unpacking")
                turn.append(f"waiting for {turn[0]}")
                images = [published(_name(seed, number, point), point) for point in turn]
                pulls = [
                    Pull(paddock, relay, image, point)
                    for image, point in zip(images, turn, strict=True)
                ]
                await one_kill(paddock, pulls)
    await nothing_is_left(paddock)


def _name(seed: int, number: int, point: str) -> str:
    return f"round-{seed}-{number}-{point.replace(' ', '-')}:1"


async def one_kill(paddock: Installation, pulls: list[Pull]) -> None:
    """Bring each pull to its point, kill the node, and let all of them end."""
    *running, waiting = pulls
    for pull in running:
        await pull.begin()
        await pull.is_held()
    await waiting.begin()
    await waiting.is_held()
    for pull in running:
        await pull.goes_to_its_point()
    paddock.kill("node")
    for pull in pulls:
        assert not pull.is_usable() or pull.point == "unpacking", pull.point
        pull.note_kill()
    await paddock.start_node()
    for pull in running:
        pull.release()
    for pull in pulls:
        await pull.runs()
        pull.continued()


async def test_a_killed_control_plane_joins_the_pull_that_goes_on(
    paddock: Installation, relay: Relay, published: Any
) -> None:
    pull = Pull(paddock, relay, published("joined:1"), "second layer")
    await pull.begin()
    await pull.is_held()
    paddock.kill("control")
    await paddock.start_control()
    pull.release()
    await pull.runs()
    assert [relay.ranges_of(pull.image.blob_path(number)) for number in (0, 1)] == [[""], [""]]


async def test_a_build_whose_control_plane_is_killed_joins_the_pull_of_its_base(
    paddock: Installation, relay: Relay, published: Any
) -> None:
    image, builder = published("base-of-build:1"), Builder(paddock)
    held = relay.hold(image.blob_path(1), after=1 << 20)
    build = await builder.start(
        "pulled", run("cat /etc/mark"), fromImage=f"{relay.host}/{image.name}"
    )
    async with asyncio.timeout(60):
        await held.reached.wait()
    paddock.kill("control")
    await paddock.start_control()
    held.release.set()
    status = await builder.end(build)
    assert status["phase"] == "Ready", (status, builder.messages(build))
    assert await builder.out("pulled", CHECK) == image.prints
    assert [relay.ranges_of(image.blob_path(number)) for number in (0, 1)] == [[""], [""]]
    await builder.no_sandboxes()


async def test_a_build_that_has_lost_its_credentials_fails_and_says_so(
    paddock: Installation, private: Relay, published: Any
) -> None:
    image = published("secret:1", to="private")
    login = {"type": "registry", "username": USER, "password": PASSWORD}
    held = private.hold(image.blob_path(1), after=1 << 20)
    made = await paddock.api("POST", "/v3/templates", {"name": "of-a-private-image"})
    path = f"/builds/{made['buildID']}"
    body = {"fromImage": f"{private.host}/{image.name}", "fromImageRegistry": login, "steps": []}
    await paddock.api("POST", f"/v2/templates/{made['templateID']}{path}", body)
    async with asyncio.timeout(60):
        await held.reached.wait()
    paddock.kill("control")
    await paddock.start_control()
    status: dict[str, Any] = {}

    async def has_ended() -> bool:
        status.update(await paddock.api("GET", f"/templates/{made['templateID']}{path}/status"))
        return status["status"] == "error"

    await eventually(has_ended, seconds=60)
    reason = status["reason"]
    assert reason["step"] == "base"
    assert "access denied" in reason["message"]
    assert reason["message"].endswith("start the build again")
    held.release.set()
    secrets = [paddock.log(name) for name in ("control", "node")]
    assert not any(PASSWORD in text for text in secrets)


async def nothing_is_left(paddock: Installation) -> None:
    """No download is left, and of the layers only those that a killed import was writing.

    The node removes these within two sweeps (`test_eviction.py`).
    """
    images = paddock.node_state / "images"

    def downloads() -> list[Path]:
        return [path for path in (images / "downloads").rglob("*") if _is_download(path)]

    await eventually(lambda: not downloads(), seconds=30)
    store = ImageStore(images)
    unused = store.unused_layers()
    assert all(name.startswith(".new-") for name in unused), unused

    def is_clean() -> bool:
        # The node may remove them at this moment: then this removes none.
        store.collect()
        return not store.unused_layers()

    await eventually(is_clean, seconds=30)


def _is_download(path: Path) -> bool:
    return path.is_file() and path.suffix != ".lock"
