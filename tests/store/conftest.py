"""Fixtures of the store tests: one `harness` per backend, its store and its namespace."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.store.backends import BACKENDS, Backend, Harness

pytest.register_assert_rewrite("tests.store.contract")


@pytest.fixture(params=BACKENDS)
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Harness]:
    backend: Backend = request.param
    async with backend(tmp_path) as opened:
        yield opened


@pytest.fixture
def store(harness: Harness):
    return harness.store


@pytest.fixture
def ns(harness: Harness) -> str:
    return harness.namespace
