"""Images are pulled from a real registry, verified, once, and completely or not at all."""

import asyncio
import json
import shutil
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest

from paddock.kit.errors import ForbiddenError, InvalidError, NotFoundError, UnavailableError
from paddock.runtime.local.images.registry.puller import LayerProgress
from paddock.runtime.local.images.registry.settings import ANY_HOST, RegistrySettings, parse_mirrors
from paddock.runtime.local.images.store import ImageStore
from paddock.runtime.port import RegistryCredentials
from tests.runtime.local.images import builders
from tests.runtime.local.images.registry import large_image
from tests.runtime.local.images.registry.conftest import LAYERS, MakePuller
from tests.runtime.local.images.registry.relay import Relay
from tests.runtime.local.images.registry.servers import (
    PASSWORD,
    USER,
    Registry,
    TokenServer,
    basic_auth,
    push,
    registry,
)

ANYWHERE = frozenset({ANY_HOST})


async def test_an_image_is_pulled_and_can_be_mounted(
    server: Registry, store: ImageStore, make_puller: MakePuller, tmp_path: Path
) -> None:
    seen: list[LayerProgress] = []
    pulled = await make_puller().pull(f"{server.host}/app:1", on_progress=seen.append, team="t")
    image = store.resolve(f"{server.host}/app:1")
    assert pulled.is_new
    assert pulled.image == image
    assert (image.layers[0] / "bin/sh").read_bytes() == b"shell"
    assert (image.layers[1] / "etc/motd").read_bytes() == b"hello"
    assert image.config.env["TWO"] == "a=b"
    assert image.config.user == "1000"
    assert store.digest_of(f"{server.host}/app:1") == pulled.digest
    assert {one.state for one in seen} >= {"waiting", "downloading", "unpacking", "unpacked"}
    assert all(one.done_bytes <= one.total_bytes for one in seen)
    # Nothing but empty locks is left of the download.
    files = [path for path in (tmp_path / "downloads").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) == 0


async def test_an_image_that_is_current_is_not_downloaded_again(
    relay: Relay, make_puller: MakePuller
) -> None:
    puller = make_puller()
    first = await puller.pull(f"{relay.host}/app:1", team="t")
    before = relay.count("/blobs/")
    assert before == 3  # the config and two layers
    second = await puller.pull(f"{relay.host}/app:1", team="t")
    assert (first.is_new, second.is_new) == (True, False)
    assert second.image == first.image
    assert relay.count("/blobs/") == before


async def test_layers_that_another_image_has_are_not_downloaded(
    server: Registry, relay: Relay, make_puller: MakePuller, tmp_path: Path
) -> None:
    more = builders.tar(builders.entry("opt/x", b"x"))
    push(builders.oci_layout(tmp_path / "more", (*LAYERS, more)), server, "more:1")
    puller = make_puller()
    await puller.pull(f"{relay.host}/app:1", team="t")
    await puller.pull(f"{relay.host}/more:1", team="t")
    # The config and the one new layer.
    assert relay.count("/v2/more/blobs/") == 2


async def test_many_pulls_of_one_image_download_it_once(
    server: Registry, relay: Relay, make_puller: MakePuller, tmp_path: Path
) -> None:
    layer = builders.tar(builders.entry("big", bytes(range(256)) * 20_000))
    push(builders.oci_layout(tmp_path / "many", (layer,)), server, "many:1")
    pulls = [make_puller().pull(f"{relay.host}/many:1", team="t") for _ in range(20)]
    done = await asyncio.gather(*pulls)
    assert len({one.digest for one in done}) == 1
    manifest = _manifest(server, "many", "1")
    blob = manifest["layers"][0]["digest"]
    assert relay.count(f"/v2/many/blobs/{blob}") == 1


async def test_an_image_by_digest_is_verified_and_kept(
    server: Registry, store: ImageStore, make_puller: MakePuller
) -> None:
    digest = (await make_puller().pull(f"{server.host}/app:1", team="t")).digest
    pinned = f"{server.host}/app@{digest}"
    assert (await make_puller().pull(pinned, team="t")).digest == digest
    assert store.resolve(pinned).layers == store.resolve(f"{server.host}/app:1").layers


async def test_a_layer_compressed_with_zstd_is_unpacked(
    server: Registry, make_puller: MakePuller
) -> None:
    assert "zstd" in json.dumps(_manifest(server, "app", "zstd"))
    image = (await make_puller().pull(f"{server.host}/app:zstd", team="t")).image
    assert (image.layers[1] / "etc/motd").read_bytes() == b"hello"


async def test_an_image_of_docker_hub_comes_from_a_mirror(
    server: Registry, store: ImageStore, make_puller: MakePuller
) -> None:
    mirrors = parse_mirrors(f"docker.io={server.url}")
    puller = make_puller(RegistrySettings(mirrors=mirrors))
    await puller.pull("python:3.12", team="t")
    assert store.has("python:3.12")


async def test_an_image_that_does_not_exist_is_not_found(
    server: Registry, make_puller: MakePuller
) -> None:
    with pytest.raises(NotFoundError, match=r"image '127.*/none:1' not found"):
        await make_puller().pull(f"{server.host}/none:1", team="t")


async def test_a_registry_that_is_not_there_is_unreachable(make_puller: MakePuller) -> None:
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await make_puller().pull("127.0.0.1:9/app:1", team="t")


async def test_a_registry_with_basic_authentication_needs_the_right_password(
    make_puller: MakePuller, tmp_path: Path
) -> None:
    layout = builders.oci_layout(tmp_path / "layout", LAYERS)
    with registry(tmp_path / "basic", auth=basic_auth(tmp_path / "basic")) as server:
        push(layout, server, "app:1", "--dest-creds", f"{USER}:{PASSWORD}")
        name = f"{server.host}/app:1"
        with pytest.raises(ForbiddenError, match="access denied"):
            await make_puller().pull(name, team="t")
        wrong = RegistryCredentials(username=USER, password="wrong")
        with pytest.raises(ForbiddenError, match="access denied"):
            await make_puller().pull(name, credentials=wrong, team="t")
        right = RegistryCredentials(username=USER, password=PASSWORD)
        assert (await make_puller().pull(name, credentials=right, team="t")).is_new


async def test_a_registry_with_tokens_gets_one_for_the_repository(
    make_puller: MakePuller, tmp_path: Path
) -> None:
    tokens = TokenServer(tmp_path / "tokens")
    runner = await tokens.serve()
    layout = builders.oci_layout(tmp_path / "layout", LAYERS)
    try:
        with registry(tmp_path / "token", auth=tokens.auth) as server:
            for name in ("public/app:1", "private/app:1"):
                await asyncio.to_thread(
                    push, layout, server, name, "--dest-creds", f"{USER}:{PASSWORD}"
                )
            tokens.asked.clear()
            assert (await make_puller().pull(f"{server.host}/public/app:1", team="t")).is_new
            assert [one["scope"] for one in tokens.asked] == ["repository:public/app:pull"]
            private = f"{server.host}/private/app:1"
            with pytest.raises(ForbiddenError, match="access denied"):
                await make_puller().pull(private, team="t")
            wrong = RegistryCredentials(username=USER, password="wrong")
            with pytest.raises(ForbiddenError, match="refuses a token"):
                await make_puller().pull(private, credentials=wrong, team="t")
            identity = RegistryCredentials(identity_token="identity")
            assert (await make_puller().pull(private, credentials=identity, team="t")).is_new
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("kind", ["password", "token"])
async def test_a_mirror_gets_the_password_of_its_url(
    make_puller: MakePuller, tmp_path: Path, kind: str
) -> None:
    """Or its token server does, and the mirror gets the token only."""
    directory, name = tmp_path / "mirror", "library/private"
    tokens = TokenServer(tmp_path / "tokens")
    runner = await tokens.serve()
    auth = tokens.auth if kind == "token" else basic_auth(directory)
    layout = builders.oci_layout(tmp_path / "layout", LAYERS)
    try:
        with registry(directory, auth=auth) as mirror:
            await asyncio.to_thread(
                push, layout, mirror, f"{name}:1", "--dest-creds", f"{USER}:{PASSWORD}"
            )
            url = mirror.url.replace("//", f"//{quote(USER)}:{quote(PASSWORD)}@")
            settings = RegistrySettings(private=ANYWHERE, mirrors=parse_mirrors(f"docker.io={url}"))
            assert (await make_puller(settings).pull("private:1", team="t")).is_new
    finally:
        await runner.cleanup()


def test_an_image_of_a_gigabyte_is_pulled_with_little_memory(
    server: Registry, store: ImageStore, tmp_path: Path
) -> None:
    push(large_image.write_layout(tmp_path / "layout"), server, "large:1")
    shutil.rmtree(tmp_path / "layout")
    name = f"{server.host}/large:1"
    # A process of its own: the peak of this one may be that of another test.
    peak = large_image.peak_of_a_pull(name, tmp_path)
    [layer] = store.resolve(name).layers
    size = sum((layer / file).stat().st_size for file in ("zeros", "noise"))
    shutil.rmtree(layer)
    assert size == (large_image.ZEROS_MIB + large_image.NOISE_MIB) << 20 > 10**9
    assert 10 << 20 < peak <= 150 * 10**6, peak
    print(f"peak of the pull: {peak / 10**6:.0f} MB")


async def test_plain_http_is_used_on_loopback_only(make_puller: MakePuller) -> None:
    settings = RegistrySettings(private=ANYWHERE)
    assert settings.scheme("localhost:5000") == "http"
    assert settings.scheme("10.0.0.1:5000") == "https"
    listed = RegistrySettings(insecure=frozenset({"10.0.0.1:5000"}))
    assert listed.scheme("10.0.0.1:5000") == "http"


@pytest.mark.parametrize("text", ["docker.io", "docker.io=ftp://x", "=", "docker.io=http://"])
def test_a_malformed_mirror_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="registry_mirrors"):
        parse_mirrors(text)


def _manifest(server: Registry, name: str, tag: str) -> dict:
    request = urllib.request.Request(
        f"{server.url}/v2/{name}/manifests/{tag}",
        headers={"Accept": "application/vnd.oci.image.manifest.v1+json"},
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)
