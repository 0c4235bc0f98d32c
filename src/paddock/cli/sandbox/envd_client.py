"""Runs commands in a sandbox over Connect's JSON streams."""

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
_GONE = "the sandbox ended or was paused while the command ran"
_HINT = "`paddock sandbox ls` shows whether it is paused; a sandbox not listed has ended"


class CommandError(PaddockError):
    """The sandbox could not run the command."""


class Shell:
    """Starts commands in a sandbox and sends them input."""

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
        """Start a command; yield its events: start, data, end."""
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
        raise UnavailableError(_GONE, hint=_HINT)

    def feed(self, pid: int, descriptor: int) -> None:
        """Send a command everything from a descriptor, then close its standard input."""
        process = {"process": {"pid": pid}}
        while data := os.read(descriptor, _INPUT_BYTES):
            self.call("SendInput", {**process, "input": {"stdin": _text(data)}})
        self.call("CloseStdin", process)

    def terminate(self, pid: int) -> None:
        """Send SIGTERM to the process group of a command: envd signals only one process."""
        for _ in self.start(f"kill -TERM -- -{pid}"):
            pass

    def call(self, method: str, request: Any) -> None:
        """Call a method of envd's process service."""
        self._endpoint.call("POST", f"/process.Process/{method}", request, headers=self._headers)


def _message(response: http.client.HTTPResponse) -> tuple[int, Any] | None:
    """Return the flags and the next message of a stream, or None at its end."""
    try:
        head = response.read(envd_api.FRAME_HEAD.size)
        if not head:
            return None
        flags, size = envd_api.FRAME_HEAD.unpack(head)
        return flags, msgspec.json.decode(response.read(size))
    except (ConnectionError, http.client.HTTPException, struct.error, msgspec.DecodeError) as error:
        # Paddock has answered, so the sandbox is gone.
        raise UnavailableError(_GONE, hint=_HINT) from error


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def output_of(event: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Return the standard output (or terminal output) and the standard error of an event."""
    data: Mapping[str, str] = event.get("data") or {}
    out = data.get("stdout") or data.get("pty") or ""
    return base64.b64decode(out), base64.b64decode(data.get("stderr") or "")
