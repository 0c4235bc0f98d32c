"""Many real sandboxes at once: commands, files and traffic in each, without one failure.

`--load-sandboxes 300` is what the project promises; the default suits CI.
"""

import asyncio
import time

import pytest

from tests.installation import Box, Installation

pytestmark = [pytest.mark.faults, pytest.mark.sandbox, pytest.mark.timeout(900)]

SERVER = """
import http.server, os, sys
os.chdir("/home/user")
handler = http.server.SimpleHTTPRequestHandler
http.server.ThreadingHTTPServer(("", int(sys.argv[1])), handler).serve_forever()
"""


async def live(paddock: Installation, box: Box, number: int) -> None:
    """Use one sandbox as a person would: a file, a command, a server, a pause."""
    content = f"content of {number}\n".encode() * 50
    await paddock.write_file(box, "/home/user/data.txt", content)
    assert await paddock.run(box, "wc -c < /home/user/data.txt") == f"{len(content)}\n"
    if number % 10 == 0:
        await paddock.serve_inside(box, 8000, SERVER)
        status, data = await paddock.call(box, 8000, "/data.txt")
        assert (status, data) == (200, content)
    if number % 3 == 0:
        await paddock.api("POST", f"/sandboxes/{box.id}/pause")
        await paddock.api("POST", f"/sandboxes/{box.id}/connect", {"timeout": 3600})
    assert (await paddock.run(box, "cat /home/user/data.txt")).encode() == content


async def test_many_real_sandboxes_work_at_once_without_one_failure(
    request: pytest.FixtureRequest,
) -> None:
    count = int(request.config.getoption("--load-sandboxes"))
    async with Installation(pool_size=8, cold_creates_per_second=1000) as paddock:
        began = time.monotonic()
        gate = asyncio.Semaphore(16)
        failures: list[str] = []

        async def one(number: int) -> Box | None:
            async with gate:
                try:
                    box = await paddock.create(timeout=3600)
                    await live(paddock, box, number)
                except Exception as error:
                    failures.append(f"{number}: {error!r}"[:300])
                    return None
                return box

        boxes = [box for box in await asyncio.gather(*map(one, range(count))) if box]
        took = time.monotonic() - began
        print(f"{count} sandboxes lived in {took:.1f} s")
        assert not failures, failures[:5]
        # All of them are there at the same time, and each is its own.
        said = await asyncio.gather(
            *(paddock.run(box, "head -1 /home/user/data.txt") for box in boxes)
        )
        assert said == [f"content of {number}\n" for number in range(count)]
        await asyncio.gather(*(paddock.api("DELETE", f"/sandboxes/{box.id}") for box in boxes))
