"""BatchSandboxes of API keys. Pure."""

from paddock.api.kube.key_writes.request import KeyWrite, end_problems, needed_end_problems
from paddock.api.kube.key_writes.templates import foreign_problems, spec_problems
from paddock.kit.errors import FieldProblem
from paddock.resources.kinds.batch import BatchSandbox

_FROM_POOL = "sandboxes of a pool count when they are addressed: set spec.template instead"


def problems(write: KeyWrite, old: BatchSandbox | None, new: BatchSandbox) -> list[FieldProblem]:
    """Return why a batch is refused. Its quota is checked where it is written."""
    if old is not None and (found := foreign_problems(old)):
        return found
    if not new.metadata.name:
        # What it needs is reserved by its name before it exists.
        return [FieldProblem("metadata.name", "is needed instead of generateName")]
    spec, found = new.spec, list[FieldProblem]()
    if spec.pool_ref:
        found.append(FieldProblem("spec.poolRef", _FROM_POOL))
    if spec.template is not None:
        found += spec_problems("spec.template", spec.template, write.limits)
    if spec.shard_patches:
        found.append(FieldProblem("spec.shardPatches", "API keys do not set it"))
    if spec.owner not in ("", write.caller.team):
        found.append(FieldProblem("spec.owner", f"{spec.owner!r} is another team"))
    known_end = old.spec.expire_time if old is not None else None
    if old is None or known_end != spec.expire_time:
        found += needed_end_problems("spec.expireTime", spec.expire_time, write)
    return found + end_problems("spec.expireTime", known_end, spec.expire_time, write)
