"""Decides whether an API key may write an object, and what is stored. Pure."""

from paddock.api.kube.key_writes import batches, checkpoints, claims, sandboxes, templates
from paddock.api.kube.key_writes.request import (
    Checked,
    KeyWrite,
    with_system_metadata,
)
from paddock.kit.errors import FieldProblem, ForbiddenError
from paddock.resources import codec
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.claim import SandboxClaim
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.meta import Resource

MAX_OBJECT_BYTES = 128 * 1024
"""Size of an object that a key writes."""


def check(write: KeyWrite, old: Resource | None, new: Resource) -> Checked:
    """Return the object to store, and every reason to refuse it."""
    marked = with_system_metadata(write.caller, old, new)
    problems = [*marked.problems, *_problems(write, old, new)]
    if (size := len(codec.encode(new))) > MAX_OBJECT_BYTES:
        problems.append(FieldProblem("", f"{size} bytes; keys write at most {MAX_OBJECT_BYTES}"))
    return Checked(_stored(write, old, marked.object), tuple(problems))


def admitted(write: KeyWrite, old: Resource | None, new: Resource) -> Resource:
    """Return the object to store; `ForbiddenError` names every field that is refused."""
    checked = check(write, old, new)
    if checked.problems:
        name = new.metadata.name or new.metadata.generate_name
        text = "; ".join(str(item) for item in checked.problems[:20])
        raise ForbiddenError(f"this key may not write {new.KIND} {name!r}: {text}")
    return checked.object


def _problems(write: KeyWrite, old: Resource | None, new: Resource) -> list[FieldProblem]:
    match new, old:
        case SandboxClaim(), SandboxClaim() | None:
            return claims.problems(write, old, new)
        case Sandbox(), Sandbox() | None:
            return sandboxes.problems(write, old, new)
        case Checkpoint(), Checkpoint() | None:
            return checkpoints.problems(write, old, new)
        case SandboxTemplate(), SandboxTemplate() | None:
            return templates.template_problems(write, old, new)
        case SandboxPool(), SandboxPool() | None:
            return templates.pool_problems(write, old, new)
        case BatchSandbox(), BatchSandbox() | None:
            return batches.problems(write, old, new)
        case _:
            return [FieldProblem("kind", "API keys do not write this kind")]


def _stored(write: KeyWrite, old: Resource | None, new: Resource) -> Resource:
    match new, old:
        case Sandbox(), Sandbox():
            return sandboxes.stored(write, old, new)
        case Checkpoint(), Checkpoint() | None:
            return checkpoints.stored(write, old, new)
        case _:
            return new
