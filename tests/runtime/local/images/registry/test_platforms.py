"""The image for a platform is chosen from a real index, with attestations and variants."""

import hashlib
import json
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from paddock.kit.errors import NotFoundError
from paddock.runtime.local.images.registry import puller
from paddock.runtime.local.images.registry.manifests import (
    Descriptor,
    Platform,
    RegistryManifest,
    choose_platform,
)
from tests.runtime.local.images import builders
from tests.runtime.local.images.registry.conftest import MakePuller
from tests.runtime.local.images.registry.servers import Registry, push

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
AMD = {"os": "linux", "architecture": "amd64"}
ARM = {"os": "linux", "architecture": "arm64", "variant": "v8"}
UNKNOWN = {"os": "unknown", "architecture": "unknown"}
MARK = "etc/architecture"


@pytest.fixture
def index(server: Registry, tmp_path: Path) -> str:
    """Push an index of two real images and their attestations; return its name."""
    images: list[tuple[Mapping[str, object], Mapping[str, str]]] = []
    for platform in (ARM, AMD):
        text = platform["architecture"]
        layer = builders.tar(builders.entry(MARK, text.encode()))
        layout = builders.oci_layout(tmp_path / text, (layer,), platform=platform)
        push(layout, server, f"multi:{text}")
        image = _descriptor(server, f"multi:{text}")
        images += [(_attestation(server, image), UNKNOWN), (image, platform)]
    _put_index(server, "multi:1", images)
    return f"{server.host}/multi:1"


async def test_attestations_and_other_platforms_are_passed_over(
    index: str, make_puller: MakePuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    amd = Platform(os="linux", architecture="amd64")
    monkeypatch.setattr(puller, "this_platform", lambda: amd)
    image = (await make_puller().pull(index, team="t")).image
    assert (image.layers[0] / MARK).read_text() == "amd64"


async def test_a_machine_of_another_architecture_gets_its_own_image(
    index: str, make_puller: MakePuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = Platform(os="linux", architecture="arm64")
    monkeypatch.setattr(puller, "this_platform", lambda: arm)
    image = (await make_puller().pull(index, team="t")).image
    assert (image.layers[0] / MARK).read_text() == "arm64"


async def test_what_the_index_lacks_is_refused_with_what_it_has(
    index: str, make_puller: MakePuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    riscv = Platform(os="linux", architecture="riscv64")
    monkeypatch.setattr(puller, "this_platform", lambda: riscv)
    with pytest.raises(NotFoundError, match="not found for linux/riscv64") as caught:
        await make_puller().pull(index, team="t")
    assert caught.value.hint == "the registry has it for linux/amd64, linux/arm64/v8"


@pytest.mark.parametrize(
    ("wanted", "offered", "chosen"),
    [
        ("amd64", ["v3", "v2", ""], ""),
        ("amd64", ["v2", "v1"], "v1"),
        ("amd64", ["v3", "v2"], "v2"),
        ("arm64", ["v9", "v8"], "v8"),
        ("arm64", ["v9", ""], ""),
        ("arm/v7", ["v5", "v8", "v6"], "v6"),
        ("arm/v7", ["v6", "v7"], "v7"),
        ("amd64", ["v" + "9" * 5000, "v2"], "v" + "9" * 5000),
    ],
)
def test_the_best_variant_that_the_platform_includes_is_chosen(
    wanted: str, offered: Sequence[str], chosen: str
) -> None:
    architecture, _, variant = wanted.partition("/")
    platform = Platform(os="linux", architecture=architecture, variant=variant)
    manifests = tuple(
        Descriptor(
            digest=f"sha256:{number:064d}",
            size=1,
            platform=Platform(os="linux", architecture=architecture, variant=one),
        )
        for number, one in enumerate(offered)
    )
    found = choose_platform(RegistryManifest(manifests=manifests), platform, "app")
    assert found.platform is not None
    assert found.platform.variant == chosen


def _attestation(server: Registry, image: Mapping[str, object]) -> dict[str, object]:
    """Push what buildx stores beside an image: a manifest with a statement, for no platform."""
    statement = json.dumps({"subject": image["digest"]}).encode()
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _put_blob(server, b"{}", "application/vnd.oci.image.config.v1+json"),
        "layers": [_put_blob(server, statement, "application/vnd.in-toto+json")],
    }
    data = json.dumps(document).encode()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    _send(server, "PUT", f"/v2/multi/manifests/{digest}", data, MANIFEST)
    return {"digest": digest, "size": len(data), "mediaType": MANIFEST}


def _put_index(
    server: Registry,
    name: str,
    images: Sequence[tuple[Mapping[str, object], Mapping[str, str]]],
) -> None:
    repository, _, tag = name.partition(":")
    manifests = [{**image, "platform": platform} for image, platform in images]
    document = {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}
    data = json.dumps(document).encode()
    _send(server, "PUT", f"/v2/{repository}/manifests/{tag}", data, INDEX)


def _put_blob(server: Registry, data: bytes, kind: str) -> dict[str, object]:
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    place = _send(server, "POST", "/v2/multi/blobs/uploads/", b"", "")
    separator = "&" if "?" in place else "?"
    url = place.removeprefix(server.url) + f"{separator}digest={digest}"
    _send(server, "PUT", url, data, "application/octet-stream")
    return {"digest": digest, "size": len(data), "mediaType": kind}


def _send(server: Registry, method: str, path: str, data: bytes, kind: str) -> str:
    """Send a request and return the header Location."""
    headers = {"Content-Type": kind} if kind else {}
    request = urllib.request.Request(server.url + path, data=data, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=10) as response:
        return str(response.headers.get("Location", ""))


def _descriptor(server: Registry, name: str) -> dict[str, object]:
    repository, _, tag = name.partition(":")
    request = urllib.request.Request(
        f"{server.url}/v2/{repository}/manifests/{tag}", headers={"Accept": MANIFEST}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        data = response.read()
    return {
        "digest": f"sha256:{hashlib.sha256(data).hexdigest()}",
        "size": len(data),
        "mediaType": MANIFEST,
    }
