"""Many concurrent real sandboxes: commands, files and traffic in each, without one failure.

`--load-sandboxes 300` is what the project guarantees; the default suits CI.
"""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

import pytest

from tests.installation import Box, Installation

pytestmark = [pytest.mark.faults, pytest.mark.sandbox, pytest.mark.timeout(900)]

TURNS = 3
Done = TypeVar("Done")
SERVER = """
import http.server, os, sys
os.chdir("/home/user")
handler = http.server.SimpleHTTPRequestHandler
http.server.ThreadingHTTPServer(("", int(sys.argv[1])), handler).serve_forever()
"""


def content_of(number: int, turn: int) -> bytes:
    """Content of one sandbox after this many turns: not another's, and not its older one."""
    return f"content {turn} of {number}\n".encode() * 50


async def begin(paddock: Installation, number: int) -> Box:
    """Create a sandbox that serves its content; some are paused and woken in between."""
    box = await paddock.create(timeout=3600)
    await paddock.write_file(box, "/home/user/data.txt", content_of(number, 0))
    await paddock.serve_inside(box, 8000, SERVER)
    if number % 3 == 0:
        await paddock.api("POST", f"/sandboxes/{box.id}/pause")
        await paddock.api("POST", f"/sandboxes/{box.id}/connect", {"timeout": 3600})
    return box


async def work(paddock: Installation, box: Box, number: int, turn: int) -> None:
    """Use one sandbox in every way at once: a command, an upload, an HTTP request."""
    before, after = content_of(number, turn - 1), content_of(number, turn)
    counted, served, _ = await asyncio.gather(
        paddock.run(box, "wc -c < /home/user/data.txt"),
        paddock.call(box, 8000, "/data.txt"),
        paddock.write_file(box, "/home/user/next.txt", after),
    )
    assert counted == f"{len(before)}\n"
    assert served == (200, before)
    said = await paddock.run(box, "cd /home/user && mv next.txt data.txt && cat data.txt")
    assert said.encode() == after


async def test_many_real_sandboxes_work_at_once_without_one_failure(
    request: pytest.FixtureRequest,
) -> None:
    count = int(request.config.getoption("--load-sandboxes"))
    async with Installation(pool_size=8, cold_creates_per_second=1000) as paddock:
        failures: list[str] = []

        async def noting(number: int, act: Awaitable[Done]) -> Done | None:
            try:
                return await act
            except Exception as error:  # no failure is tolerated
                failures.append(f"{number}: {error!r}"[:300])
                return None

        began = time.monotonic()
        gate = asyncio.Semaphore(16)

        async def made(number: int) -> Box | None:
            async with gate:
                return await noting(number, begin(paddock, number))

        boxes = [box for box in await asyncio.gather(*map(made, range(count))) if box]
        assert not failures, failures[:5]
        print(f"{count} sandboxes made and serving in {time.monotonic() - began:.1f} s")
        began = time.monotonic()
        for turn in range(1, TURNS + 1):
            # No sandbox waits: all work at this moment.
            every = (noting(n, work(paddock, box, n, turn)) for n, box in enumerate(boxes))
            await asyncio.gather(*every)
        print(f"{count} at once did {TURNS} turns of work in {time.monotonic() - began:.1f} s")
        assert not failures, failures[:5]
        await asyncio.gather(*(paddock.api("DELETE", f"/sandboxes/{box.id}") for box in boxes))
