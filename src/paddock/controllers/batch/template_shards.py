"""Builds the sandboxes of a batch without a pool: its template with each shard's patch. Pure."""

from datetime import datetime

from msgspec import structs

from paddock.claims import cold
from paddock.claims.terms import shard_terms
from paddock.kit import ids
from paddock.resources.kinds.batch import Allocation, BatchSandbox
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.meta import owner_reference, with_meta
from paddock.resources.strategic_merge import merged
from paddock.resources.tokens import TokenSeed


def template_of(batch: BatchSandbox, shard: int) -> SandboxTemplateSpec:
    """Return the template of one shard. `InvalidError` if its patch cannot be merged."""
    template = batch.spec.template or SandboxTemplateSpec()
    patches = batch.spec.shard_patches
    if shard >= len(patches) or not patches[shard]:
        return template
    return merged(template, patches[shard], where=f"spec.shardPatches[{shard}]")


def check(batch: BatchSandbox) -> None:
    """Raise `InvalidError` if a patch of the batch cannot be merged."""
    for shard, patch in enumerate(batch.spec.shard_patches):
        if patch:
            template_of(batch, shard)


def child(batch: BatchSandbox, shard: int, seed: TokenSeed, *, now: datetime) -> Sandbox:
    """Return the sandbox of one shard, claimed from its creation on."""
    allocation = Allocation(shard=shard, sandbox_id=ids.sandbox_id())
    sandbox = cold.new_sandbox(
        shard_terms(batch, allocation, seed, now=now),
        template_of(batch, shard),
        namespace=batch.metadata.namespace,
        template_name=batch.metadata.name,
        now=now,
        name=f"{batch.metadata.name}-{shard}",
    )
    return with_meta(sandbox, owner_references=(owner_reference(batch),))


def allocation_of(shard: int, sandbox: Sandbox) -> Allocation:
    """Return the allocation of a template shard."""
    claim = sandbox.spec.claim
    return Allocation(
        shard=shard,
        sandbox=sandbox.metadata.name,
        uid=sandbox.metadata.uid,
        sandbox_id=claim.sandbox_id if claim else "",
    )


def adopted(batch: BatchSandbox, children: dict[int, Sandbox]) -> BatchSandbox:
    """Return the batch with these sandboxes allocated to its shards."""
    known = {item.shard: item for item in batch.status.allocations}
    for shard, sandbox in children.items():
        known[shard] = allocation_of(shard, sandbox)
    allocations = tuple(known[shard] for shard in sorted(known))
    return structs.replace(batch, status=structs.replace(batch.status, allocations=allocations))
