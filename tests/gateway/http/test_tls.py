"""TLS with a wildcard certificate and HTTP/2, through Envoy in front, with the real SDK."""

import asyncio
import contextlib
import json
import os
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from paddock.app.up import envoy as tls
from paddock.gateway.envoy_config import TlsListener, certificate_secret, configuration
from paddock.gateway.limits import GatewayLimits
from paddock.kit.errors import InvalidError
from paddock.settings import Settings
from tests.gateway.certificates import issue
from tests.installation import Installation
from tests.ports import free_ports
from tests.runtime.local.nodes import eventually
from tests.sdk.clients import LEAVE

SDK = Path("/var/cache/paddock/sdk/e2b-2.63.0/bin/python")
SESSION = """
import json, os, re, threading, urllib.request
from concurrent.futures import ThreadPoolExecutor
from e2b import Sandbox
def wakes():
    told = urllib.request.urlopen(os.environ["METRICS"]).read().decode()
    return int(re.search(r'^paddock_gateway_wakes_total{result="done"} (\\d+)', told, re.M)[1])
box = Sandbox.create(timeout=120, lifecycle={"on_timeout": "pause", "auto_resume": True})
out = box.commands.run("echo over tls").stdout
box.files.write("/home/user/a.txt", "hello")
text = box.files.read("/home/user/a.txt")
big = "x" * 3_000_000
box.files.write("/home/user/big.txt", big)
same = box.files.read("/home/user/big.txt") == big
streamed = []
box.commands.run("for i in 1 2 3; do echo $i; sleep 0.05; done", on_stdout=streamed.append)
box.pause()
again = box.commands.run("echo woken").stdout
woken = [wakes()]
lasting = box.commands.run("sleep 1000", background=True, timeout=0)
box.pause()
with ThreadPoolExecutor(100) as callers:
    many = set(callers.map(lambda _: box.files.read("/home/user/a.txt"), range(100)))
woken.append(wakes())
pausing = threading.Thread(target=box.pause)
pausing.start()
meanwhile = [box.files.read("/home/user/a.txt") for _ in range(10)]
pausing.join()
processes = [process.pid for process in box.commands.list()]
host = box.get_host(8000)
box.kill()
try:
    box.commands.run("true")
    end = ""
except Exception as error:
    end = str(error)
print(json.dumps({"out": out, "text": text, "same": same, "streamed": "".join(streamed),
                  "again": again, "host": host, "id": box.sandbox_id, "many": sorted(many),
                  "meanwhile": sorted(set(meanwhile)), "goes_on": lasting.pid in processes,
                  "end": end, "woken": woken}))
"""


def test_missing_tls_files_are_reported(tmp_path: Path) -> None:
    assert tls.front(Settings()) is None
    with pytest.raises(InvalidError, match="tls_certificate"):
        tls.front(Settings(tls_certificate=str(tmp_path / "no.pem"), run_dir=str(tmp_path)))


async def test_one_setting_serves_tls_with_a_certificate_of_the_installation(
    tmp_path: Path,
) -> None:
    port, front = free_ports(2)
    state = tmp_path / "state"
    process = tls.front(
        Settings(
            tls_self_signed=True,
            tls_port=port,
            front_port=front,
            run_dir=str(tmp_path / "run"),
            state_dir=str(state),
        )
    )
    assert process is not None
    envoy = await asyncio.create_subprocess_exec(*process.command, stderr=asyncio.subprocess.PIPE)

    async def serves() -> bool:
        context = ssl.create_default_context(cafile=str(state / "tls" / "ca.crt"))
        try:
            _, writer = await asyncio.open_connection("localhost", port, ssl=context)
        except ConnectionError:
            return False
        writer.transport.abort()
        return True

    try:
        await eventually(serves, seconds=60)
    finally:
        envoy.terminate()
        await envoy.communicate()


@pytest.mark.timeout(180)
async def test_a_new_certificate_is_used_without_a_restart_and_open_connections_stay(
    tmp_path: Path,
) -> None:
    (tmp_path / "new").mkdir()
    used, fresh = issue(tmp_path, "*.e2b.localhost"), issue(tmp_path / "new", "*.e2b.localhost")
    port, front = free_ports(2)

    answering: set[asyncio.Task[None] | None] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    process = tls.front(
        Settings(
            tls_certificate=str(used[1]),
            tls_key=str(used[2]),
            tls_host="127.0.0.1",
            tls_port=port,
            front_port=front,
            run_dir=str(tmp_path / "run"),
            state_dir=str(tmp_path / "state"),
        )
    )
    assert process is not None
    server = await asyncio.start_server(answer, "127.0.0.1", front)
    envoy = await asyncio.create_subprocess_exec(*process.command, stderr=asyncio.subprocess.PIPE)

    async def connect(authority: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.create_default_context(cafile=str(authority))
        return await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname="x.e2b.localhost"
        )

    async def takes(authority: Path) -> bool:
        try:
            _, writer = await connect(authority)
        except (ssl.SSLError, ConnectionError):
            return False
        writer.transport.abort()
        return True

    try:
        await eventually(lambda: takes(used[0]), seconds=60)
        assert not await takes(fresh[0])
        reader, writer = await connect(used[0])
        # The key first: for a moment the two do not match, and the old pair stays in use.
        fresh[2].rename(used[2])
        fresh[1].rename(used[1])
        await eventually(lambda: takes(fresh[0]), seconds=60)
        assert not await takes(used[0])
        writer.write(b"GET / HTTP/1.1\r\nHost: x.e2b.localhost\r\n\r\n")
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 30)
        writer.transport.abort()
    finally:
        envoy.terminate()
        await envoy.communicate()
        server.close()
        await asyncio.gather(*filter(None, answering))


class Envoy(NamedTuple):
    """An Envoy in front of a server that answers every request."""

    port: int
    authority: Path

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect by TLS."""
        context = ssl.create_default_context(cafile=str(self.authority))
        return await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=context, server_hostname="x.e2b.localhost"
        )

    async def serves(self) -> bool:
        """Whether a new client is served."""
        try:
            reader, writer = await self.connect()
        except (ssl.SSLError, OSError):
            return False
        writer.write(b"GET / HTTP/1.1\r\nHost: x.e2b.localhost\r\nConnection: close\r\n\r\n")
        response = await reader.read()
        writer.transport.abort()
        return response.startswith(b"HTTP/1.1 200")


@contextlib.asynccontextmanager
async def an_envoy(directory: Path, **limits: float) -> AsyncGenerator[Envoy]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        writer.close()

    authority, certificate, key = issue(directory, "*.e2b.localhost")
    port, front = free_ports(2)
    listener = TlsListener(
        host="127.0.0.1",
        port=port,
        front_port=front,
        certificate=str(certificate),
        key=str(key),
        secret_file=str(directory / "secret.json"),
        **limits,  # type: ignore[arg-type]
    )
    Path(listener.secret_file).write_text(json.dumps(certificate_secret(listener)))
    file = directory / "envoy.json"
    file.write_text(json.dumps(configuration(listener)))
    server = await asyncio.start_server(answer, "127.0.0.1", front)
    process = await asyncio.create_subprocess_exec(
        *(tls.binary(), "-c", str(file), "--disable-hot-restart", "--concurrency", "2"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        envoy = Envoy(port, authority)
        await eventually(envoy.serves, seconds=60)
        yield envoy
    finally:
        process.terminate()
        await process.wait()
        server.close()


async def test_silent_connections_are_closed_before_their_handshake_and_others_served(
    tmp_path: Path,
) -> None:
    async with an_envoy(tmp_path, connections=20, silent_seconds=2) as envoy:
        silent = [await asyncio.open_connection("127.0.0.1", envoy.port) for _ in range(20)]
        # They are all that it accepts, until it closes them.
        await eventually(envoy.serves, seconds=60)
        for reader, writer in silent:
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.transport.abort()


async def test_clients_that_are_silent_after_the_handshake_are_closed_when_memory_is_short(
    tmp_path: Path,
) -> None:
    async with an_envoy(tmp_path, silent_seconds=1, heap_bytes=1) as envoy:
        silent = [await envoy.connect() for _ in range(20)]
        for reader, writer in silent:
            assert b"HTTP/1.1 200" not in await asyncio.wait_for(reader.read(), 60)
            writer.transport.abort()
        assert await envoy.serves()


def test_more_connections_than_the_limit_of_gateways_shorten_the_time_of_idle_ones() -> None:
    """A silent connection takes 14 KiB of Envoy."""
    listener = TlsListener(host="", port=1, front_port=2, certificate="", key="", secret_file="")
    assert listener.connections == GatewayLimits().connections
    assert listener.silent_seconds == GatewayLimits().first_byte_seconds
    assert listener.connections * (14 << 10) > listener.heap_bytes


@pytest.mark.sandbox
@pytest.mark.sdk
@pytest.mark.timeout(300)
async def test_the_real_client_works_over_tls_and_http_2_by_its_domain_alone(
    tmp_path: Path,
) -> None:
    if not SDK.exists():
        pytest.skip("the E2B client is not installed: run the set-up of clients first")
    ca, certificate, key = issue(tmp_path, "*.e2b.localhost")
    port, front = free_ports(2)
    async with Installation(
        tls_certificate=certificate, tls_key=key, tls_port=port, front_port=front
    ) as paddock:
        context = ssl.create_default_context(cafile=str(ca))
        context.set_alpn_protocols(["h2", "http/1.1"])
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname="api.e2b.localhost"
        )
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        writer.transport.abort()
        process = await asyncio.create_subprocess_exec(
            str(SDK),
            "-c",
            SESSION + LEAVE,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "E2B_API_KEY": paddock.secrets.api_key,
                "E2B_DOMAIN": f"e2b.localhost:{port}",
                "SSL_CERT_FILE": str(ca),
                "METRICS": f"http://127.0.0.1:{paddock.admin_ports[0]}/metrics",
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, error = await process.communicate()
        assert process.returncode == 0, error.decode()[-3000:] + paddock.log("tls")[-1000:]
        result = json.loads(out.decode().splitlines()[-1])
        assert result["out"] == "over tls\n"
        assert (result["text"], result["same"]) == ("hello", True)
        assert result["streamed"] == "1\n2\n3\n"
        # Requests wake it, a hundred at once wake it once, and requests during a pause are answered
        # too; the same process continues.
        assert result["again"] == "woken\n"
        assert (result["many"], result["meanwhile"]) == (["hello"], ["hello"])
        assert result["goes_on"]
        assert result["woken"] == [1, 2]
        assert "sandbox was not found" in result["end"].lower()
        assert result["host"] == f"8000-{result['id']}.e2b.localhost:{port}"
        # HTTP/1.1 over TLS, by host name.
        box = await paddock.create(timeout=60)
        connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(ca)))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get(
                f"https://127.0.0.1:{port}/health",
                server_hostname="x.e2b.localhost",
                headers={"Host": f"49983-{box.id}.e2b.localhost:{port}"},
            ) as response,
        ):
            assert response.status == 204
