"""One installation for all tests of clients."""

import asyncio
import os
import shutil
from collections.abc import Callable, Generator

import pytest

from tests.installation import Installation
from tests.runtime.local.images import builders
from tests.runtime.local.images.registry.servers import (
    PASSWORD,
    USER,
    Registry,
    basic_auth,
    push,
    registry,
)
from tests.runtime.local.images.small_roots import ubuntu_root
from tests.sdk.clients import NODE_CLIENTS, SCRIPTS, python_of, results_of


@pytest.fixture(scope="session")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Generator[Registry]:
    """A mirror of Docker Hub that has `ubuntu:22.04`."""
    if shutil.which("docker-registry") is None or shutil.which("skopeo") is None:
        pytest.fail("docker-registry and skopeo are missing: scripts/test installs them")
    directory = tmp_path_factory.mktemp("mirror")
    root = builders.tar_of(ubuntu_root(directory / "ubuntu"), directory / "ubuntu.tar")
    config = {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]}
    layout = builders.oci_layout(directory / "layout", (root.read_bytes(),), config=config)
    with registry(directory) as running:
        push(layout, running, "library/ubuntu:22.04")
        yield running


@pytest.fixture(scope="session")
def private(tmp_path_factory: pytest.TempPathFactory) -> Generator[Registry]:
    """A registry that gives `team/tools:1` to one user only."""
    directory = tmp_path_factory.mktemp("private")
    root = builders.tar_of(ubuntu_root(directory / "ubuntu"), directory / "ubuntu.tar")
    config = {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]}
    layout = builders.oci_layout(directory / "layout", (root.read_bytes(),), config=config)
    with registry(directory, auth=basic_auth(directory)) as running:
        push(layout, running, "team/tools:1", "--dest-creds", f"{USER}:{PASSWORD}")
        yield running


@pytest.fixture(scope="session")
def installation(mirror: Registry, private: Registry) -> Generator[Installation]:
    if os.geteuid() != 0:
        pytest.skip("sandboxes with checkpoints need root")
    with asyncio.Runner() as runner:
        paddock = Installation(
            pool_size=4,
            registry_mirrors=f"docker.io={mirror.url}",
            registry_private_hosts=private.host,
            mcp_template="base",
        )
        runner.run(paddock.__aenter__())
        try:
            yield paddock
        finally:
            runner.run(paddock.__aexit__())


@pytest.fixture(scope="session")
def environment(installation: Installation, private: Registry) -> dict[str, str]:
    """The environment of a client: its settings, and no others of E2B or Paddock."""
    ours = ("E2B", "PADDOCK")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {
        "E2B_API_KEY": installation.secrets.api_key,
        "E2B_API_URL": installation.url,
        "E2B_SANDBOX_URL": installation.url,
        "NODE_CLIENTS": str(NODE_CLIENTS),
        "PRIVATE_IMAGE": f"{private.host}/team/tools:1",
        "PRIVATE_LOGIN": f"{USER}:{PASSWORD}",
    }


@pytest.fixture(scope="session")
def results(environment: dict[str, str]) -> Callable[[str, str], dict[str, dict]]:
    """The results of each Python client, which runs once."""
    known: dict[tuple[str, str], dict[str, dict]] = {}

    def run(script: str, version: str) -> dict[str, dict]:
        if (script, version) not in known:
            command = [python_of(version), SCRIPTS / script]
            known[script, version] = results_of(command, environment)
        return known[script, version]

    return run
