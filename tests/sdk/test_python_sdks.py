"""E2B's Python SDKs, the newest and one a year old, unmodified."""

import pytest

from tests.sdk.clients import NEWEST, OLDER, SCRIPTS, checks_of, python_of, results_of

pytestmark = [pytest.mark.sdk, pytest.mark.sandbox, pytest.mark.timeout(480)]

RUNS = [
    (script, version)
    for script in ("python_sync.py", "python_async.py")
    for version in (NEWEST, OLDER)
]


@pytest.fixture(scope="session")
def results(environment: dict[str, str]):
    """The results of each client, which runs once."""
    known: dict[tuple[str, str], dict] = {}

    def run(script: str, version: str) -> dict:
        if (script, version) not in known:
            command = [python_of(version), SCRIPTS / script]
            known[script, version] = results_of(command, environment)
        return known[script, version]

    return run


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
