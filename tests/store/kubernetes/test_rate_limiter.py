"""The client-side rate limit: a burst, then a constant rate, in order of arrival."""

import asyncio

import pytest

from paddock.store.kubernetes.limiter import RateLimiter

pytestmark = pytest.mark.looptime


async def test_a_burst_passes_at_once_and_the_rest_at_the_rate() -> None:
    limiter = RateLimiter(10, burst=5)
    loop = asyncio.get_running_loop()
    start = loop.time()
    passed: list[float] = []
    for _ in range(10):
        await limiter.acquire()
        passed.append(round(loop.time() - start, 3))
    assert passed == [0, 0, 0, 0, 0, 0.1, 0.2, 0.3, 0.4, 0.5]


async def test_callers_pass_in_order_of_arrival() -> None:
    limiter = RateLimiter(10, burst=1)
    order: list[int] = []

    async def caller(number: int) -> None:
        await limiter.acquire()
        order.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(caller(number))
    assert order == list(range(6))


async def test_unused_tokens_do_not_exceed_the_burst() -> None:
    limiter = RateLimiter(10, burst=2)
    await asyncio.sleep(100)
    waits = [await limiter.acquire() for _ in range(4)]
    assert [round(wait, 3) for wait in waits] == [0, 0, 0.1, 0.1]
