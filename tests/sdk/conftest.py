"""One installation for all tests of clients."""

import asyncio
import os
from collections.abc import Callable, Generator

import pytest

from tests.installation import Installation
from tests.sdk.clients import NODE_CLIENTS, SCRIPTS, python_of, results_of


@pytest.fixture(scope="session")
def installation() -> Generator[Installation]:
    if os.geteuid() != 0:
        pytest.skip("sandboxes with checkpoints need root")
    with asyncio.Runner() as runner:
        paddock = Installation(pool_size=4)
        runner.run(paddock.__aenter__())
        try:
            yield paddock
        finally:
            runner.run(paddock.__aexit__())


@pytest.fixture(scope="session")
def environment(installation: Installation) -> dict[str, str]:
    """The environment of a client: its settings, and no others of E2B or Paddock."""
    ours = ("E2B", "PADDOCK")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {
        "E2B_API_KEY": installation.secrets.api_key,
        "E2B_API_URL": installation.url,
        "E2B_SANDBOX_URL": installation.url,
        "NODE_CLIENTS": str(NODE_CLIENTS),
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
