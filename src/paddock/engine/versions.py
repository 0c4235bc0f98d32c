"""Comparing resource versions.

Clients of Kubernetes treat versions as opaque; every API server and every store of Paddock's
gives whole numbers from one growing sequence, and never answering from something older than
one's own write needs the order. A store that gives anything else is refused here, loudly.
"""

from paddock.kit.errors import InvalidError
from paddock.resources.meta import Resource


def ordinal(version: str) -> int:
    """Give a version's place in the store's sequence; an empty one comes before all."""
    if not version:
        return 0
    try:
        return int(version)
    except ValueError:
        raise InvalidError(
            f"the store gave the resource version {version!r}, which is no whole number",
            hint="Paddock needs a store whose versions are ordered, as Kubernetes' are",
        ) from None


def version_of(obj: Resource) -> int:
    """Give the place of the object's version in the store's sequence."""
    return ordinal(obj.metadata.resource_version)
