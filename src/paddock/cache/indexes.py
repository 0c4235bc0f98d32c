"""The field indexes of every kind, for production and tests.

Values are ids (plain strings) or the `Key` of another object. An index never depends on the time:
callers check time-dependent states with `states` after the lookup.
"""

from collections.abc import Hashable, Mapping
from typing import Any

from paddock.engine.indexes import IndexFunction
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.claim import SandboxClaim
from paddock.resources.kinds.env import SandboxEnv
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import (
    LABEL_BATCH,
    LABEL_CLAIM,
    LABEL_POOL,
    Sandbox,
)
from paddock.resources.kinds.template import SandboxTemplate, TemplateRef
from paddock.resources.kinds.template_build import LABEL_LAYER, TemplateBuild
from paddock.resources.meta import Key, Resource, controller_of

NAME = "name"
"""Every kind but Sandbox: its name, in any namespace."""
OWNER_UID = "ownerUID"
"""Every kind: the uid of its controller."""
USER = "user"
"""Sandbox (claimed only), Checkpoint: the team it belongs to."""
SANDBOX_ID = "sandboxID"
"""Sandbox: its public id; claimed only."""
SANDBOX_POOL = "sandboxPool"
"""Sandbox: the `Key` of its pool; unclaimed only."""
POOL_REF = "poolRef"
"""BatchSandbox: the `Key` of the pool that serves it."""
TEMPLATE_ID = "templateID"
"""SandboxTemplate: its name and aliases. SandboxPool, SandboxEnv, TemplateBuild: the name of their
template."""
RESTORE_FROM = "restoreFrom"
"""SandboxTemplate: the public id of the checkpoint that its sandboxes start from."""
LAYER = "layer"
"""Checkpoint: the `Key` of namespace and layer key, if it stores a layer of a template build."""
OPEN_BUILD = "openBuild"
"""TemplateBuild: its team, until it has ended."""
CHECKPOINT_ID = "checkpointID"
"""Checkpoint: its public id and names."""
BATCH = "batch"
"""Sandbox: the `Key` of the batch it serves."""
CLAIM = "claim"
"""Sandbox: the `Key` of its SandboxClaim."""
SHARD_ID = "shardID"
"""BatchSandbox: the public ids of its shards' sandboxes."""
SANDBOX_NAME = "sandboxName"
"""Checkpoint: the `Key` of the sandbox it is of."""
IDEMPOTENCY_KEY = "idempotencyKey"
"""Sandbox: the owner and the idempotency key of its creation."""

Functions = Mapping[str, IndexFunction[Any]]


def definitions() -> Mapping[type[Resource], Functions]:
    """Return every index of every kind."""
    common: Functions = {NAME: _name, OWNER_UID: _owner_uid}
    return {
        Sandbox: {
            OWNER_UID: _owner_uid,
            SANDBOX_ID: _sandbox_id,
            SANDBOX_POOL: _unclaimed_pool,
            USER: _sandbox_user,
            BATCH: _sandbox_batch,
            CLAIM: _sandbox_claim,
            IDEMPOTENCY_KEY: _sandbox_idempotency_key,
        },
        SandboxTemplate: {
            **common,
            TEMPLATE_ID: _template_ids,
            RESTORE_FROM: _restore_from,
        },
        SandboxPool: {**common, TEMPLATE_ID: _pool_template},
        SandboxClaim: common,
        Checkpoint: {
            **common,
            CHECKPOINT_ID: _checkpoint_ids,
            USER: _checkpoint_user,
            SANDBOX_NAME: _checkpoint_sandbox,
            LAYER: _layer,
        },
        BatchSandbox: {
            **common,
            POOL_REF: _batch_pools,
            SHARD_ID: _shard_ids,
        },
        SandboxEnv: {**common, TEMPLATE_ID: _env_template},
        TemplateBuild: {**common, TEMPLATE_ID: _build_template, OPEN_BUILD: _open_build},
    }


def functions_for(kind: type[Resource]) -> Functions:
    """Return the indexes of one kind; other kinds are indexed by name and owner."""
    return definitions().get(kind, {NAME: _name, OWNER_UID: _owner_uid})


def _name(obj: Resource) -> tuple[Hashable, ...]:
    return (obj.metadata.name,)


def _owner_uid(obj: Resource) -> tuple[Hashable, ...]:
    owner = controller_of(obj)
    return () if owner is None else (owner.uid,)


def _labelled(obj: Resource, label: str) -> tuple[Hashable, ...]:
    name = obj.metadata.labels.get(label)
    return (Key(obj.metadata.namespace, name),) if name else ()


def _sandbox_id(sandbox: Sandbox) -> tuple[Hashable, ...]:
    return () if sandbox.spec.claim is None else (sandbox.spec.claim.sandbox_id,)


def _unclaimed_pool(sandbox: Sandbox) -> tuple[Hashable, ...]:
    return () if sandbox.spec.claim is not None else _labelled(sandbox, LABEL_POOL)


def _sandbox_user(sandbox: Sandbox) -> tuple[Hashable, ...]:
    return () if sandbox.spec.claim is None else (sandbox.spec.claim.owner,)


def _sandbox_batch(sandbox: Sandbox) -> tuple[Hashable, ...]:
    return _labelled(sandbox, LABEL_BATCH)


def _sandbox_claim(sandbox: Sandbox) -> tuple[Hashable, ...]:
    return _labelled(sandbox, LABEL_CLAIM)


def _sandbox_idempotency_key(sandbox: Sandbox) -> tuple[Hashable, ...]:
    claim = sandbox.spec.claim
    if claim is None or not claim.idempotency_key:
        return ()
    return ((claim.owner, claim.idempotency_key),)


def _template_ids(template: SandboxTemplate) -> tuple[Hashable, ...]:
    return tuple(dict.fromkeys((template.metadata.name, *template.spec.aliases)))


def _restore_from(template: SandboxTemplate) -> tuple[Hashable, ...]:
    return (template.spec.restore_from,) if template.spec.restore_from else ()


def _layer(checkpoint: Checkpoint) -> tuple[Hashable, ...]:
    return _labelled(checkpoint, LABEL_LAYER)


def _reference(reference: TemplateRef | None) -> tuple[Hashable, ...]:
    return () if reference is None else (reference.name,)


def _pool_template(pool: SandboxPool) -> tuple[Hashable, ...]:
    return _reference(pool.spec.template_ref)


def _env_template(env: SandboxEnv) -> tuple[Hashable, ...]:
    return _reference(env.spec.template_ref)


def _build_template(build: TemplateBuild) -> tuple[Hashable, ...]:
    return (build.spec.template_name,)


def _open_build(build: TemplateBuild) -> tuple[Hashable, ...]:
    return () if build.has_ended else (build.team,)


def has_checkpoint_id(checkpoint: Checkpoint, checkpoint_id: str) -> bool:
    """Whether this is the public id of a checkpoint, not one of its names, which teams choose."""
    return checkpoint_id in (checkpoint.spec.checkpoint_id, checkpoint.status.checkpoint_id)


def _checkpoint_ids(checkpoint: Checkpoint) -> tuple[Hashable, ...]:
    known = (checkpoint.spec.checkpoint_id, checkpoint.status.checkpoint_id, *checkpoint.spec.names)
    return tuple(dict.fromkeys(item for item in known if item))


def _checkpoint_user(checkpoint: Checkpoint) -> tuple[Hashable, ...]:
    return (checkpoint.spec.owner,) if checkpoint.spec.owner else ()


def _checkpoint_sandbox(checkpoint: Checkpoint) -> tuple[Hashable, ...]:
    return (Key(checkpoint.metadata.namespace, checkpoint.spec.sandbox_name),)


def _batch_pools(batch: BatchSandbox) -> tuple[Hashable, ...]:
    name = batch.status.pool or batch.spec.pool_ref
    if "/" in name:
        # A pool of the shared namespace.
        namespace, _, name = name.partition("/")
        return (Key(namespace, name),)
    return (Key(batch.metadata.namespace, name),) if name else ()


def _shard_ids(batch: BatchSandbox) -> tuple[Hashable, ...]:
    return tuple(item.sandbox_id for item in batch.status.allocations if item.sandbox_id)
