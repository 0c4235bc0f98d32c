"""Small images that sandboxes can start from, pushed to a registry of a test."""

import json
import random
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec import Struct

from tests.runtime.local.images import builders
from tests.runtime.local.images.registry.servers import Registry, push
from tests.runtime.local.images.small_roots import shell_root

DATA_BYTES = 3 << 20
_CONFIG = {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]}
CHECK = "cat /etc/mark; sha256sum </data/random; set -- /data/many/*; echo $#"
"""Prints what identifies the content of an image."""


class Blob(Struct, frozen=True):
    """A layer as the registry has it."""

    digest: str
    size: int
    layer: str
    """The name of its directory in the store of a node."""


class SmallImage(Struct, frozen=True):
    """A pushed image of two layers: a root file system, then data that no compression shortens."""

    repository: str
    tag: str
    layers: tuple[Blob, Blob]
    prints: str
    """The output of `CHECK`."""
    files: int
    """Number of files in the directory of the second layer."""

    @property
    def name(self) -> str:
        return f"{self.repository}:{self.tag}"

    def blob_path(self, number: int) -> str:
        """Return the path at which the registry has a layer."""
        return f"/v2/{self.repository}/blobs/{self.layers[number].digest}"


def small_root(directory: Path, *programs: str) -> Path:
    """Create a root file system with a shell and programs of this machine."""
    root = shell_root(directory / "root", "sha256sum", *programs)
    (root / "etc").mkdir(exist_ok=True)
    return root


def publish(
    server: Registry, root: Path, name: str, *options: str, mark: str = "", files: int = 1
) -> SmallImage:
    """Push an image of this root file system with a mark. No other image has its layers.

    `options` are those of `skopeo copy`.
    """
    repository, _, tag = name.partition(":")
    mark = mark or name
    data = random.Random(mark).randbytes(DATA_BYTES)
    (root / "etc" / "mark").write_text(f"{mark}\n")
    place = root.with_name(mark.replace("/", "-").replace(":", "-"))
    first = builders.tar_of(root, place.with_suffix(".tar")).read_bytes()
    many = (builders.entry(f"data/many/{number}") for number in range(files))
    second = builders.tar(
        builders.directory("data"),
        builders.entry("data/random", data),
        builders.directory("data/many"),
        *many,
    )
    layers = (first, second)
    layout = builders.oci_layout(place, layers, config=_CONFIG)
    push(layout, server, name, *options)
    blobs = _manifest(layout)["layers"]
    ids = (f"sha256-{sha256(layer).hexdigest()}" for layer in layers)
    one, two = (
        Blob(blob["digest"], blob["size"], layer) for blob, layer in zip(blobs, ids, strict=True)
    )
    prints = f"{mark}\n{sha256(data).hexdigest()}  -\n{files}\n"
    return SmallImage(repository, tag, (one, two), prints, files)


def _manifest(layout: Path) -> dict[str, Any]:
    [found] = json.loads((layout / "index.json").read_text())["manifests"]
    digest = found["digest"].removeprefix("sha256:")
    return json.loads((layout / "blobs" / "sha256" / digest).read_text())
