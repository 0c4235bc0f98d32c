"""Selects a pool for a batch that takes any (`poolRef: "*"`): predicates, then scores. Pure.

A profile names the predicates that must all hold and the scores whose weighted sum decides; ties go
to the smaller name. Profiles are configuration; `default` always exists.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from msgspec import Struct

from paddock.kit.errors import NotFoundError
from paddock.resources import quantity
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.template import Resources, SandboxTemplateSpec
from paddock.resources.meta import Key


class PoolCandidate(Struct, frozen=True, kw_only=True):
    """A pool that may serve a batch."""

    pool: SandboxPool
    template: SandboxTemplateSpec
    allocated: int = 0
    """Allocated, or promised to batches that wait for the pool."""
    total: int = 0

    @property
    def key(self) -> Key:
        """Key of the pool."""
        return self.pool.key


class Score(Struct, frozen=True, kw_only=True):
    """A score and its weight."""

    name: str
    weight: int = 100


class Profile(Struct, frozen=True, kw_only=True, rename="camel"):
    """How a pool is selected."""

    name: str = "default"
    predicates: tuple[str, ...] = ("image", "resource", "nodeselector", "capacity")
    scores: tuple[Score, ...] = (Score(name="LeastAllocated"),)
    label_keys: tuple[str, ...] = ()
    """For `labelselector`: labels whose values must be equal on batch and pool."""


DEFAULT_PROFILES: Mapping[str, Profile] = {
    "default": Profile(),
    "packed": Profile(name="packed", scores=(Score(name="MostAllocated"),)),
}
Predicate = Callable[[BatchSandbox, PoolCandidate, Profile], str]
"""Returns why a pool does not fit; empty if it does."""


def _image(batch: BatchSandbox, candidate: PoolCandidate, _profile: Profile) -> str:
    wanted = batch.spec.template
    if wanted is None or wanted.image in ("", candidate.template.image):
        return ""
    return f"its image is {candidate.template.image!r}, not {wanted.image!r}"


def _resource(batch: BatchSandbox, candidate: PoolCandidate, _profile: Profile) -> str:
    if batch.spec.template is None:
        return ""
    wanted, offered = batch.spec.template.resources, candidate.template.resources
    for name in ("cpu", "memory", "disk"):
        if _less(offered, wanted, name):
            return f"it offers less {name} than requested"
    return ""


def _less(offered: Resources, wanted: Resources, name: str) -> bool:
    requested, offered_value = getattr(wanted, name), getattr(offered, name)
    if requested is None or offered_value is None:
        return False
    read = quantity.millis if name == "cpu" else quantity.whole
    return read(offered_value, name) < read(requested, name)


def _nodeselector(batch: BatchSandbox, candidate: PoolCandidate, _profile: Profile) -> str:
    requested, offered_value = _node_labels(batch.spec.template), _node_labels(candidate.template)
    for key, value in requested.items():
        if offered_value.get(key) != value:
            return f"its sandboxes do not run on nodes with {key}={value}"
    terms = _node_terms(batch.spec.template)
    if terms and not any(all(_matches(item, offered_value) for item in term) for term in terms):
        return "its sandboxes do not run on nodes that the requested affinity allows"
    return ""


def _inside(template: SandboxTemplateSpec | None, *path: str) -> Any:
    """Return a value from a pod template; `None` if it is absent."""
    found: Any = {} if template is None else template.pod_template
    for name in ("spec", *path):
        found = cast("Mapping[str, Any]", found).get(name) if isinstance(found, Mapping) else None
    return found


def _node_labels(template: SandboxTemplateSpec | None) -> Mapping[str, Any]:
    selector = _inside(template, "nodeSelector")
    return cast("Mapping[str, Any]", selector) if isinstance(selector, Mapping) else {}


def _node_terms(template: SandboxTemplateSpec | None) -> list[list[Mapping[str, Any]]]:
    """Return the required node terms: any term must match, with all of its expressions."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = _inside(template, "affinity", "nodeAffinity", required, "nodeSelectorTerms") or ()
    return [list(term.get("matchExpressions") or ()) for term in terms]


def _matches(expression: Mapping[str, Any], labels: Mapping[str, Any]) -> bool:
    value = labels.get(str(expression.get("key")))
    listed = value in (expression.get("values") or ())
    verdicts = {
        "In": listed,
        "NotIn": not listed,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }
    return verdicts.get(str(expression.get("operator")), False)


def _labelselector(batch: BatchSandbox, candidate: PoolCandidate, profile: Profile) -> str:
    own, theirs = batch.metadata.labels, candidate.pool.metadata.labels
    for key in profile.label_keys:
        if own.get(key) != theirs.get(key):
            return f"its label {key} differs"
    return ""


def _capacity(batch: BatchSandbox, candidate: PoolCandidate, _profile: Profile) -> str:
    capacity = candidate.pool.spec.capacity
    if capacity is None:
        return ""
    room = max(capacity.pool_max - candidate.allocated, 0)
    return "" if room >= batch.spec.replicas else f"it has room for {room} more"


PREDICATES: dict[str, Predicate] = {
    "image": _image,
    "resource": _resource,
    "nodeselector": _nodeselector,
    "labelselector": _labelselector,
    "capacity": _capacity,
}


def _least_allocated(candidate: PoolCandidate) -> float:
    return 1 - candidate.allocated / candidate.total if candidate.total else 0.0


def _most_allocated(candidate: PoolCandidate) -> float:
    return candidate.allocated / candidate.total if candidate.total else 0.0


SCORES: dict[str, Callable[[PoolCandidate], float]] = {
    "LeastAllocated": _least_allocated,
    "MostAllocated": _most_allocated,
}


class NoPoolFits(Struct, frozen=True):
    """No pool fits, and why."""

    why: str


def choose(
    batch: BatchSandbox,
    candidates: tuple[PoolCandidate, ...],
    profiles: Mapping[str, Profile] = DEFAULT_PROFILES,
) -> Key | NoPoolFits:
    """Return the pool that fits best, or why none fits."""
    profile = profiles.get(batch.spec.assign_profile)
    if profile is None:
        return NoPoolFits(f"unknown profile {batch.spec.assign_profile!r}")
    fitting: list[PoolCandidate] = []
    reasons: list[str] = []
    for candidate in candidates:
        if reason := _objection(batch, candidate, profile):
            reasons.append(f"{candidate.key.name}: {reason}")
        else:
            fitting.append(candidate)
    if not fitting:
        return NoPoolFits("no pool fits: " + ("; ".join(sorted(reasons)) or "there are no pools"))
    return min(fitting, key=lambda item: (-_sum(item, profile), item.key)).key


def _objection(batch: BatchSandbox, candidate: PoolCandidate, profile: Profile) -> str:
    for name in profile.predicates:
        predicate = PREDICATES.get(name)
        if predicate is None:
            known = ", ".join(sorted(PREDICATES))
            raise NotFoundError(f"unknown predicate {name!r}", hint=f"use one of {known}")
        if reason := predicate(batch, candidate, profile):
            return reason
    return ""


def _sum(candidate: PoolCandidate, profile: Profile) -> float:
    total = 0.0
    for score in profile.scores:
        if score.name not in SCORES:
            known = ", ".join(sorted(SCORES))
            raise NotFoundError(f"unknown score {score.name!r}", hint=f"use one of {known}")
        total += score.weight * SCORES[score.name](candidate)
    return total
