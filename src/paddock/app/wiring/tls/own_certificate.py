"""The certificate that an installation issues to itself, for TLS on this machine.

Its authority is created once and kept in the state directory. Clients trust the authority
(`paddock kubeconfig` embeds it), so that the server certificate can be renewed at any time.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncGenerator
from datetime import timedelta
from pathlib import Path
from typing import Any

from paddock.app.wiring.http_server import AsgiServer, listen
from paddock.kit import certificates, private_files
from paddock.kit.certificates import KeyPair
from paddock.kit.clock import Clock
from paddock.kit.errors import InvalidError
from paddock.kit.logs import fields
from paddock.kit.tasks import background
from paddock.settings import TLS_DIRECTORY, Settings

log = logging.getLogger(__name__)

RENEWAL = timedelta(days=30)
"""A certificate that ends within this time is renewed."""
CHECK_SECONDS = 24 * 3600.0


class OwnCertificate:
    """The files of the authority and of the server certificate."""

    def __init__(self, directory: Path, names: tuple[str, ...], clock: Clock) -> None:
        self.authority_file = directory / "ca.crt"
        self.certificate_file = directory / "server.crt"
        self.key_file = directory / "server.key"
        self._authority_key_file = directory / "ca.key"
        self._directory = directory
        self._names = names
        self._clock = clock

    def ensure(self) -> bool:
        """Create or renew what is missing, ends soon or has other names; whether it is new."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _read(self.authority_file, self._authority_key_file)
        if authority is None or self._ends_soon(authority):
            authority = certificates.create_authority("paddock", now=self._clock.now())
            private_files.replace(self._authority_key_file, authority.key)
            private_files.replace(self.authority_file, authority.certificate)
        server = _read(self.certificate_file, self.key_file)
        if (
            server is not None
            and server.is_issued_by(authority)
            and server.names == frozenset(self._names)
            and not self._ends_soon(server)
        ):
            return False
        server = certificates.issue(authority, self._names, now=self._clock.now())
        private_files.replace(self.key_file, server.key)
        private_files.replace(self.certificate_file, server.certificate)
        return True

    def _ends_soon(self, pair: KeyPair) -> bool:
        return pair.expires - self._clock.now() < RENEWAL

    def context(self) -> ssl.SSLContext:
        """Return a context that serves with the certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate_file, self.key_file)
        return context

    async def keep_renewed(self, context: ssl.SSLContext) -> None:
        """Renew the certificate before it ends; new connections use the new one."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                if self.ensure():
                    context.load_cert_chain(self.certificate_file, self.key_file)
                    log.info("own certificate renewed")
            except (OSError, InvalidError) as error:
                log.warning("own certificate not renewed", extra=fields(error=str(error)))


@contextlib.asynccontextmanager
async def serving(app: Any, certificate: OwnCertificate, *, port: int) -> AsyncGenerator[None]:
    """Serve an application over TLS on loopback beside the body."""
    certificate.ensure()
    context = certificate.context()
    listener = listen("127.0.0.1", port)
    server = AsgiServer(app, listener, lambda: None, tls=context)
    async with (
        background(server.run_until_stopped(), name="kubectl") as running,
        background(certificate.keep_renewed(context), name="own certificate"),
    ):
        try:
            yield
        finally:
            server.should_exit = True
            await running


def of_installation(settings: Settings, clock: Clock) -> OwnCertificate:
    """Return the certificate of an installation, valid for the names that it is reached by."""
    names = {"localhost", "127.0.0.1", "::1", socket.gethostname()}
    if settings.tls_host not in ("0.0.0.0", "::"):  # noqa: S104 - compared
        names.add(settings.tls_host)
    if settings.domain:
        names |= {settings.domain, f"*.{settings.domain}"}
    return OwnCertificate(settings.state / TLS_DIRECTORY, tuple(sorted(names)), clock)


def _read(certificate: Path, key: Path) -> KeyPair | None:
    try:
        pair = KeyPair(certificate.read_bytes(), key.read_bytes())
    except FileNotFoundError:
        return None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError:
        # A crash between the two writes leaves a pair that does not match.
        return None
    return pair
