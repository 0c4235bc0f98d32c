"""E2B's JavaScript SDK, unmodified."""

import pytest

from tests.sdk.clients import NODE, NODE_CLIENTS, SCRIPTS, found_by, javascript_checks

pytestmark = [pytest.mark.sdk, pytest.mark.sandbox, pytest.mark.timeout(480)]


@pytest.fixture(scope="session")
def found(environment: dict[str, str]) -> dict[str, dict]:
    if not (NODE_CLIENTS / "node_modules" / "e2b").exists() or not NODE.exists():
        pytest.skip("E2B's JavaScript SDK is not here: run scripts/install-clients")
    return found_by([NODE, SCRIPTS / "javascript.mjs"], environment)


@pytest.mark.parametrize("check", javascript_checks())
def test_the_client_is_content(found: dict[str, dict], check: str) -> None:
    assert found[check]["problem"] is None, found[check]["problem"]
