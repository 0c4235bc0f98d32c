"""What API keys may do in the declarative API, and which objects they see. Pure.

The table of `resources/rights.py` decides, within these limits:

- Keys write the kinds whose quota and ceilings are checked where they are written (`key_writes`),
  and sandboxes only by changes: a Sandbox that is created directly counts against no quota.
- Sandboxes and checkpoints of all teams share a namespace. Each team sees its own there, selected
  by owner, and not the events, which name the others'.
- Sandboxes in which templates are built are hidden: they belong to their builds.
- Keys with another scope than `read` are limited to single sandboxes, which no verb of Kubernetes
  expresses: they use E2B's API.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from paddock.claims.caller import Caller
from paddock.resources import codec, rights
from paddock.resources.kinds.template_build import LABEL_BUILD
from paddock.resources.meta import Resource
from paddock.resources.registry import ALL
from paddock.resources.rights import (
    READ_VERBS,
    ROLES,
    SHARED_NAMESPACE,
    AccessDecision,
    AccessRequest,
    Role,
    Scope,
)
from paddock.resources.selectors import FieldTerm, Requirement

VERBS = (*READ_VERBS, "delete", "deletecollection")
"""The verbs of API keys on every kind that their role names."""
_CHANGES = ("update", "patch")
WRITES: Mapping[str, tuple[str, ...]] = {
    "sandboxes": _CHANGES,
    "sandboxclaims": ("create", *_CHANGES),
    "checkpoints": ("create", *_CHANGES),
    "sandboxtemplates": ("create", *_CHANGES),
    "sandboxpools": ("create", *_CHANGES),
    "sandboxpools/scale": _CHANGES,
    "batchsandboxes": ("create", *_CHANGES),
    "batchsandboxes/scale": _CHANGES,
}
"""Further verbs, by resource."""
_REFUSALS = {
    "sandboxes": "no quota counts a Sandbox that is written directly; create a SandboxClaim",
    "sandboxenvs": "an environment creates pools that count against no quota; create a SandboxPool",
}
"""Why keys do not write other kinds."""
HIDDEN = "(hidden)"
"""Replaces the values of environment variables for callers that may only read."""
_OWNERS: Mapping[str, tuple[str, ...]] = {
    "sandboxes": ("spec", "claim", "owner"),
    "checkpoints": ("spec", "owner"),
}
"""Kinds whose objects have owners of several teams in one namespace: the field of the owner."""
_VARIABLES = ("env", "envVars")
_VARIABLE_STEPS = ("ENV", "ARG")
"""Steps of a TemplateBuild whose arguments are names and values in turn."""
_BUILD_CONTEXT = "paddock.dev/template-context"
"""Variables after a layer of a build, as JSON."""
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_PLURALS = frozenset(info.cls.PLURAL for info in ALL)
_ALLOWED = AccessDecision(True)


def decide(caller: Caller, access: AccessRequest, *, has_writes: bool = True) -> AccessDecision:
    """Return whether the caller may do this. The namespace is empty for all namespaces."""
    if caller.is_operator:
        return _ALLOWED
    what = f"this key may not {access.verb} {access.resource}: "
    kind = access.resource.partition("/")[0]
    if kind not in _PLURALS:
        return AccessDecision(False, f"{what}there is no such kind")
    writes = WRITES.get(access.resource, ()) if has_writes else ()
    if access.verb not in (*VERBS, *writes):
        reason = _REFUSALS.get(kind, "API keys do not write it; E2B's API requests sandboxes")
        return AccessDecision(False, f"{what}{reason}")
    if any(scope != Scope.READ for scope in caller.scopes):
        return AccessDecision(False, f"{what}keys with its scopes use E2B's API")
    if caller.role is Role.OPERATOR:
        # The scope `read` of an operator: what readers see, of every team.
        is_allowed = (access.resource, access.verb) in ROLES[Role.READER]
        return _ALLOWED if is_allowed else AccessDecision(False, f"{what}its scope is read")
    if kind == "events" and access.namespace == SHARED_NAMESPACE:
        return AccessDecision(
            False, f"{what}namespace {SHARED_NAMESPACE!r} has events of every team"
        )
    return rights.decide(caller, _of_own_team(caller, access, kind))


def _of_own_team(caller: Caller, access: AccessRequest, kind: str) -> AccessRequest:
    """Return the request about the objects that are left after the selection by owner."""
    if kind not in _OWNERS or access.namespace not in ("", SHARED_NAMESPACE):
        return access
    return AccessRequest(
        verb=access.verb, resource=access.resource, namespace=caller.team, name=access.name
    )


def owner_term(caller: Caller, plural: str, namespace: str | None) -> FieldTerm | None:
    """Return the term that selects the caller's objects, or None if all in there are."""
    path = _OWNERS.get(plural)
    if path is None or caller.role is Role.OPERATOR:
        return None
    # In the own namespace also what nobody owns: warm sandboxes. Other teams own those that they
    # requested from a public template there.
    is_own = namespace == caller.team != SHARED_NAMESPACE
    return FieldTerm(path, caller.team, or_absent=is_own)


def label_term(caller: Caller, plural: str) -> Requirement | None:
    """Return the term that leaves out the sandboxes in which templates are built, or None."""
    if plural != "sandboxes" or caller.role is Role.OPERATOR:
        return None
    return Requirement(LABEL_BUILD, None, negated=True)


def hides_variables(caller: Caller) -> bool:
    """Whether the caller sees no values of environment variables: they often are secrets, and
    E2B's API does not return them."""
    return caller.role is Role.READER or bool(caller.scopes)


def without_variables(obj: Resource) -> Resource:
    """Return an object with the values of its environment variables hidden."""
    plain = _hidden(codec.to_builtins(obj))
    annotations = plain.get("metadata", {}).get("annotations", {})
    for name in (_LAST_APPLIED, _BUILD_CONTEXT):
        if name in annotations:
            annotations[name] = HIDDEN
    return codec.from_builtins(type(obj), plain)


def is_about_variables(term: FieldTerm) -> bool:
    """Whether a selector would show by its result what is hidden."""
    return "annotations" in term.path or any(part in _VARIABLES for part in term.path)


def _hidden(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value)
        if key in _VARIABLES:
            return dict.fromkeys(items, HIDDEN)
        if items.get("type") in _VARIABLE_STEPS and "args" in items:
            return {**items, "args": _hidden_arguments(items["args"])}
        return {name: _hidden(item, name) for name, item in items.items()}
    if isinstance(value, list | tuple):
        items_ = cast("list[Any]", value)
        if key in _VARIABLES:
            return [_hidden_value(item) for item in items_]
        return [_hidden(item) for item in items_]
    return value


def _hidden_arguments(args: Sequence[str]) -> list[str]:
    """Return the arguments of a step with its values hidden, or all if they are no pairs."""
    is_paired = len(args) % 2 == 0
    return [arg if is_paired and not at % 2 else HIDDEN for at, arg in enumerate(args)]


def _hidden_value(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    variable = cast("dict[str, Any]", item)
    return {**variable, "value": HIDDEN} if "value" in variable else variable
