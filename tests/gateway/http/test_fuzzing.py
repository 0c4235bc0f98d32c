"""Differential fuzzing: the gateway and nginx in front of the same kind of upstream.

The requests that reach a sandbox are recorded behind both. It is a failure if the gateway forwards
a request that nginx refuses, or if both forward it and the sandbox receives something else. (The
gateway may refuse more than nginx.) Requests alternate between two sandboxes: no byte for one may
reach the other. The seed is fixed, unless another is set.
"""

import asyncio
import contextlib
import random
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.fuzz import fuzz_budget
from tests.gateway.rig import rig
from tests.ports import free_ports
from tests.runtime.local.nodes import eventually

CORPUS = Path(__file__).with_name("corpus") / "smuggling.txt"
ROUNDS = fuzz_budget.examples(250)


class Strict:
    """A strict upstream that records each request and responds with its number."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes]] = []

    async def __call__(self, reader, writer) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            line, *lines = head.decode("latin-1").split("\r\n")
            headers = {}
            for item in filter(None, lines):
                name, colon, value = item.partition(":")
                assert colon, head
                assert name.lower() not in headers or name.lower() not in _FRAMING, head
                headers[name.lower()] = value.strip()
            assert not (headers.keys() >= _FRAMING), head
            body = b""
            if "content-length" in headers:
                body = await reader.readexactly(int(headers["content-length"]))
            elif "transfer-encoding" in headers:
                assert headers["transfer-encoding"] == "chunked", head
                while size := int(await reader.readuntil(b"\r\n"), 16):
                    body += await reader.readexactly(size)
                    assert await reader.readexactly(2) == b"\r\n"
                while await reader.readuntil(b"\r\n") != b"\r\n":
                    pass
            method, target, _ = line.split(" ")
            self.seen.append((method, target, body))
            response = f"{headers.get('x-who', '?')} {len(body)}".encode()
            if method == "HEAD":
                response = b""
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(response), response)
            )
            await writer.drain()


_FRAMING = {"content-length", "transfer-encoding"}


@contextlib.asynccontextmanager
async def nginx(upstream: int):
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed: there is nothing to compare with")
    [port] = free_ports(1)
    directory = Path(tempfile.mkdtemp(prefix="pdfuzz"))
    config = directory / "nginx.conf"
    config.write_text(f"""
worker_processes 1; daemon off; pid {directory}/pid; error_log /dev/null; user root;
events {{ worker_connections 512; }}
http {{ access_log off; client_body_temp_path {directory}/b; proxy_temp_path {directory}/p;
  fastcgi_temp_path {directory}/f; uwsgi_temp_path {directory}/u; scgi_temp_path {directory}/s;
  server {{ listen 127.0.0.1:{port};
    location / {{ proxy_pass http://127.0.0.1:{upstream}; proxy_http_version 1.1;
      proxy_request_buffering off; proxy_ignore_client_abort on;
      proxy_set_header Host $http_host; }} }} }}""")
    process = subprocess.Popen(
        ["nginx", "-c", str(config), "-e", "/dev/null"], stderr=subprocess.DEVNULL
    )

    async def serves() -> bool:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return True
        return False

    try:
        await eventually(serves, seconds=60)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        shutil.rmtree(directory)


async def exchange(port: int, data: bytes, cuts: list[int]) -> bytes:
    """Send bytes in pieces, then half-close; return everything received."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(30):
            at = 0
            for cut in sorted({*cuts, len(data)}):
                writer.write(data[at:cut])
                await writer.drain()
                await asyncio.sleep(0)
                at = cut
            # On an open connection a server may wait for more; after a half-close it must decide.
            await asyncio.sleep(0.03)
            if not writer.transport.is_closing():
                writer.write_eof()
            while piece := await reader.read(65_536):
                received += piece
    writer.close()
    return received


def corpus() -> list[bytes]:
    lines = CORPUS.read_text().splitlines()
    return [
        line.encode().decode("unicode_escape").encode("latin-1")
        for line in lines
        if line and not line.startswith("#")
    ]


def addressed(data: bytes, who: str) -> bytes:
    to = f"Host: localhost\r\nE2b-Sandbox-Id: {who}\r\nE2b-Sandbox-Port: 8000\r\nX-Who: {who}\r\n"
    return data.replace(b"<TO>", to.encode())


def is_odd(target: str) -> bool:
    """Whether nginx refuses a path that the gateway accepts: nginx decodes paths."""
    path = target.partition("?")[0]
    depth = 0
    for part in unquote(path).split("/")[1:]:
        depth += {"": 0, ".": 0, "..": -1}.get(part, 1)
        if depth < 0:
            return True
    return "%00" in path or re.search(r"%(?![0-9A-Fa-f]{2})", path) is not None


PLAIN = addressed(b"GET / HTTP/1.1\r\n<TO>\r\n", "boxone")


def generated(source: random.Random) -> bytes:
    """A few pipelined requests with random framing, sometimes corrupted."""
    data = b""
    for _ in range(source.randint(1, 4)):
        method = source.choice(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
        target = source.choice(
            ["/", "/a?b=c", "/%20", "/x/../y", "//", "/é".encode().decode("latin-1")]
        )
        head = f"{method} {target} HTTP/1.{source.choice('1110')}\r\n".encode("latin-1") + b"<TO>"
        for _ in range(source.randint(0, 3)):
            head += source.choice(
                [b"X-A: 1\r\n", b"x-b:2\r\n", b"X-C: \t v \r\n", b"Connection: keep-alive\r\n",
                 b"Accept: */*\r\n", b"TE: trailers\r\n", b"X-Empty:\r\n"]
            )  # fmt: skip
        body = source.randbytes(source.choice([0, 1, 5, 300, 5000]))
        framing = source.choice(["none", "length", "chunked", "chunked"])
        if framing == "none" or method in ("GET", "HEAD", "DELETE", "OPTIONS"):
            data += head + b"\r\n"
        elif framing == "length":
            data += head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        else:
            data += head + b"Transfer-Encoding: chunked\r\n\r\n"
            while body:
                size = source.randint(1, 900)
                piece, body = body[:size], body[size:]
                extension = source.choice([b"", b"", b";a=b", b';a="b"'])
                data += b"%x%b\r\n%b\r\n" % (len(piece), extension, piece)
            data += source.choice([b"0\r\n\r\n", b"0\r\nX-T: 1\r\n\r\n", b"000\r\n\r\n"])
    if source.random() < 0.4:
        for _ in range(source.randint(1, 3)):
            at = source.randrange(len(data))
            damage = source.choice([b"", b"\r", b"\n", b" ", b":", b"\x00", b"0", b"\r\n"])
            data = data[:at] + damage + data[at + source.randint(0, 2) :]
    return data


@pytest.mark.faults
@pytest.mark.timeout(fuzz_budget.seconds(300))
async def test_requests_are_parsed_the_same_behind_the_gateway_and_behind_nginx() -> None:
    source = fuzz_budget.source(20260)
    cases = corpus() + [generated(source) for _ in range(ROUNDS)]
    one, two, reference = Strict(), Strict(), Strict()
    async with rig() as paddock:
        await paddock.upstream(one, "boxone")
        await paddock.upstream(two, "boxtwo")
        behind = await paddock.listen(reference)
        async with nginx(behind) as port:
            passed = 0
            for number, case in enumerate(cases):
                who, upstream, other = ("boxone", one, two) if number % 2 else ("boxtwo", two, one)
                data = addressed(case, who)
                cuts = [source.randrange(len(data)) for _ in range(source.randint(0, 4))]
                for recorder in (one, two, reference):
                    recorder.seen.clear()
                ours, theirs = await asyncio.gather(
                    exchange(paddock.port, data, cuts), exchange(port, data, cuts)
                )
                assert other.seen == [], (data, other.seen)
                assert (b"boxtwo" if who == "boxone" else b"boxone") not in ours.replace(
                    b'"sandboxId"', b""
                )
                # The forwarded requests are a prefix of those that nginx forwarded, and equal to
                # them.
                until = next(
                    (at for at, item in enumerate(upstream.seen) if is_odd(item[1])),
                    len(upstream.seen),
                )
                assert upstream.seen[:until] == reference.seen[:until], (
                    data, upstream.seen, reference.seen, ours, theirs,
                )  # fmt: skip
                passed += len(upstream.seen)
            assert passed > ROUNDS // 2
            # The gateway still works: no leaked request, no crash.
            await eventually(
                lambda: not any(paddock.gateway._inflight.in_flight.values()), seconds=60
            )
            assert await exchange(
                paddock.port, addressed(b"GET / HTTP/1.1\r\n<TO>\r\n", "boxone"), []
            )


@pytest.mark.timeout(fuzz_budget.seconds(180))
async def test_random_bytes_never_crash_the_gateway_or_reach_a_sandbox() -> None:
    source = fuzz_budget.source(7)
    upstream = Strict()
    async with rig() as paddock:
        await paddock.upstream(upstream, "boxone")
        for _ in range(fuzz_budget.examples(10)):
            await asyncio.gather(
                *(
                    exchange(paddock.port, source.randbytes(source.randint(1, 400)), [])
                    for _ in range(20)
                )
            )
        assert upstream.seen == []
        response = await exchange(
            paddock.port, addressed(b"GET / HTTP/1.1\r\n<TO>\r\n", "boxone"), []
        )
        assert response.endswith(b"boxone 0")
