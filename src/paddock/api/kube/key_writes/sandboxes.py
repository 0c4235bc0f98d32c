"""Sandboxes that API keys pause, resume, and give another end. Pure."""

from msgspec import structs

from paddock.api.kube.key_writes.request import KeyWrite, changed, end_problems, with_changes
from paddock.kit.errors import FieldProblem
from paddock.resources.kinds.sandbox import Sandbox, SandboxSpec
from paddock.resources.transitions import deadlines

WRITABLE = ("paused", "pause_strategy", "pause_time", "shutdown_time")
"""The fields of a sandbox that a key may change."""
_DEADLINES = ("pause_time", "shutdown_time")
_DIRECT = "no quota counts a Sandbox that is written directly: create a SandboxClaim"


def problems(write: KeyWrite, old: Sandbox | None, new: Sandbox) -> list[FieldProblem]:
    """Return why a change of a sandbox is refused."""
    if old is None:
        return [FieldProblem("spec", _DIRECT)]
    claim = old.spec.claim
    if claim is None or claim.owner != write.caller.team:
        return [FieldProblem("spec.claim", "the sandbox is not claimed by the team of this key")]
    spec, before = new.spec, old.spec
    found = changed(before, spec, except_for=WRITABLE, path="spec")
    found += end_problems("spec.pauseTime", before.pause_time, spec.pause_time, write)
    found += end_problems("spec.shutdownTime", before.shutdown_time, spec.shutdown_time, write)
    if _loses_its_end(before, spec):
        found.append(
            FieldProblem("spec.shutdownTime", "a sandbox with a timeout keeps an end: set another")
        )
    return found


def _loses_its_end(before: SandboxSpec, spec: SandboxSpec) -> bool:
    had_one = any(getattr(before, name) is not None for name in _DEADLINES)
    has_one = any(getattr(spec, name) is not None for name in _DEADLINES)
    # A paused sandbox is not paused again: only its shutdown ends its retention.
    if spec.paused and before.paused:
        return before.shutdown_time is not None and spec.shutdown_time is None
    return had_one and not has_one


def stored(write: KeyWrite, old: Sandbox, new: Sandbox) -> Sandbox:
    """Return the sandbox to store: its flag and its deadlines change together, as in E2B's API.

    Deadlines that the key sets in the same write apply instead.
    """
    before = old.spec
    spec = with_changes(before, new.spec, WRITABLE)
    if spec.paused == before.paused:
        return structs.replace(new, spec=spec)
    own = {
        name: getattr(spec, name)
        for name in _DEADLINES
        if getattr(spec, name) != getattr(before, name)
    }
    if spec.paused:
        after = deadlines.paused(structs.replace(spec, paused=False), now=write.now)
        own.pop("pause_time", None)
    else:
        seconds = min(deadlines.wake_seconds(before), write.limits.max_timeout_seconds)
        after = deadlines.resumed(spec, now=write.now, seconds=seconds)
    own = {name: end for name, end in own.items() if end is not None}
    return structs.replace(new, spec=structs.replace(after, **own))


def resumes(old: Sandbox | None, new: Sandbox) -> bool:
    """Whether a write resumes a paused sandbox."""
    return old is not None and old.spec.paused and not new.spec.paused
