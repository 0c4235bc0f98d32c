"""Credentials for the API server.

A credential returns the value of the Authorization header, or `None` if a client certificate is
used. Token files are read again, as they rotate; exec plugins of a kubeconfig run again when their
token expires or is rejected.
"""

import asyncio
import base64
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from paddock.kit.clock import Clock, system
from paddock.kit.errors import UnauthenticatedError, UnsupportedError

REREAD_SECONDS = 60.0
"""Interval for reading token files; kubelets rotate tokens well before they expire."""
EXEC_TIMEOUT_SECONDS = 60.0
_EARLY = timedelta(seconds=30)
"""A token is renewed this long before it expires."""


class Credential(Protocol):
    """Provides the Authorization header."""

    async def header(self) -> str | None:
        """Return the value of the Authorization header, or `None`."""
        ...

    def rejected(self) -> bool:
        """Discard a value that the server rejected; returns whether the next may differ."""
        ...


class NoCredential:
    """Anonymous, or authenticated by a client certificate."""

    async def header(self) -> str | None:
        return None

    def rejected(self) -> bool:
        return False


class StaticCredential:
    """A token or password that never changes."""

    def __init__(self, value: str) -> None:
        self._value = value

    @classmethod
    def bearer(cls, token: str) -> "StaticCredential":
        return cls(f"Bearer {token}")

    @classmethod
    def basic(cls, user: str, password: str) -> "StaticCredential":
        """Create a basic credential, for proxies that require it."""
        return cls("Basic " + base64.b64encode(f"{user}:{password}".encode()).decode())

    async def header(self) -> str | None:
        return self._value

    def rejected(self) -> bool:
        return False


class FileCredential:
    """A bearer token in a file that is rotated."""

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self._path = path
        self._clock = clock or system()
        self._value: str | None = None
        self._read_at = 0.0

    async def header(self) -> str | None:
        """Return the token; the file is read again after `REREAD_SECONDS`."""
        now = self._clock.monotonic()
        if self._value is None or now - self._read_at > REREAD_SECONDS:
            try:
                self._value = f"Bearer {self._path.read_text().strip()}"
            except OSError as error:
                raise UnauthenticatedError(
                    f"cannot read the token file {self._path}: {error}",
                    hint="mount a service-account token, or name another file in the kubeconfig",
                ) from error
            self._read_at = now
        return self._value

    def rejected(self) -> bool:
        had_one, self._value = self._value is not None, None
        return had_one


class _ExecStatus(Struct, frozen=True, rename="camel"):
    token: str = ""
    expiration_timestamp: datetime | None = None


class _ExecCredential(Struct, frozen=True, rename="camel"):
    status: _ExecStatus = _ExecStatus()


_exec_decoder = msgspec.json.Decoder(_ExecCredential)


class ExecCredential:
    """A bearer token from an exec plugin."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        api_version: str,
        environment: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._command = tuple(command)
        self._api_version = api_version
        self._environment = dict(environment or {})
        self._clock = clock or system()
        self._status: _ExecStatus | None = None
        self._running = asyncio.Lock()

    async def header(self) -> str | None:
        """Return the token; the plugin runs if there is none or it has expired."""
        async with self._running:  # concurrent callers share one run
            status = self._status
            if status is None or not self._is_valid(status):
                self._status = status = await self._run()
            return f"Bearer {status.token}"

    def rejected(self) -> bool:
        had_one, self._status = self._status is not None, None
        return had_one

    def _is_valid(self, status: _ExecStatus) -> bool:
        end = status.expiration_timestamp
        return end is None or self._clock.now() < end - _EARLY

    async def _run(self) -> _ExecStatus:
        info = {
            "apiVersion": self._api_version,
            "kind": "ExecCredential",
            "spec": {"interactive": False},
        }
        environment = os.environ | self._environment
        environment["KUBERNETES_EXEC_INFO"] = msgspec.json.encode(info).decode()
        name = self._command[0]
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
            )
        except OSError as error:
            raise UnauthenticatedError(
                f"cannot run the exec plugin {name}: {error}",
                hint="install the command that `exec` in the kubeconfig names",
            ) from error
        try:
            async with asyncio.timeout(EXEC_TIMEOUT_SECONDS):
                output, stderr = await process.communicate()
        except TimeoutError as error:
            raise UnauthenticatedError(
                f"the exec plugin {name} did not exit within {EXEC_TIMEOUT_SECONDS:g} s"
            ) from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            text = stderr[:256].decode(errors="replace").strip()
            raise UnauthenticatedError(
                f"the exec plugin {name} failed ({process.returncode}): {text}"
            )
        return self._read(name, output)

    @staticmethod
    def _read(name: str, output: bytes) -> _ExecStatus:
        try:
            status = _exec_decoder.decode(output).status
        except msgspec.DecodeError as error:
            raise UnauthenticatedError(
                f"the exec plugin {name} did not print an ExecCredential: {error}"
            ) from error
        if not status.token:
            raise UnsupportedError(
                f"the exec plugin {name} returned no token",
                hint="client certificates from exec plugins are not supported; use a token",
            )
        return status
