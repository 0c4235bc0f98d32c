"""A stalled gateway does not blame its own delay on the sandbox."""

import asyncio
import time

import pytest

from paddock.gateway.http.sender import Sender
from paddock.gateway.http.upstream import UpstreamConnection
from paddock.gateway.limits import GatewayLimits, GatewayOptions
from paddock.gateway.routing.routes import RouteTable
from paddock.kit import clock as clocks
from tests.gateway.rig import LoopbackDialer

LIMIT_SECONDS = 0.2


def sender() -> Sender:
    clock = clocks.system()
    return Sender(
        LoopbackDialer(),
        RouteTable(clock),
        clock,
        limits=GatewayLimits(connect_seconds=LIMIT_SECONDS),
        options=GatewayOptions(),
    )


async def test_a_stalled_gateway_retries_the_connection_once() -> None:
    connection: UpstreamConnection = object()  # type: ignore[assignment]
    dials = 0

    async def dial() -> UpstreamConnection:
        nonlocal dials
        dials += 1
        if dials == 1:
            time.sleep(LIMIT_SECONDS * 3)
            await asyncio.Event().wait()
        return connection

    assert await sender()._dial_in_time(dial) is connection
    assert dials == 2


@pytest.mark.looptime
async def test_a_connect_timeout_is_not_retried() -> None:
    dials = 0

    async def dial() -> UpstreamConnection:
        nonlocal dials
        dials += 1
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(TimeoutError):
        await sender()._dial_in_time(dial)
    assert dials == 1
