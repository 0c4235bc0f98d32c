"""Fixtures: an empty image store, a puller, a registry with images."""

import shutil
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path

import pytest

from paddock.runtime.local.images.registry.puller import Puller
from paddock.runtime.local.images.registry.settings import ANY_HOST, RegistrySettings
from paddock.runtime.local.images.store import ImageStore
from tests.runtime.local.images import builders
from tests.runtime.local.images.registry.relay import Relay
from tests.runtime.local.images.registry.servers import Registry, push, registry

LAYERS = (
    builders.tar(builders.directory("bin"), builders.entry("bin/sh", b"shell", mode=0o755)),
    builders.tar(builders.entry("etc/motd", b"hello"), builders.entry("bin/.wh.sh")),
)
MakePuller = Callable[..., Puller]


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    """Return an empty store."""
    return ImageStore(tmp_path / "images")


@pytest.fixture
def make_puller(store: ImageStore, tmp_path: Path) -> MakePuller:
    """Return a function that creates a puller; loopback is allowed unless settings are given."""

    def make(settings: RegistrySettings | None = None) -> Puller:
        allowed = settings or RegistrySettings(private=frozenset({ANY_HOST}))
        return Puller(store, tmp_path / "downloads", allowed)

    return make


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Registry]:
    """Run a registry that has `app:1` and `library/python:3.12`."""
    if shutil.which("docker-registry") is None or shutil.which("skopeo") is None:
        pytest.fail("docker-registry and skopeo are missing: scripts/test installs them")
    directory = tmp_path_factory.mktemp("registry")
    layout = builders.oci_layout(directory / "layout", LAYERS)
    with registry(directory) as running:
        for name in ("app:1", "library/python:3.12"):
            push(layout, running, name)
        zstd = builders.oci_layout(directory / "zstd", LAYERS, zstd=True)
        push(zstd, running, "app:zstd")
        yield running


@pytest.fixture
async def relay(server: Registry) -> AsyncGenerator[Relay]:
    """A relay in front of the registry, which counts requests."""
    async with Relay(server) as running:
        yield running
