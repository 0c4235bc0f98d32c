"""Requests in flight when a real sandbox hibernates: none is lost, none is sent twice."""

import asyncio
import json
import random

import aiohttp
import pytest

from tests.gateway.test_real_sandboxes import WAKES, hibernating, phase, phase_is
from tests.installation import Box, Installation
from tests.runtime.local.nodes import eventually

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(300)]

CLIENTS = 8
PAUSES = 6
SERVER = """
import collections, http.server, json, sys, threading, time
seen, lock = collections.Counter(), threading.Lock()
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        name = self.rfile.read(int(self.headers["Content-Length"])).decode()
        with lock:
            seen[name] += 1
        time.sleep(float(self.path[1:]))
        self.answer(name.encode())
    def do_GET(self):
        with lock:
            self.answer(json.dumps(seen).encode())
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 256
Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Clients:
    """Keep-alive clients of one sandbox, and what they were answered."""

    def __init__(self, paddock: Installation, box: Box) -> None:
        self.paddock = paddock
        self.headers = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "8000"}
        self.sent: list[str] = []
        self.failed: list[str] = []

    async def post(self, session: aiohttp.ClientSession, name: str, seconds: float) -> None:
        """Send one request that the sandbox answers after so many seconds."""
        self.sent.append(name)
        url = f"{self.paddock.url}/{seconds}"
        try:
            async with session.post(url, data=name.encode(), headers=self.headers) as response:
                body = await response.read()
                if (response.status, body) != (200, name.encode()):
                    self.failed.append(f"{name}: {response.status} {body!r}")
        except aiohttp.ClientError as error:
            self.failed.append(f"{name}: {error!r}")

    async def keep_posting(self, number: int, stop: asyncio.Event) -> None:
        """Send one request after another over one connection, until told to stop."""
        choose = random.Random(number)
        async with aiohttp.ClientSession() as session:
            count = 0
            while not stop.is_set():
                seconds = choose.choice((0.0, 0.01, 0.05, 0.3))
                await self.post(session, f"{number}-{count}", seconds)
                count += 1
                # Without pauses between requests, the sandbox would never be without one.
                await asyncio.sleep(choose.uniform(0.0, 0.8))

    async def counted(self) -> dict[str, int]:
        """Return how often the sandbox's server received each request."""
        async with self.paddock.http.get(self.paddock.url, headers=self.headers) as response:
            return json.loads(await response.read())


async def has_hibernated(paddock: Installation, path: str) -> bool:
    return (await paddock.kube("GET", path))["status"]["pauseStrategy"] == "Hibernate"


async def test_no_request_is_lost_or_sent_twice_when_its_sandbox_hibernates() -> None:
    # On a busy machine a gateway may learn of a pause late, above all from a control plane that has
    # just started: no request of this test is too old to be carried over.
    async with Installation(gateways=2, pause_grace_seconds=60) as paddock:
        box = await paddock.create(timeout=300, **WAKES)
        await paddock.serve_inside(box, 8000, SERVER)
        path = await hibernating(paddock, box.id)
        clients, stop = Clients(paddock, box), asyncio.Event()
        posting = [
            asyncio.create_task(clients.keep_posting(number, stop)) for number in range(CLIENTS)
        ]
        for _ in range(PAUSES):
            await asyncio.sleep(0.1)
            await paddock.api("POST", f"/sandboxes/{box.id}/pause")
            await eventually(lambda: phase_is(paddock, box.id, "running"), seconds=60)
        stop.set()
        await asyncio.gather(*posting)
        assert clients.failed == []
        assert await clients.counted() == dict.fromkeys(clients.sent, 1)
        # A request longer than the pause is carried over it; the sandbox wakes for it.
        async with aiohttp.ClientSession() as session:
            long = asyncio.create_task(clients.post(session, "long", 2.0))
            await asyncio.sleep(0.3)
            await paddock.api("POST", f"/sandboxes/{box.id}/pause")
            await long
        assert clients.failed == []
        assert (await clients.counted())["long"] == 1
        # A control plane that has just started does not know yet which gateways have requests.
        paddock.kill("control")
        await paddock.start_control()
        async with aiohttp.ClientSession() as session:
            early = asyncio.create_task(clients.post(session, "early", 1.5))
            await asyncio.sleep(0.1)
            await paddock.api("POST", f"/sandboxes/{box.id}/pause")
            await early
        assert clients.failed == []
        assert (await clients.counted())["early"] == 1
        # Without requests it hibernates, as soon as all gateways have reported.
        await paddock.api("POST", f"/sandboxes/{box.id}/pause")
        assert await phase(paddock, box.id) == "paused"
        await eventually(lambda: has_hibernated(paddock, path), seconds=30)
        assert (await clients.counted())["long"] == 1
