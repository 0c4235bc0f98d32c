"""Builds the sandboxes of a pool, and the hash of their template (revision)."""

import hashlib

import msgspec
from msgspec import structs

from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import (
    ANNOTATION_AFTER_FAILURES,
    FINALIZER_SANDBOX,
    LABEL_CLAIMED,
    LABEL_POOL,
    LABEL_REVISION,
    LABEL_TEMPLATE,
    Sandbox,
    SandboxSpec,
)
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.meta import ObjectMeta, owner_reference


def revision(template: SandboxTemplateSpec) -> str:
    """Hash a template. Aliases, description, visibility and probe do not count."""
    relevant = structs.replace(template, aliases=(), public=True, description="", probe=None)
    data = msgspec.json.encode(msgspec.to_builtins(relevant), order="sorted")
    return hashlib.sha256(data).hexdigest()[:10]


def child(pool: SandboxPool, template: SandboxTemplateSpec, current: str) -> Sandbox:
    """Return a new sandbox of this pool, with its template inlined."""
    name = pool.metadata.name
    reference = pool.spec.template_ref
    after = pool.status.failures
    annotations = {ANNOTATION_AFTER_FAILURES: str(after)} if after else {}
    return Sandbox(
        metadata=ObjectMeta(
            generate_name=f"{name}-",
            namespace=pool.metadata.namespace,
            labels={
                **pool.spec.labels,
                LABEL_POOL: name,
                LABEL_TEMPLATE: reference.name if reference else name,
                LABEL_REVISION: current,
                LABEL_CLAIMED: "false",
            },
            annotations={**pool.spec.annotations, **annotations},
            finalizers=(FINALIZER_SANDBOX,),
            owner_references=(owner_reference(pool),),
        ),
        spec=SandboxSpec(template=template),
    )
