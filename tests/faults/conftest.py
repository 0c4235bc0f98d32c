"""Duration and seed; one installation for tests that only disturb it."""

import pytest
import pytest_asyncio

from tests.faults.clients import seed_of
from tests.installation import Installation


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize the storm with the requested seeds."""
    if "storm_seed" in metafunc.fixturenames:
        count = int(metafunc.config.getoption("--faults-seeds"))
        names = [f"seed_{seed}" for seed in range(count)]
        metafunc.parametrize("storm_seed", range(count), ids=names)


@pytest.fixture
def faults_seconds(request: pytest.FixtureRequest) -> float:
    """How long the storm of real processes lasts."""
    return 60 * float(request.config.getoption("--faults-minutes"))


@pytest.fixture
def faults_kills(request: pytest.FixtureRequest) -> int:
    """Number of kills in the storm of real processes; without it, the time counts."""
    return int(request.config.getoption("--faults-kills"))


@pytest.fixture
def faults_seed(request: pytest.FixtureRequest) -> int:
    return seed_of(request)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hung():
    """An installation that several tests disturb and none may break."""
    async with Installation(pool_size=2) as paddock:
        yield paddock
