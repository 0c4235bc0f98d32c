"""The gateway with real sandboxes: wakes, announcements, restarts."""

import asyncio
import resource
import signal
import sys
import time
from collections.abc import Awaitable
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest

from tests.gateway.rig import PATIENCE_SECONDS
from tests.gateway.test_connection_floods import FLOOD
from tests.installation import Box, Installation
from tests.runtime.local.nodes import eventually
from tests.store.kubernetes.stalling_proxy import stalling_proxy

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(300)]

SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = str(os.getpid()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
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
WAKES = {"autoPause": True, "autoResume": {"enabled": True}}


async def phase(paddock: Installation, sandbox_id: str) -> str:
    found = await paddock.api("GET", f"/sandboxes/{sandbox_id}")
    return found["state"]


async def wake_count(paddock: Installation, sandbox_id: str) -> int:
    wakes = 0
    for port in paddock.admin_ports:
        async with paddock.http.get(f"http://127.0.0.1:{port}/sandboxes") as response:
            traffic = await response.json(content_type=None)
            wakes += traffic.get(sandbox_id, {}).get("wakes", 0)
    return wakes


async def test_traffic_wakes_frozen_and_hibernated_sandboxes() -> None:
    async with Installation() as paddock:
        box = await paddock.create(timeout=300, **WAKES)
        await paddock.serve_inside(box, 8000, SERVER)
        status, before = await paddock.call(box, 8000)
        assert status == 200
        # Freeze: the same process answers.
        await paddock.api("POST", f"/sandboxes/{box.id}/pause")
        assert await phase(paddock, box.id) == "paused"
        assert await paddock.call(box, 8000) == (200, before)
        assert await phase(paddock, box.id) == "running"
        # A hundred requests at once: one wake, a hundred responses, the same process.
        await paddock.api("POST", f"/sandboxes/{box.id}/pause")
        await send_a_hundred_requests_and_expect_one_wake(paddock, box)
        assert await paddock.call(box, 8000) == (200, before)
        # Requests during a pause succeed.
        pausing = asyncio.create_task(paddock.api("POST", f"/sandboxes/{box.id}/pause"))
        calls = 0
        while calls < 20 or not pausing.done():
            status, body = await paddock.call(box, 8000)
            assert (status, body) == (200, before)
            calls += 1
        await asyncio.gather(pausing, return_exceptions=True)
        # Unauthorized requests wake nothing.
        assert await paddock.call(box, 8000) == (200, before)
        await eventually(lambda: phase_is(paddock, box.id, "running"), seconds=60)
        await paddock.api("POST", f"/sandboxes/{box.id}/pause")
        for token in ({}, {"X-Access-Token": "wrong"}):
            status, _ = await paddock.call(
                box, 49983, "/process.Process/List", method="POST", token=False, headers=token
            )
            assert status == 401
        assert await phase(paddock, box.id) == "paused"
        await paddock.call(box, 8000)
        # Hibernate: memory on disk, and the same process afterwards.
        path = await hibernating(paddock, box.id)
        await paddock.api("POST", f"/sandboxes/{box.id}/pause")
        status = (await paddock.kube("GET", path))["status"]
        assert status["pauseStrategy"] == "Hibernate"
        assert await paddock.call(box, 8000) == (200, before)
        await paddock.api("POST", f"/sandboxes/{box.id}/pause")
        await send_a_hundred_requests_and_expect_one_wake(paddock, box)
        assert await paddock.call(box, 8000) == (200, before)
        # Killed: the error message that clients parse.
        await paddock.api("DELETE", f"/sandboxes/{box.id}")
        for port in (8000, 49983):
            status, body = await paddock.call(box, port, "/health")
            assert status == 502
            assert b"The sandbox was not found" in body


async def send_a_hundred_requests_and_expect_one_wake(paddock: Installation, box: Box) -> None:
    assert await phase(paddock, box.id) == "paused"
    woken = await wake_count(paddock, box.id)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post(number: int) -> bytes:
            body = f"request {number}".encode()
            headers = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "8000"}
            async with session.post(paddock.url, data=body, headers=headers) as response:
                assert response.status == 200
                return await response.read()

        answers = await asyncio.gather(*(post(number) for number in range(100)))
    assert answers == [f"request {number}".encode() for number in range(100)]
    assert await wake_count(paddock, box.id) == woken + 1


async def phase_is(paddock: Installation, sandbox_id: str, wanted: str) -> bool:
    return await phase(paddock, sandbox_id) == wanted


async def hibernating(paddock: Installation, sandbox_id: str) -> str:
    """Set a sandbox's pause strategy to hibernate; return the object's path."""
    return await change(paddock, sandbox_id, {"pauseStrategy": "Hibernate"})


async def change(paddock: Installation, sandbox_id: str, spec: object) -> str:
    """Patch a sandbox's object; return its path."""
    base = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxes"
    listed = await paddock.kube("GET", base)
    [name] = [
        item["metadata"]["name"]
        for item in listed["items"]
        if item["spec"].get("claim", {}).get("sandboxId") == sandbox_id
    ]
    await paddock.kube(
        "PATCH",
        f"{base}/{name}",
        {"spec": spec},
        kind="application/merge-patch+json",
    )
    return f"{base}/{name}"


async def test_a_request_that_reboots_a_stopped_sandbox_waits_for_its_server() -> None:
    async with Installation() as paddock:
        group = "/apis/paddock.dev/v1alpha1/namespaces/default"
        base = await paddock.kube("GET", f"{group}/sandboxtemplates/base")
        template = {
            "apiVersion": "paddock.dev/v1alpha1",
            "kind": "SandboxTemplate",
            "metadata": {"name": "server"},
            # The server listens later than the sandbox runs.
            "spec": {
                **base["spec"],
                "startCommand": "sleep 1; exec python3 /home/user/server.py 8000",
            },
        }
        await paddock.kube("POST", f"{group}/sandboxtemplates", template)
        box = await paddock.create(templateID="server", timeout=300, **WAKES)
        await paddock.serve_inside(box, 8000, SERVER)
        _, before = await paddock.call(box, 8000)
        await paddock.api("POST", f"/sandboxes/{box.id}/pause", {"memory": False})
        status, after = await paddock.call(box, 8000)
        assert status == 200
        assert after != before, "the processes started again"


async def test_every_gateway_has_the_route_before_create_returns() -> None:
    async with Installation(gateways=3, gateway_ports=True, pool_size=4) as paddock:
        await eventually(lambda: all_reported(paddock), seconds=60)
        for _ in range(4):
            box = await paddock.create(timeout=60)
            # Directly to every gateway, with the control plane stopped so that no lookup is
            # possible.
            paddock._processes["control"].send_signal(signal.SIGSTOP)
            try:
                for number in range(3):
                    status, _ = await asyncio.wait_for(
                        paddock.call(box, 49983, "/health", gateway=number), PATIENCE_SECONDS
                    )
                    assert status == 204
            finally:
                paddock._processes["control"].send_signal(signal.SIGCONT)


async def all_reported(paddock: Installation) -> bool:
    async with paddock.http.post(
        f"http://127.0.0.1:{paddock.api_port}/_paddock/activity",
        json={"url": f"http://127.0.0.1:{paddock.admin_ports[0]}"},
        headers={"Authorization": f"Bearer {paddock.secrets.token}"},
    ) as response:
        return len(await response.json(content_type=None)) == 3


async def test_a_killed_or_restarted_gateway_serves_its_sandboxes_at_once() -> None:
    async with Installation(gateways=2) as paddock:
        box = await paddock.create(timeout=300)
        await paddock.serve_inside(box, 8000, SERVER)
        expected = await paddock.call(box, 8000)
        paddock.kill("gateway-0")
        # The other gateway continues; clients reconnect.
        async with aiohttp.ClientSession() as session:
            paddock.http, kept = session, paddock.http
            assert await paddock.call(box, 8000) == expected
            paddock.http = kept
        paddock.kill("gateway-1")
        await paddock.start_gateway(0)
        # As soon as it is ready.
        assert await paddock.call(box, 8000) == expected
        await paddock.stop("gateway-0")
        await paddock.start_gateway(0)
        assert await paddock.call(box, 8000) == expected
        # Without a control plane, running sandboxes stay reachable.
        paddock.kill("control")
        assert await paddock.call(box, 8000) == expected
        await paddock.start_control()
        assert await paddock.call(box, 8000) == expected
        assert Path(f"/proc/{paddock.pid('gateway-0')}").exists()


IDLE_SECONDS = 8
BUSY = """
import time
while True:
    until = time.process_time() + 0.05
    while time.process_time() < until: pass
    time.sleep(0.05)
"""


async def test_only_a_sandbox_without_requests_and_cpu_use_is_paused_as_idle() -> None:
    async with Installation(pool_size=3) as paddock:
        idle, busy, called = [await paddock.create(timeout=300, **WAKES) for _ in range(3)]
        await paddock.serve_inside(idle, 8000, SERVER)
        _, before = await paddock.call(idle, 8000)
        await paddock.write_file(busy, "/home/user/busy.py", BUSY.encode())
        await paddock.run(busy, "nohup python3 /home/user/busy.py >/dev/null 2>&1 </dev/null &")
        for box in (idle, busy, called):
            await change(paddock, box.id, {"idlePause": {"afterSeconds": IDLE_SECONDS}})
        calls: list[float] = []

        async def is_paused_while_another_is_called() -> bool:
            status, _ = await paddock.call(called, 49983, "/health")
            assert status == 204
            calls.append(time.monotonic())
            return await phase(paddock, idle.id) == "paused"

        while True:
            await eventually(is_paused_while_another_is_called, seconds=60, pause=0.5)
            phases = {await phase(paddock, box.id) for box in (busy, called)}
            silences = [later - call for call, later in pairwise([*calls, time.monotonic()])]
            if phases == {"running"} or max(silences) < IDLE_SECONDS / 2:
                break
            # The machine stalled, so even busy sandboxes were idle that long.
            for box in (idle, busy):
                await paddock.run(box, "true")
            calls.clear()
        assert phases == {"running"}
        # A request wakes it again: the same process.
        assert await paddock.call(idle, 8000) == (200, before)


async def test_a_partitioned_gateway_recovers_through_its_peers_without_stale_routes() -> None:
    async with (
        Installation(gateways=3, gateway_ports=True, pool_size=3) as paddock,
        stalling_proxy(f"http://127.0.0.1:{paddock.api_port}") as control,
    ):
        await paddock.stop("gateway-2")
        await paddock.start_gateway(2, PADDOCK_API_PORT=control.url.rpartition(":")[2])
        await eventually(lambda: all_reported(paddock), seconds=60)
        stays, dies = [await paddock.create(timeout=300) for _ in range(2)]

        async def health(number: int, sandbox: Box) -> tuple[int, bool]:
            status, body = await paddock.call(sandbox, 49983, "/health", gateway=number)
            return status, b"The sandbox was not found" in body

        for number in range(3):
            assert await health(number, dies) == (204, False)
        # Cut off from the control plane and its peers while one sandbox ends and one is created.
        third = paddock._processes["gateway-2"]
        third.send_signal(signal.SIGSTOP)
        control.shut()
        try:
            await paddock.api("DELETE", f"/sandboxes/{dies.id}")
            born = await paddock.create(timeout=300)
        finally:
            third.send_signal(signal.SIGCONT)
        # Its peers alone bring it up to date.
        await eventually(lambda: is_(health(2, dies), (502, True)), seconds=60)
        await eventually(lambda: is_(health(2, born), (204, False)), seconds=60)
        assert await health(2, stays) == (204, False)
        # Late messages after the control plane is back restore no stale route.
        control.open()
        await eventually(lambda: all_reported(paddock), seconds=60)
        for number in range(3):
            assert await health(number, dies) == (502, True)
            assert await health(number, born) == (204, False)
            assert await health(number, stays) == (204, False)


async def is_(found: Awaitable[object], expected: object) -> bool:
    return await found == expected


@pytest.mark.parametrize("allowed_files", [0, 2_000], ids=["by count", "by descriptors"])
async def test_a_flood_of_one_address_shuts_out_neither_api_nor_sandboxes(
    allowed_files: int,
) -> None:
    async with Installation(max_connections=50_000 if allowed_files else 2_000) as paddock:
        box = await paddock.create(timeout=600)
        await paddock.serve_inside(box, 8000, SERVER)
        if allowed_files:
            await restart_with_few_files(paddock, allowed_files)
        flood = await asyncio.create_subprocess_exec(
            sys.executable, "-c", FLOOD, str(paddock.port), "8000", stdout=asyncio.subprocess.PIPE
        )
        try:
            assert flood.stdout is not None
            assert await asyncio.wait_for(flood.stdout.readline(), PATIENCE_SECONDS) == b"open\n"
            key = {"X-API-Key": paddock.secrets.api_key}
            sandbox = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "8000"}
            for _ in range(20):
                for path, headers in (("/v2/sandboxes", key), ("/", sandbox)):
                    # A new connection each, from another address than the flood.
                    source = aiohttp.TCPConnector(local_addr=("127.0.0.3", 0), force_close=True)
                    async with aiohttp.ClientSession(connector=source) as http:
                        started = time.monotonic()
                        async with http.get(paddock.url + path, headers=headers) as response:
                            assert response.status == 200
                        assert time.monotonic() - started < 5
        finally:
            flood.kill()
            await flood.wait()


async def restart_with_few_files(paddock: Installation, count: int) -> None:
    """Restart the gateway as a process that can open this many files."""
    await paddock.stop("gateway-0")
    starting = asyncio.create_task(paddock.start_gateway())
    await asyncio.sleep(0)
    # The new process has not read its limits yet: it has only begun to load Python.
    limit = (count, count)
    resource.prlimit(paddock._processes["gateway-0"].pid, resource.RLIMIT_NOFILE, limit)
    await starting


async def test_wrong_keys_are_slowed_down_by_the_address_that_gateways_see() -> None:
    async with Installation() as paddock:

        async def status(key: str, address: str, **headers: str) -> int:
            source = aiohttp.TCPConnector(local_addr=(address, 0))
            async with (
                aiohttp.ClientSession(connector=source) as http,
                http.get(
                    f"{paddock.url}/v2/sandboxes", headers={"X-API-Key": key, **headers}
                ) as response,
            ):
                return response.status

        right = paddock.secrets.api_key
        assert await status(right, "127.0.0.3") == 200
        # Neither header of the client changes the address.
        forged = {"X-Real-Ip": "192.0.2.1", "X-Forwarded-For": "192.0.2.2"}
        tried = [await status(f"e2b_{n:040}", "127.0.0.3", **forged) for n in range(25)]
        assert tried[:20] == [401] * 20
        assert tried[-1] == 429
        assert await status(right, "127.0.0.3") == 200
        assert await status(right, "127.0.0.4") == 200
        assert await status("e2b_wrong", "127.0.0.4") == 401
