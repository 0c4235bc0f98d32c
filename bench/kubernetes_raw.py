"""The ceiling of an API server: prepared requests over kept connections, answers unread.

The least that a client can spend on a write: bytes made beforehand, one request at a time on each
TLS connection, of whose answers only the code is looked at. What it sends is its caller's choice.
Beside it, what each of two has done that take turns on one server.
"""

import asyncio
import contextlib
import os
import resource
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator
from pathlib import Path
from typing import Self
from urllib.parse import urlencode, urlsplit

from bench.reporting import Report

from paddock.store.kubernetes.access import Access

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_END = b"\r\n\r\n"


class RawWriters:
    """Minimal clients."""

    def __init__(self, host: str, authorization: str, connections: list[Connection]) -> None:
        self._host = host
        self._authorization = authorization
        self._connections = connections

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, access: Access, count: int) -> AsyncGenerator[Self]:
        """Open all connections."""
        url = urlsplit(access.server)
        connections: list[Connection] = []
        try:
            for _ in range(count):
                reached = await asyncio.open_connection(url.hostname, url.port, ssl=access.tls)
                connections.append(reached)
            yield cls(url.netloc, await access.credential.header() or "", connections)
        finally:
            for _, writer in connections:
                writer.close()

    def request(
        self,
        verb: str,
        path: str,
        body: bytes,
        *,
        params: dict[str, str],
        content_type: str = "application/json",
    ) -> bytes:
        """Return a request as bytes."""
        lines = (
            f"{verb} {path}?{urlencode(params)} HTTP/1.1",
            f"Host: {self._host}",
            f"Authorization: {self._authorization}",
            "User-Agent: paddock",
            "Accept: application/json",
            f"Content-Type: {content_type}",
            f"Content-Length: {len(body)}",
        )
        return "\r\n".join(lines).encode() + _END + body

    async def send(self, requests: Iterable[bytes]) -> list[float]:
        """Send all, one at a time per connection; return the time of each."""
        left, took = iter(requests), list[float]()

        async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for request in left:
                started = time.monotonic()
                writer.write(request)
                await _answer(reader)
                took.append(time.monotonic() - started)

        await asyncio.gather(*(work(*connection) for connection in self._connections))
        return took


async def _answer(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(_END)).lower()
    length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
    if length:
        body = await reader.readexactly(int(length))
    else:
        # Long answers are chunked; JSON contains no such line.
        body = await reader.readuntil(b"\r\n0\r\n\r\n")
    if not head.startswith(b"http/1.1 2"):
        raise RuntimeError(f"the API server refused: {head.decode()}{body[:500]!r}")


class Side:
    """Results of one of two alternating sides."""

    def __init__(self, name: str) -> None:
        self.took: list[float] = []
        self.failed = 0
        self._name = name
        self._cpu: Counter[str] = Counter()
        self._seconds = 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Count the time and CPU of the body to this side."""
        cpu, started = processors(), time.monotonic()
        yield
        self._seconds += time.monotonic() - started
        self._cpu.update({name: spent - cpu[name] for name, spent in processors().items()})

    def tell(self, report: Report, *, rate: str) -> None:
        """Report latencies, rate and cost."""
        report.spread(self._name, self.took, failed=self.failed)
        report.figure(rate, len(self.took) / self._seconds)
        for process, seconds in self._cpu.items():
            spent = seconds * 1e3 / max(len(self.took), 1)
            report.figure(f"{process}_cpu_ms_per_{self._name}", spent)


def processors() -> dict[str, float]:
    """CPU time so far, of this process and its children, by name."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found = {"client": usage.ru_utime + usage.ru_stime}
    own = Path(f"/proc/self/task/{os.getpid()}")
    for child in (own / "children").read_text().split():
        name, _, rest = Path(f"/proc/{child}/stat").read_text().partition("(")[2].partition(")")
        fields = rest.split()
        ticks = int(fields[11]) + int(fields[12])
        found[name.replace("-", "_")] = ticks / os.sysconf("SC_CLK_TCK")
    return found
