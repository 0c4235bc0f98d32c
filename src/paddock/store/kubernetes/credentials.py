"""Who we are to the API server, for each request anew.

A credential gives the value of the Authorization header, or nothing where a client certificate
speaks for us. Tokens in files rotate and are read again; programs that hand out tokens (`exec`
in a kubeconfig) are run again when theirs expires or is refused.
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
"""Kubelets rotate service-account tokens well before they end; client libraries look this often."""
EXEC_TIMEOUT_SECONDS = 60.0
_EARLY = timedelta(seconds=30)
"""A token is renewed this long before it expires."""


class Credential(Protocol):
    """Proves who we are."""

    async def header(self) -> str | None:
        """Return the Authorization header's value, if there is one."""
        ...

    def refused(self) -> bool:
        """Handle a refusal of the last value; returns whether the next may differ."""
        ...


class NoCredential:
    """Anonymous, or known by a client certificate."""

    async def header(self) -> str | None:
        """Return none."""
        return None

    def refused(self) -> bool:
        """Nothing will change."""
        return False


class StaticCredential:
    """A token or password that never changes."""

    def __init__(self, value: str) -> None:
        self._value = value

    @classmethod
    def bearer(cls, token: str) -> "StaticCredential":
        """Make one from a bearer token."""
        return cls(f"Bearer {token}")

    @classmethod
    def basic(cls, user: str, password: str) -> "StaticCredential":
        """Make one from a user name and a password, for proxies that want them."""
        return cls("Basic " + base64.b64encode(f"{user}:{password}".encode()).decode())

    async def header(self) -> str | None:
        """Return it."""
        return self._value

    def refused(self) -> bool:
        """Nothing will change."""
        return False


class FileCredential:
    """A bearer token in a file that somebody rotates."""

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self._path = path
        self._clock = clock or system()
        self._value: str | None = None
        self._read_at = 0.0

    async def header(self) -> str | None:
        """Return the token, read again when it is a minute old."""
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

    def refused(self) -> bool:
        """Read the file again next time."""
        had_one, self._value = self._value is not None, None
        return had_one


class _ExecStatus(Struct, frozen=True, rename="camel"):
    token: str = ""
    expiration_timestamp: datetime | None = None


class _ExecCredential(Struct, frozen=True, rename="camel"):
    status: _ExecStatus = _ExecStatus()


_exec_decoder = msgspec.json.Decoder(_ExecCredential)


class ExecCredential:
    """A bearer token that a program hands out."""

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
        """Return the token, running the program when there is none that still holds."""
        async with self._running:  # however many ask, the program runs once
            status = self._status
            if status is None or not self._holds(status):
                self._status = status = await self._run()
            return f"Bearer {status.token}"

    def refused(self) -> bool:
        """Run the program again next time."""
        had_one, self._status = self._status is not None, None
        return had_one

    def _holds(self, status: _ExecStatus) -> bool:
        end = status.expiration_timestamp
        return end is None or self._clock.now() < end - _EARLY

    async def _run(self) -> _ExecStatus:
        question = {
            "apiVersion": self._api_version,
            "kind": "ExecCredential",
            "spec": {"interactive": False},
        }
        environment = os.environ | self._environment
        environment["KUBERNETES_EXEC_INFO"] = msgspec.json.encode(question).decode()
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
                f"cannot run the credential program {name}: {error}",
                hint="install the program that the kubeconfig's `exec` names",
            ) from error
        try:
            async with asyncio.timeout(EXEC_TIMEOUT_SECONDS):
                output, complaint = await process.communicate()
        except TimeoutError as error:
            raise UnauthenticatedError(f"the credential program {name} did not end") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            text = complaint[:256].decode(errors="replace").strip()
            raise UnauthenticatedError(
                f"the credential program {name} failed ({process.returncode}): {text}"
            )
        return self._read(name, output)

    @staticmethod
    def _read(name: str, output: bytes) -> _ExecStatus:
        try:
            status = _exec_decoder.decode(output).status
        except msgspec.DecodeError as error:
            raise UnauthenticatedError(
                f"the credential program {name} did not print an ExecCredential: {error}"
            ) from error
        if not status.token:
            raise UnsupportedError(
                f"the credential program {name} gives no token",
                hint="certificates from programs are not supported; configure a token",
            )
        return status
