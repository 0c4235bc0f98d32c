"""Fixtures of the network tests: each test has a lab of separate network namespaces."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.runtime.local.net.lab import Lab, running_lab


@pytest.fixture
def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("creating network namespaces and links needs root")


@pytest.fixture
async def lab(needs_root: None, tmp_path: Path) -> AsyncIterator[Lab]:
    async with running_lab(tmp_path) as made:
        yield made
