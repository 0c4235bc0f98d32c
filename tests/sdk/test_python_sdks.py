"""E2B's Python SDKs, the newest and one a year old, unmodified."""

import pytest

from tests.sdk.clients import NEWEST, OLDER, checks_of

pytestmark = [pytest.mark.sdk, pytest.mark.sandbox, pytest.mark.timeout(480)]

RUNS = [
    (script, version)
    for script in ("python_sync.py", "python_async.py")
    for version in (NEWEST, OLDER)
]


@pytest.mark.parametrize(
    ("script", "version", "check"),
    [
        pytest.param(script, version, check, id=f"{script.removesuffix('.py')} {version} {check}")
        for script, version in RUNS
        for check in checks_of(script, newest=version == NEWEST)
    ],
)
def test_a_check_of_the_client_passes(results, script: str, version: str, check: str) -> None:
    outcome = results(script, version)[check]
    assert outcome["problem"] is None, outcome["problem"]
