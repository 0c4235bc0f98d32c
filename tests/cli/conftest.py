"""One installation for all tests of commands, and the command `paddock`."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from tests.installation import Installation

PADDOCK = Path(sys.executable).with_name("paddock")


class Cli:
    """The command `paddock`; the environment selects its installation."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(PADDOCK), *arguments],
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def __call__(self, *arguments: str, stdin: str = "") -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def json(self, *arguments: str):
        return msgspec.json.decode(self("--output", "json", *arguments))


@pytest.fixture(scope="session")
def cli() -> Generator[Cli]:
    if os.geteuid() != 0:
        pytest.skip("sandboxes with checkpoints need root")
    with asyncio.Runner() as runner:
        paddock = Installation(pool_size=2)
        runner.run(paddock.__aenter__())
        try:
            yield Cli({**paddock.environment, "NO_COLOR": "1", "COLUMNS": "200"})
        finally:
            runner.run(paddock.__aexit__())


@pytest.fixture
def box(cli: Cli) -> Generator[str]:
    sandbox_id = cli("sandbox", "create", "--metadata", "user=ada").strip()
    yield sandbox_id
    cli.run("sandbox", "kill", sandbox_id)
