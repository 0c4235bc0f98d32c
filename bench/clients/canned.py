"""A server that answers at once with canned bytes: what is left is the client's time.

    canned.py PORT

Answers create, one command (`echo hello`) and kill, looks at nothing but the request line, and does
no work: the time a client takes against it is the client's own and the loopback's.
"""

import asyncio
import sys

import uvloop

_CREATED = (
    b'{"templateID":"base","sandboxID":"canned00000000000000","clientID":"6532622b",'
    b'"envdVersion":"0.6.13","envdAccessToken":null,"trafficAccessToken":null,"domain":null}'
)


def _envelope(flags: int, message: bytes) -> bytes:
    framed = bytes([flags]) + len(message).to_bytes(4, "big") + message
    return b"%x\r\n%s\r\n" % (len(framed), framed)


_ANSWERS = {
    b"POST /v2/sandboxes ": (
        b"HTTP/1.1 201 Created\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
        % (len(_CREATED), _CREATED)
    ),
    b"POST /process.Process/Start ": (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/connect+json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
        + _envelope(0, b'{"event":{"start":{"pid":2}}}')
        + _envelope(0, b'{"event":{"data":{"stdout":"aGVsbG8K"}}}')
        + _envelope(0, b'{"event":{"end":{"exited":true,"status":"exit status 0"}}}')
        + _envelope(2, b"{}")
        + b"0\r\n\r\n"
    ),
    b"DELETE /sandboxes/": b"HTTP/1.1 204 No Content\r\n\r\n",
}


class Canned(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (answer := self._take()) is not None:
            self._transport.write(answer)

    def _take(self) -> bytes | None:
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return None
        lowered = head.lower()
        if b"transfer-encoding: chunked" in lowered:
            _, separator, rest = rest.partition(b"0\r\n\r\n")
            if not separator:
                return None
        elif b"content-length: " in lowered:
            length = int(lowered.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            if len(rest) < length:
                return None
            rest = rest[length:]
        self._buffer = rest
        for start, answer in _ANSWERS.items():
            if head.startswith(start):
                return answer
        raise SystemExit(f"nothing is canned for {head[:80]!r}")


async def main() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Canned, "127.0.0.1", int(sys.argv[1]), backlog=1024)
    print("ready", flush=True)
    await server.serve_forever()


uvloop.run(main())
