"""The revision of a template: a hash of everything that makes sandboxes differ."""

import hashlib

import msgspec
from msgspec import structs

from paddock.resources.template import SandboxTemplateSpec


def revision(template: SandboxTemplateSpec) -> str:
    """Hash what sandboxes are made of; names, descriptions and visibility do not count."""
    relevant = structs.replace(template, aliases=(), public=True, description="", probe=None)
    data = msgspec.json.encode(msgspec.to_builtins(relevant), order="sorted")
    return hashlib.sha256(data).hexdigest()[:10]
