"""SandboxClaims of API keys. Pure."""

from paddock.api.kube.key_writes.request import (
    KeyWrite,
    end_problems,
    needed_end_problems,
    system_problems,
)
from paddock.kit.errors import FieldProblem
from paddock.resources.kinds.claim import SandboxClaim
from paddock.resources.rights import SHARED_NAMESPACE


def problems(write: KeyWrite, old: SandboxClaim | None, new: SandboxClaim) -> list[FieldProblem]:
    """Return why a claim is refused.

    Its template, size and image are checked where it takes sandboxes, as for requests of E2B's API.
    """
    spec, before = new.spec, old.spec if old is not None else None
    found = system_problems("spec.labels", spec.labels, before.labels if before else None)
    found += system_problems(
        "spec.annotations", spec.annotations, before.annotations if before else None
    )
    known_end = before.shutdown_time if before else None
    if before is None or known_end != spec.shutdown_time:
        found += needed_end_problems("spec.shutdownTime", spec.shutdown_time, write)
    found += end_problems("spec.shutdownTime", known_end, spec.shutdown_time, write)
    is_shared = new.metadata.namespace == SHARED_NAMESPACE
    if is_shared and spec.priority > (before.priority if before else 0):
        found.append(
            FieldProblem("spec.priority", f"environments of {SHARED_NAMESPACE!r} serve every team")
        )
    return found
