"""`paddock image ls` shows how many sandboxes use an image."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from paddock.runtime.local.images.model import Image
from paddock.runtime.local.images.store import ImageStore
from paddock.runtime.local.node.records import SandboxRecord, StateDirectory
from paddock.runtime.port import AgentConfig, Blueprint, EgressPolicy, InstanceState
from tests.cli.conftest import PADDOCK
from tests.runtime.local.images import builders

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners are set, which needs root")

LOWER = builders.tar(builders.directory("bin"), builders.entry("bin/sh", b"shell", mode=0o755))
UPPER = builders.tar(builders.entry("opt/tool", b"tool"))


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    """Return a store with the images `small`, `large`, which is based on it, and `unused`."""
    store = ImageStore(tmp_path / "node" / "images")
    store.add(builders.oci_layout(tmp_path / "small", (LOWER,)), "small")
    store.add(builders.oci_layout(tmp_path / "large", (LOWER, UPPER)), "large")
    store.add(builders.oci_layout(tmp_path / "unused", (UPPER,)), "unused")
    return store


@pytest.fixture
def sandbox(tmp_path: Path) -> Callable[[str, Image], None]:
    """Return a function that records a sandbox as a node does."""
    node = StateDirectory(tmp_path / "node")
    node.prepare()

    def make(uid: str, image: Image) -> None:
        node.write(
            SandboxRecord(
                uid=uid,
                blueprint=Blueprint(uid=uid, image=image.name),
                state=InstanceState.RUNNING,
                slot=1,
                agent=AgentConfig(),
                egress=EgressPolicy(),
                layers=("/programs", *map(str, image.lowerdirs)),
            )
        )

    return make


def _listed(state: Path, *options: str) -> str:
    done = subprocess.run(
        [str(PADDOCK), "image", "ls", *options],
        env=os.environ | {"PADDOCK_STATE_DIR": str(state), "PADDOCK_CACHE_DIR": str(state / "c")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_sandboxes_count_for_their_image_and_not_for_one_that_it_is_based_on(
    store: ImageStore, sandbox: Callable[[str, Image], None], tmp_path: Path
) -> None:
    for uid in ("a", "b"):
        sandbox(uid, store.resolve("large"))
    sandbox("c", store.resolve("small"))
    found = {one["name"]: one["sandboxes"] for one in json.loads(_listed(tmp_path, "-o", "json"))}
    assert found == {"large:latest": 2, "small:latest": 1, "unused:latest": 0}
    table = _listed(tmp_path)
    assert "USED BY" in table
    assert "2 sandboxes" in table


def test_a_sandbox_counts_for_every_name_of_its_image_and_not_for_a_newer_version(
    store: ImageStore, sandbox: Callable[[str, Image], None], tmp_path: Path
) -> None:
    sandbox("a", store.resolve("small"))
    store.tag("small", "other")
    shutil.rmtree(tmp_path / "unused")
    store.add(builders.oci_layout(tmp_path / "unused", (LOWER, UPPER)), "small")
    found = {one["name"]: one["sandboxes"] for one in json.loads(_listed(tmp_path, "-o", "json"))}
    assert (found["other:latest"], found["small:latest"]) == (1, 0)


def test_images_are_listed_before_the_node_has_ever_run(store: ImageStore, tmp_path: Path) -> None:
    assert "unused:latest" in _listed(tmp_path)
