"""The servers of a company, on the gateway's address of an installation: a mirror and a proxy."""

import asyncio
import base64
import contextlib
import hashlib
import http.server
import io
import socket
import ssl
import threading
import zipfile
from pathlib import Path
from typing import Any, Self

from paddock.runtime.local.net.addresses import AddressPlan
from paddock.runtime.local.net.settings import HOST_NAME, FabricSettings
from tests.gateway.certificates import issue
from tests.ports import free_ports

REGISTRY = "registry.corp.example"
"""A name that only the proxy can resolve."""
USER, PASSWORD = "agent", "proxy-pass-4711"
PACKAGE = "paddock_demo"


class Company:
    """A TLS server with a certificate of a private CA, and a proxy that records its tunnels."""

    def __init__(self, directory: Path) -> None:
        self.ca, self._certificate, self._key = issue(directory, HOST_NAME, REGISTRY)
        self.mirror_port, self.proxy_port, self.closed_port = free_ports(3)
        self.requests: list[str] = []
        """Paths that the mirror was asked for."""
        self.tunnels: list[tuple[str, str]] = []
        """Targets and credentials that the proxy saw."""
        self._stack = contextlib.AsyncExitStack()

    @property
    def mirror_url(self) -> str:
        return f"https://{HOST_NAME}:{self.mirror_port}"

    @property
    def proxy_url(self) -> str:
        return f"http://{USER}:{PASSWORD}@{HOST_NAME}:{self.proxy_port}"

    async def open(self, fabric_number: int) -> Self:
        """Serve on the gateway's address of a fabric, which must exist."""
        self._address = gateway_of(fabric_number)
        for port in (self.mirror_port, self.closed_port):
            server = http.server.ThreadingHTTPServer((self._address, port), self._handler())
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._certificate, self._key)
            server.socket = context.wrap_socket(server.socket, server_side=True)
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            self._stack.callback(server.server_close)
            self._stack.callback(server.shutdown)
        proxy = await asyncio.start_server(self._tunnel, self._address, self.proxy_port)
        self._stack.callback(proxy.close)
        return self

    async def close(self) -> None:
        await self._stack.aclose()

    async def _tunnel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect every tunnel to the mirror."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            credentials = next(
                (line for line in head if line.lower().startswith("proxy-authorization")), ""
            )
            plain = base64.b64decode(credentials.split()[-1]).decode() if credentials else ""
            self.tunnels.append((head[0].split()[1], plain))
            upper, lower = await asyncio.open_connection(self._address, self.mirror_port)
            with contextlib.closing(lower):
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await asyncio.gather(_copy(reader, lower), _copy(upper, writer))

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        wheel = _wheel()
        name = f"{PACKAGE}-1.0-py3-none-any.whl"
        digest = hashlib.sha256(wheel).hexdigest()
        pages = {
            "/hello": b"hello from the company",
            "/simple/paddock-demo/": f'<a href="/{name}#sha256={digest}">{name}</a>'.encode(),
            f"/{name}": wheel,
        }
        company = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                company.requests.append(self.path)
                body = pages.get(self.path)
                self.send_response(200 if body is not None else 404)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
                """Write nothing."""

        return Handler


def gateway_of(fabric_number: int) -> str:
    """Return the address of this machine in the sandboxes of a fabric."""
    return str(AddressPlan(FabricSettings.numbered(fabric_number, "").subnet, "x").gateway)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").shutdown(socket.SHUT_WR)


def _wheel() -> bytes:
    info = f"{PACKAGE}-1.0.dist-info"
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr(f"{PACKAGE}.py", "print('installed from the mirror')\n")
        file.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: paddock-demo\nVersion: 1.0\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return data.getvalue()
