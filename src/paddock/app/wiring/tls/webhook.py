"""Serves the admission webhook of the `api` role over TLS and reloads its certificate."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path

from paddock.adapters.pod_admission import pod_check
from paddock.api.admission_webhook import Check, create_app
from paddock.app.wiring.http_server import AsgiServer, listen
from paddock.kit.errors import InvalidError
from paddock.kit.logs import fields
from paddock.kit.tasks import background
from paddock.runtime.support import KUBERNETES, support_check
from paddock.settings import Settings

log = logging.getLogger(__name__)

RELOAD_SECONDS = 30.0
"""How often the certificate files are read: a renewed certificate needs no restart."""


def checks(settings: Settings) -> list[Check]:
    """Return what the webhook checks beyond the schema."""
    return [support_check(KUBERNETES, cluster=settings.cluster_id), pod_check(settings)]


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncGenerator[None]:
    """Serve the webhook beside the body, if a certificate is set."""
    if not settings.webhook_certificate:
        yield
        return
    files = (Path(settings.webhook_certificate), Path(settings.webhook_key))
    context = _loaded(files)
    server = AsgiServer(
        create_app(checks(settings)),
        listen(settings.api_host, settings.webhook_port),
        lambda: log.info("webhook is serving", extra=fields(port=settings.webhook_port)),
        tls=context,
    )
    async with (
        background(server.run_until_stopped(), name="webhook") as running,
        background(_keep_reloaded(context, files), name="webhook certificate"),
    ):
        try:
            yield
        finally:
            server.should_exit = True
            await running


def _loaded(files: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(*files)
    except (OSError, ssl.SSLError) as error:
        raise InvalidError(
            f"the webhook's certificate {files[0]} or key {files[1]} cannot be used: {error}",
            hint="mount both from the Secret `paddock-webhook`, or unset webhook_certificate",
        ) from error
    return context


async def _keep_reloaded(context: ssl.SSLContext, files: tuple[Path, Path]) -> None:
    """Load the certificate again when its files change; new connections use it."""
    seen = _contents(files)
    while True:
        await asyncio.sleep(RELOAD_SECONDS)
        now = _contents(files)
        if now == seen:
            continue
        try:
            # Test it first: a context with a certificate but not its key cannot serve.
            _loaded(files)
            context.load_cert_chain(*files)
        except (InvalidError, OSError) as error:
            # The files may be half written: keep the old certificate and try again.
            log.warning("webhook certificate not loaded", extra=fields(error=str(error)))
        else:
            log.info("webhook certificate renewed")
            seen = now


def _contents(files: tuple[Path, Path]) -> tuple[bytes, ...]:
    found: list[bytes] = []
    for file in files:
        try:
            found.append(file.read_bytes())
        except OSError:
            found.append(b"")
    return tuple(found)
