"""`paddock image push` sends an image to a registry, with the operator's credentials."""

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
    registry,
    write_config,
)

LAYER = builders.tar(builders.directory("bin"), builders.entry("bin/sh", b"shell", mode=0o755))

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners are set, which needs root")


def test_an_imported_image_is_pushed_and_pulled_on_another_machine(tmp_path: Path) -> None:
    environment = os.environ | {"HOME": str(tmp_path)}
    one, two = (
        Cli(environment | {"PADDOCK_STATE_DIR": str(tmp_path / name)}) for name in ("one", "two")
    )
    with registry(tmp_path / "registry", auth=basic_auth(tmp_path / "registry")) as server:
        layout = builders.oci_layout(tmp_path / "layout", (LAYER,))
        one("image", "import", str(layout), "--name", "tools")
        name = f"{server.host}/team/tools:1"
        denied = one.run("image", "push", "tools", name)
        assert denied.returncode == 1
        assert f"pushing '{name}' is denied" in denied.stderr
        assert "hint:" in denied.stderr

        docker = tmp_path / ".docker"
        docker.mkdir()
        write_config(docker, server.host, USER, PASSWORD)
        pushed = json.loads(one("image", "push", "tools", name, "-o", "json"))
        assert pushed["name"] == name
        assert pushed["sentBytes"] > 0
        again = one.run("image", "push", "tools", name)
        assert again.stdout == f"pushed {name}@{pushed['digest']}\n"
        pulled = json.loads(two("image", "pull", name, "-o", "json"))
        assert pulled["digest"] == pushed["digest"]
        assert PASSWORD not in denied.stderr + again.stdout + again.stderr
