"""Checkpoints of API keys. Pure."""

from msgspec import structs

from paddock.api.kube.key_writes.request import KeyWrite, changed, with_changes
from paddock.claims.quota.stored import TEMPORARY_SECONDS
from paddock.kit import ids
from paddock.kit.errors import FieldProblem
from paddock.resources.kinds.checkpoint import Checkpoint, CheckpointSpec

WRITABLE = ("ttl_seconds_after_finished",)
"""The fields of an existing checkpoint that a key may change."""
_SET_BY_SERVER = ("sandbox_uid", "sandbox_id", "owner", "key_id", "checkpoint_id")


def problems(write: KeyWrite, old: Checkpoint | None, new: Checkpoint) -> list[FieldProblem]:
    """Return why a checkpoint is refused."""
    ttl = new.spec.ttl_seconds_after_finished
    found: list[FieldProblem] = []
    if ttl is not None and ttl <= TEMPORARY_SECONDS:
        text = f"more than {TEMPORARY_SECONDS}: shorter ones do not count against the quota"
        found.append(FieldProblem("spec.ttlSecondsAfterFinished", text))
    if old is not None:
        if old.spec.owner != write.caller.team:
            found.append(FieldProblem("spec.owner", "the checkpoint belongs to another team"))
        return found + changed(old.spec, new.spec, except_for=WRITABLE, path="spec")
    return found + _new_problems(write, new.spec)


def _new_problems(write: KeyWrite, spec: CheckpointSpec) -> list[FieldProblem]:
    source = write.source
    claim = source.spec.claim if source is not None else None
    found: list[FieldProblem] = []
    if claim is None or claim.owner != write.caller.team:
        text = f"the team has no sandbox {spec.sandbox_name!r} in this namespace"
        found.append(FieldProblem("spec.sandboxName", text))
    wanted = _by_server(write, spec)
    for field in structs.fields(CheckpointSpec):
        given = getattr(spec, field.name)
        if field.name in _SET_BY_SERVER and given not in ("", getattr(wanted, field.name)):
            found.append(FieldProblem(f"spec.{field.encode_name}", "only the system sets it"))
    for at, name in enumerate(spec.names):
        team, _, bare = name.rpartition("/")
        if ids.is_checkpoint_id(bare.partition(":")[0]):
            text = f"{name!r} has the form of an id; choose another name"
            found.append(FieldProblem(f"spec.names[{at}]", text))
        if team not in ("", write.caller.team):
            found.append(FieldProblem(f"spec.names[{at}]", f"team {team!r} is another one"))
    return found


def stored(write: KeyWrite, old: Checkpoint | None, new: Checkpoint) -> Checkpoint:
    """Return the checkpoint to store: the server names its sandbox, owner and key."""
    if old is not None:
        return structs.replace(new, spec=with_changes(old.spec, new.spec, WRITABLE))
    return structs.replace(new, spec=_by_server(write, new.spec))


def _by_server(write: KeyWrite, spec: CheckpointSpec) -> CheckpointSpec:
    source = write.source
    claim = source.spec.claim if source is not None else None
    return structs.replace(
        spec,
        sandbox_uid=source.metadata.uid if source is not None else "",
        sandbox_id=claim.sandbox_id if claim is not None else "",
        owner=write.caller.team,
        key_id=write.caller.key_id,
        checkpoint_id="",
    )
