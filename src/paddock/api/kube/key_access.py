"""What API keys may do in the declarative API, and which objects they see. Pure.

The table of `resources/rights.py` decides, within these limits:

- Keys read and delete. Objects are created and changed with the token of the installation, because
  the quota and the ceilings of a key are checked when it requests a sandbox by E2B's API.
- Sandboxes and checkpoints of all teams share a namespace. Each team sees its own there, selected
  by owner, and not the events, which name the others'.
- Keys with another scope than `read` are limited to single sandboxes, which no verb of Kubernetes
  expresses: they use E2B's API.
"""

from collections.abc import Mapping
from typing import Any, cast

from paddock.claims.caller import Caller
from paddock.resources import codec, rights
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
from paddock.resources.selectors import FieldTerm

VERBS = (*READ_VERBS, "delete", "deletecollection")
"""The verbs of API keys."""
HIDDEN = "(hidden)"
"""Replaces the values of environment variables for callers that may only read."""
_OWNERS: Mapping[str, tuple[str, ...]] = {
    "sandboxes": ("spec", "claim", "owner"),
    "checkpoints": ("spec", "owner"),
}
"""Kinds whose objects have owners of several teams in one namespace: the field of the owner."""
_VARIABLES = ("env", "envVars")
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_PLURALS = frozenset(info.cls.PLURAL for info in ALL)
_ALLOWED = AccessDecision(True)


def decide(caller: Caller, access: AccessRequest) -> AccessDecision:
    """Return whether the caller may do this. The namespace is empty for all namespaces."""
    if caller.is_operator:
        return _ALLOWED
    what = f"this key may not {access.verb} {access.resource}: "
    kind = access.resource.partition("/")[0]
    if kind not in _PLURALS:
        return AccessDecision(False, f"{what}there is no such kind")
    if access.verb not in VERBS:
        return AccessDecision(
            False, f"{what}API keys read and delete here; E2B's API requests sandboxes"
        )
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
    if namespace == caller.team != SHARED_NAMESPACE:
        return None
    return FieldTerm(path, caller.team)


def hides_variables(caller: Caller) -> bool:
    """Whether the caller sees no values of environment variables: they often are secrets, and
    E2B's API does not return them."""
    return caller.role is Role.READER or bool(caller.scopes)


def without_variables(obj: Resource) -> Resource:
    """Return an object with the values of its environment variables hidden."""
    plain = _hidden(codec.to_builtins(obj))
    annotations = plain.get("metadata", {}).get("annotations", {})
    if _LAST_APPLIED in annotations:
        annotations[_LAST_APPLIED] = HIDDEN
    return codec.from_builtins(type(obj), plain)


def is_about_variables(term: FieldTerm) -> bool:
    """Whether a selector would show by its result what is hidden."""
    return "annotations" in term.path or any(part in _VARIABLES for part in term.path)


def _hidden(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value)
        if key in _VARIABLES:
            return dict.fromkeys(items, HIDDEN)
        return {name: _hidden(item, name) for name, item in items.items()}
    if isinstance(value, list | tuple):
        items_ = cast("list[Any]", value)
        if key in _VARIABLES:
            return [_hidden_value(item) for item in items_]
        return [_hidden(item) for item in items_]
    return value


def _hidden_value(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    variable = cast("dict[str, Any]", item)
    return {**variable, "value": HIDDEN} if "value" in variable else variable
