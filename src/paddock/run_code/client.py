"""Runs code in the code interpreter of a sandbox, through the gateway.

    async with aiohttp.ClientSession() as session:
        interpreter = CodeInterpreter(session, url, headers)
        async with aclosing(interpreter.run("print(6 * 7)")) as events:
            async for event in events:
                ...

`headers` name the sandbox, port 49999 and its tokens, as for every port of a sandbox. Closing the
generator closes the connection, whereupon the sandbox interrupts the code.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress

import aiohttp
import msgspec
from msgspec import Struct

from paddock.kit.errors import (
    DeadlineExceededError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    PaddockError,
    RateLimitedError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
)
from paddock.run_code.events import (
    MAX_LENIENT_BYTES,
    BadStreamError,
    CodeEvent,
    EventOmitted,
    RunBroken,
    RunEnded,
    parse,
)
from paddock.run_code.lines import BoundedLines

PORT = 49999
TEMPLATE = "code-interpreter-v1"
MAX_EVENT_BYTES = 32 << 20
"""A larger event is left out and reported as `EventOmitted`."""
SILENCE_SECONDS = 120.0
"""The interpreter sends a line every few seconds; without any, the connection is given up."""
_CONNECT_SECONDS = 30.0
_CLOSE_SECONDS = 1.0
_MAX_MESSAGE_BYTES = 2048
_PORT_CLOSED = "The sandbox is running but port is not open"
_NOT_FOUND = "The sandbox was not found"
"""Messages of the gateway."""
_GONE = "the sandbox ended or was paused while the code ran"
_GONE_HINT = "`paddock sandbox ls` shows whether it is paused; a sandbox not listed has ended"


class _Refusal(Struct, frozen=True):
    message: str = ""


class CodeInterpreter:
    """The code interpreter of one sandbox."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        headers: Mapping[str, str],
        *,
        max_event_bytes: int = MAX_EVENT_BYTES,
        max_lenient_bytes: int = MAX_LENIENT_BYTES,
        max_stream_bytes: int | None = None,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._session = session
        self._url = url
        self._headers = headers
        self._max_event_bytes = max_event_bytes
        self._max_lenient_bytes = max_lenient_bytes
        self._max_stream_bytes = max_stream_bytes
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=silence_seconds
        )

    async def run(
        self,
        code: str,
        *,
        language: str | None = None,
        context_id: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> AsyncGenerator[CodeEvent | EventOmitted]:
        """Run code; yield its events until `RunEnded` or `RunBroken`.

        Variables are kept between runs of the same context, which is the default context of the
        language if none is given. Raises `UnsupportedError` if nothing listens on the port,
        `UnavailableError` if the sandbox ends meanwhile, `DeadlineExceededError` after
        `timeout_seconds`, and `TooLargeError` after the greatest length of a stream.
        """
        body = {"code": code, "context_id": context_id, "language": language, "env_vars": env}
        loop = asyncio.get_running_loop()
        deadline = None if timeout_seconds is None else loop.time() + timeout_seconds
        lines = BoundedLines(self._max_event_bytes)
        response = await self._post(body, deadline, timeout_seconds)
        received = 0
        try:
            while data := await self._read(response, deadline, timeout_seconds):
                received += len(data)
                if self._max_stream_bytes is not None and received > self._max_stream_bytes:
                    raise TooLargeError(
                        f"the code sent more than {self._max_stream_bytes >> 20} MiB"
                    )
                for line in lines.feed(data):
                    event = self._event(line)
                    if event is not None:
                        yield event
                    if isinstance(event, RunEnded | RunBroken):
                        await _until_closed(response)
                        return
        finally:
            response.close()
        raise UnavailableError(_GONE, hint=_GONE_HINT)

    def _event(self, line: bytes | int) -> CodeEvent | EventOmitted | None:
        if isinstance(line, int):
            return EventOmitted(line)
        return parse(line, max_lenient_bytes=self._max_lenient_bytes)

    async def _post(
        self, body: object, deadline: float | None, seconds: float | None
    ) -> aiohttp.ClientResponse:
        headers = {**self._headers, "Content-Type": "application/json"}
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._session.post(
                    f"{self._url}/execute",
                    data=msgspec.json.encode(body),
                    headers=headers,
                    timeout=self._timeout,
                    # Code in the sandbox may answer: it must not choose where requests go.
                    allow_redirects=False,
                )
                if response.status == 200:
                    return response
                async with response:
                    message = await response.content.read(_MAX_MESSAGE_BYTES)
        except TimeoutError as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise self._unreachable(error) from error
            raise self._late(deadline, seconds) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from error
        raise _refusal(response, message)

    async def _read(
        self, response: aiohttp.ClientResponse, deadline: float | None, seconds: float | None
    ) -> bytes:
        """Return the next bytes; none at the end of the stream."""
        try:
            async with asyncio.timeout_at(deadline):
                return await response.content.readany()
        except TimeoutError as error:
            raise self._late(deadline, seconds) from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(_GONE, hint=_GONE_HINT) from error

    def _unreachable(self, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"{self._url} does not answer: {error}",
            hint="`paddock status` shows whether Paddock runs here; `paddock up` starts it",
        )

    def _late(self, deadline: float | None, seconds: float | None) -> PaddockError:
        if deadline is not None and asyncio.get_running_loop().time() >= deadline:
            return DeadlineExceededError(
                f"the code ran for more than {seconds:g} s and was interrupted",
                hint="run it with a longer timeout",
            )
        return UnavailableError(
            f"the sandbox sent nothing for {self._timeout.sock_read:g} s", hint=_GONE_HINT
        )


async def _until_closed(response: aiohttp.ClientResponse) -> None:
    """Let the sandbox close the connection: closing it first would interrupt the next run."""
    with suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await response.content.read(1)


def _refusal(response: aiohttp.ClientResponse, body: bytes) -> PaddockError:
    """Return the error that a response reports."""
    status, message = response.status, _message(body)
    retry = response.headers.get("Retry-After", "")
    seconds = float(retry) if retry.isdecimal() else None
    if message == _PORT_CLOSED and seconds is None:
        return UnsupportedError(
            f"nothing listens on port {PORT} of the sandbox: its template has no code interpreter",
            hint=f"use the template {TEMPLATE}",
        )
    if status == 502 and message == _NOT_FOUND:
        return NotFoundError("the sandbox was not found, or it is paused", hint=_GONE_HINT)
    said = f"{status}: {message}" if message else f"{status} {response.reason}"
    if 300 <= status < 400:
        return BadStreamError(
            f"the code interpreter answered with a redirect ({status}), which is not followed",
            hint="the template may have another server on port 49999",
        )
    if status == 404:
        return NotFoundError(message or said)
    if status == 400:
        return InvalidError(message or said)
    if status in (401, 403):
        return ForbiddenError(f"the sandbox refused the run: {said}")
    if status == 429:
        return RateLimitedError(message or said, retry_after_seconds=seconds or 1.0)
    if status in (502, 503, 504):
        return UnavailableError(message or said, retry_after_seconds=seconds)
    return PaddockError(f"the code could not be run: {said}")


def _message(body: bytes) -> str:
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(body, type=_Refusal).message
    return body.decode(errors="replace").strip()
