"""Comparing resource versions.

Kubernetes clients treat versions as opaque. Read-your-writes needs their order, and every API
server and every store of Paddock uses integers of one increasing sequence. Other versions are an
`InvalidError`.
"""

from paddock.kit.errors import InvalidError
from paddock.resources.meta import Resource


def ordinal(version: str) -> int:
    """Return a version as a number; an empty one is 0, before all others."""
    if not version:
        return 0
    try:
        return int(version)
    except ValueError:
        raise InvalidError(
            f"the store returned resource version {version!r}, which is not an integer",
            hint="Paddock needs a store whose versions are ordered, as Kubernetes' are",
        ) from None


def version_of(obj: Resource) -> int:
    """Return the object's version as a number."""
    return ordinal(obj.metadata.resource_version)
