"""The version of an image that sandboxes of a template start from. Pure.

The first sandbox resolves the tag, and its digest is recorded in the status of the template (of the
pool, if that has a template of its own). Later sandboxes start from that version, so that a tag
that was moved does not change a running pool.
"""

from typing import TypeVar

from msgspec import structs

from paddock.resources.kinds.pool import SandboxPoolStatus
from paddock.resources.kinds.template import (
    ImagePullPolicy,
    SandboxTemplateSpec,
    SandboxTemplateStatus,
)

_S = TypeVar("_S", SandboxTemplateStatus, SandboxPoolStatus)


def pinned(
    spec: SandboxTemplateSpec, status: SandboxTemplateStatus | SandboxPoolStatus
) -> SandboxTemplateSpec:
    """Return the template for a new sandbox: with the recorded version of its image."""
    follows_tag = spec.image_pull_policy is ImagePullPolicy.ALWAYS
    if follows_tag or spec.image_digest or not status.image_digest or status.image != spec.image:
        return spec
    return structs.replace(spec, image_digest=status.image_digest)


def with_digest(spec: SandboxTemplateSpec, status: _S, image: str, digest: str) -> _S:
    """Return the status with the version that a sandbox has started from.

    It is unchanged if it has a version of this image already, unless the template follows the tag.
    """
    if image != spec.image or spec.image_digest or not digest:
        return status
    follows_tag = spec.image_pull_policy is ImagePullPolicy.ALWAYS
    if status.image == image and status.image_digest and not follows_tag:
        return status
    return structs.replace(status, image=image, image_digest=digest)
