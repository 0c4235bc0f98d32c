"""Running commands in a sandbox: Connect's JSON streams, as far as the CLI needs them."""

import base64
import http.client
import os
import struct
from collections.abc import Generator, Mapping
from typing import Any

import msgspec

from paddock.cli.http import Endpoint
from paddock.kit.errors import PaddockError, UnavailableError
from paddock.runtime import envd_api

_INPUT_BYTES = 64 * 1024
_GONE = "the sandbox went away while the command ran"
_LOOK = "`paddock sandbox ls` says whether it is paused; one that is not there was killed, or ended"


class CommandError(PaddockError):
    """The sandbox could not run the command."""


class Shell:
    """Starts commands and talks to them."""

    def __init__(self, endpoint: Endpoint, user: str | None = None) -> None:
        self._endpoint = endpoint
        self._headers: dict[str, str] = dict(envd_api.CONNECT_HEADERS)
        if user:
            basic = base64.b64encode(f"{user}:".encode()).decode()
            self._headers["Authorization"] = f"Basic {basic}"

    def start(
        self,
        command: str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pty: tuple[int, int] | None = None,
        has_stdin: bool = False,
    ) -> Generator[Mapping[str, Any]]:
        """Start a command and give its events as they come: start, data, end."""
        if pty:
            request = envd_api.login_shell(pty, env=env, cwd=cwd)
        else:
            request = envd_api.shell_command(command, env=env, cwd=cwd, has_stdin=has_stdin)
        with self._endpoint.open(
            "POST",
            envd_api.START_PATH,
            envd_api.frame(request),
            headers={**self._headers, **envd_api.STREAM_HEADERS},
            timeout_seconds=None,
        ) as response:
            while (received := _message(response)) is not None:
                flags, message = received
                if flags & envd_api.END_STREAM:
                    if error := message.get("error"):
                        raise CommandError(f"{error.get('code')}: {error.get('message')}")
                    return
                if event := message.get("event"):
                    yield event
        raise UnavailableError(_GONE, hint=_LOOK)

    def feed(self, pid: int, descriptor: int) -> None:
        """Send a command all that comes from a descriptor, then close its standard input."""
        process = {"process": {"pid": pid}}
        while data := os.read(descriptor, _INPUT_BYTES):
            self.call("SendInput", {**process, "input": {"stdin": _text(data)}})
        self.call("CloseStdin", process)

    def end(self, pid: int) -> None:
        """Ask a command to end, and what it started: a signal of envd's is for one process."""
        for _ in self.start(f"kill -TERM -- -{pid}"):
            pass

    def call(self, method: str, request: Any) -> None:
        """Send input, a signal, a size."""
        self._endpoint.call("POST", f"/process.Process/{method}", request, headers=self._headers)


def _message(response: http.client.HTTPResponse) -> tuple[int, Any] | None:
    """Read one message of a stream and its flags; `None` at its end."""
    try:
        head = response.read(envd_api.FRAME_HEAD.size)
        if not head:
            return None
        flags, size = envd_api.FRAME_HEAD.unpack(head)
        return flags, msgspec.json.decode(response.read(size))
    except (ConnectionError, http.client.HTTPException, struct.error, msgspec.DecodeError) as error:
        # Not Paddock: that answered. What runs in a sandbox ends with it.
        raise UnavailableError(_GONE, hint=_LOOK) from error


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def output_of(event: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Give what an event says of standard output (or the terminal) and standard error."""
    data: Mapping[str, str] = event.get("data") or {}
    out = data.get("stdout") or data.get("pty") or ""
    return base64.b64decode(out), base64.b64decode(data.get("stderr") or "")
