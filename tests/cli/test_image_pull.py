"""`paddock image pull` fetches an image of a registry, with the operator's credentials."""

import base64
import json
import os
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.runtime.local.images import builders
from tests.runtime.local.images.registry.servers import (
    PASSWORD,
    USER,
    basic_auth,
    push,
    registry,
)

LAYER = builders.tar(builders.directory("bin"), builders.entry("bin/sh", b"shell", mode=0o755))

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners are set, which needs root")


def test_a_private_image_is_pulled_with_the_credentials_of_the_operator(tmp_path: Path) -> None:
    paddock = Cli(
        os.environ | {"PADDOCK_STATE_DIR": str(tmp_path / "state"), "HOME": str(tmp_path)}
    )
    with registry(tmp_path / "registry", auth=basic_auth(tmp_path / "registry")) as server:
        layout = builders.oci_layout(tmp_path / "layout", (LAYER,))
        push(layout, server, "library/tiny:1", "--dest-creds", f"{USER}:{PASSWORD}")
        name = f"{server.host}/library/tiny:1"
        denied = paddock.run("image", "pull", name)
        assert denied.returncode == 1
        assert f"access denied to '{name}'" in denied.stderr
        assert "hint:" in denied.stderr

        login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        config = tmp_path / ".docker" / "config.json"
        config.parent.mkdir()
        config.write_text(json.dumps({"auths": {server.host: {"auth": login}}}))
        pulled = json.loads(paddock("image", "pull", name, "-o", "json"))
        assert (pulled["name"], pulled["new"]) == (name, True)
        assert pulled["digest"].startswith("sha256:")
        again = paddock.run("image", "pull", name)
        assert again.stdout == f"already current: {name}@{pulled['digest']}\n"
        listed = json.loads(paddock("image", "ls", "-o", "json"))
        assert name in [item["name"] for item in listed]
        assert PASSWORD not in denied.stderr + again.stdout + again.stderr


def test_a_malformed_reference_is_refused_with_a_hint(tmp_path: Path) -> None:
    done = Cli(os.environ | {"PADDOCK_STATE_DIR": str(tmp_path)}).run("image", "pull", "UPPER:1")
    assert done.returncode == 1
    assert "not a reference to an image" in done.stderr
    assert "such as python:3.12" in done.stderr
