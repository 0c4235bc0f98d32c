"""E2B's JavaScript SDK, unmodified."""

import pytest

from tests.sdk.clients import NODE, NODE_CLIENTS, SCRIPTS, javascript_checks, results_of

pytestmark = [pytest.mark.sdk, pytest.mark.sandbox, pytest.mark.timeout(480)]


@pytest.fixture(scope="session")
def results(environment: dict[str, str]) -> dict[str, dict]:
    if not (NODE_CLIENTS / "node_modules" / "e2b").exists() or not NODE.exists():
        pytest.skip("E2B's JavaScript SDK is not installed: run scripts/install-clients")
    return results_of([NODE, SCRIPTS / "javascript.mjs"], environment)


@pytest.mark.parametrize("check", javascript_checks())
def test_a_check_of_the_client_passes(results: dict[str, dict], check: str) -> None:
    assert results[check]["problem"] is None, results[check]["problem"]
