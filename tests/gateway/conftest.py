"""Gateway tests run on uvloop, as the gateway does."""

import pytest
import uvloop

from paddock.gateway.routing import route_lookup
from paddock.gateway.waking import waker
from tests.gateway.rig import PATIENCE_SECONDS


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def patient_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use long timeouts, so that a stalled machine does not look like a control plane that is
    down."""
    monkeypatch.setattr(route_lookup, "_TIMEOUT_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(waker, "_RETRY_SECONDS", PATIENCE_SECONDS)
