"""Builds the audit log from the settings."""

import contextlib
import sys
from collections.abc import Generator
from pathlib import Path

from paddock.api.audit.files import AuditFiles, AuditSink, AuditStream
from paddock.api.audit.log import AuditLog
from paddock.kit.clock import Clock
from paddock.settings import Settings


@contextlib.contextmanager
def opened(settings: Settings, clock: Clock) -> Generator[AuditLog]:
    """Yield the audit log of this process; close it at the end."""
    audit = AuditLog(_sink(settings), clock, is_required=settings.audit_required)
    try:
        yield audit
    finally:
        audit.close()


def _sink(settings: Settings) -> AuditSink | None:
    if settings.audit_log == "off":
        return None
    if settings.audit_log == "stdout":
        return AuditStream(sys.stdout.fileno())
    return AuditFiles(
        Path(settings.audit_directory),
        max_bytes=settings.audit_max_bytes,
        count=settings.audit_files,
    )
