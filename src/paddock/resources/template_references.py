"""References to templates and snapshots: `[team/]name[:tag]`. Pure.

A name has lower case letters, digits, `-`, `_` and `.`. A tag may also be the id of a build.
"""

import hashlib
import re
from typing import NamedTuple
from uuid import UUID

from paddock.resources.schema import formats

DEFAULT_TAG = "default"
"""The tag that a reference without one means."""
_REFERENCE = re.compile(
    r"(?:(?P<space>[a-z0-9_-]+)/)?(?P<name>[a-z0-9_-][a-z0-9_.-]*)(?::(?P<tag>[a-z0-9_.-]+))?"
)
_HASH_DIGITS = 10


class TemplateReference(NamedTuple):
    """A parsed reference."""

    space: str
    """The team, or an empty string."""
    name: str
    tag: str


def parse_reference(text: str) -> TemplateReference | None:
    """Return the parts of a reference; `None` if it is malformed."""
    match = _REFERENCE.fullmatch(text.lower())
    if match is None:
        return None
    return TemplateReference(match["space"] or "", match["name"], match["tag"] or DEFAULT_TAG)


def is_build_id(tag: str) -> bool:
    """Whether a tag has the form of the id of a build."""
    try:
        return str(UUID(tag)) == tag
    except ValueError:
        return False


def object_name(alias: str) -> str:
    """Return the name of the SandboxTemplate object for a new alias.

    It is the alias itself where that is a DNS label. Others get a label with a hash of the alias,
    so that two processes that create the same template choose the same name.
    """
    if formats.dns_label(alias) is None:
        return alias
    digest = hashlib.sha256(alias.encode()).hexdigest()[:_HASH_DIGITS]
    readable = re.sub(r"[^a-z0-9]+", "-", alias)[: formats.MAX_LABEL - _HASH_DIGITS - 1].strip("-")
    return f"{readable}-{digest}" if readable else f"t-{digest}"
