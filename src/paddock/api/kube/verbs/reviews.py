"""Access reviews: `kubectl auth can-i` and `kubectl auth whoami`. Nothing is stored.

The answer is the decision that a call would get (`KubeContext.decide`).
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from paddock.api.audit import event as events
from paddock.api.audit.notes import CALLER
from paddock.api.kube.context import KubeContext, json_response
from paddock.api.kube.requests import read_document
from paddock.api.kube.scheme import SUBRESOURCE_VERBS, VERBS, group_version, subresources
from paddock.api.kube.status import BadRequestError
from paddock.claims.caller import Caller
from paddock.resources.registry import ALL
from paddock.resources.rights import AccessRequest

_AUTHORIZATION = "authorization.k8s.io/v1"
EXTRA_TEAM = "paddock.dev/team"
"""Attribute of a user: the team of the key, which is its namespace."""
_AUTHENTICATION = "authentication.k8s.io/v1"
_OPEN = ("/api", "/apis", "/healthz", "/livez", "/openapi", "/readyz", "/version")
"""Paths that every authenticated caller can read, with what is below them."""
_OPEN_RULE = {
    "verbs": ["get"],
    "nonResourceURLs": [f"{path}{end}" for path in _OPEN for end in ("", "/*")],
}
_GROUPS = {info.cls.PLURAL: group_version(info)[0] for info in ALL}
_NAMESPACED = {info.cls.PLURAL: info.cls.NAMESPACED for info in ALL}


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name) or ""
    if not isinstance(value, str):
        raise BadRequestError(f"{name} of the review must be text")
    return value


def _fields(document: Any, name: str) -> dict[str, Any] | None:
    value = cast("dict[str, Any]", document).get(name) if isinstance(document, dict) else None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def access_status(context: KubeContext, caller: Caller, spec: dict[str, Any]) -> dict[str, Any]:
    """Return whether the caller may do one thing."""
    if caller.is_operator:
        return {"allowed": True, "reason": "operators may do everything"}
    if (asked := _fields(spec, "resourceAttributes")) is not None:
        return _resource_status(context, caller, asked)
    asked = _fields(spec, "nonResourceAttributes")
    if asked is None:
        raise BadRequestError("the review has neither resourceAttributes nor nonResourceAttributes")
    path = _text(asked, "path")
    is_open = any(path == each or path.startswith(f"{each}/") for each in _OPEN)
    if _text(asked, "verb") == "get" and is_open:
        return {"allowed": True}
    return {"allowed": False, "reason": "API keys read discovery and health only"}


def _resource_status(context: KubeContext, caller: Caller, asked: dict[str, Any]) -> dict[str, Any]:
    resource, subresource = _text(asked, "resource"), _text(asked, "subresource")
    if _GROUPS.get(resource, "") != _text(asked, "group"):
        return {"allowed": False, "reason": f"there is no kind {resource[:80]!r} in this group"}
    access = AccessRequest(
        verb=_text(asked, "verb"),
        resource=f"{resource}/{subresource}" if subresource else resource,
        namespace=_text(asked, "namespace") if _NAMESPACED.get(resource) else "",
        name=_text(asked, "name") or None,
    )
    decision = context.decide(caller, access)
    return {"allowed": decision.is_allowed, "reason": decision.reason}


def rules_status(context: KubeContext, caller: Caller, spec: dict[str, Any]) -> dict[str, Any]:
    """Return everything that the caller may do in a namespace."""
    if caller.is_operator:
        rules = [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}]
        paths: dict[str, Any] = {"verbs": ["*"], "nonResourceURLs": ["*"]}
    else:
        rules, paths = _key_rules(context, caller, _text(spec, "namespace")), _OPEN_RULE
    return {"resourceRules": rules, "nonResourceRules": [paths], "incomplete": False}


def _key_rules(context: KubeContext, caller: Caller, namespace: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for info in ALL:
        plural, is_namespaced = info.cls.PLURAL, info.cls.NAMESPACED
        name = None if is_namespaced else caller.team
        every = [
            (plural, VERBS),
            *((f"{plural}/{each}", SUBRESOURCE_VERBS) for each in subresources(info)),
        ]
        for resource, verbs in every:
            allowed = [
                verb
                for verb in verbs
                if context.decide(
                    caller,
                    AccessRequest(
                        verb=verb,
                        resource=resource,
                        namespace=namespace if is_namespaced else "",
                        name=name,
                    ),
                ).is_allowed
            ]
            if allowed:
                rule: dict[str, Any] = {
                    "verbs": allowed,
                    "apiGroups": [group_version(info)[0]],
                    "resources": [resource],
                }
                found.append(rule if name is None else {**rule, "resourceNames": [name]})
    return found


def user_status(_context: KubeContext, caller: Caller, _spec: dict[str, Any]) -> dict[str, Any]:
    """Return who the caller is."""
    user = events.user_of(caller, events.OPERATOR)
    shown: dict[str, Any] = {"username": user.username}
    if caller.key_id:
        shown["uid"] = caller.key_id
        shown["extra"] = {EXTRA_TEAM: [caller.team]}
    groups = [group for group in user.groups if group]
    return {"userInfo": {**shown, "groups": [*groups, "system:authenticated"]}}


_Answer = Callable[[KubeContext, Caller, dict[str, Any]], dict[str, Any]]
_REVIEWS: Mapping[str, tuple[str, str, _Answer]] = {
    f"/apis/{api_version}/{kind.lower()}s": (api_version, kind, status)
    for api_version, kind, status in (
        (_AUTHORIZATION, "SelfSubjectAccessReview", access_status),
        (_AUTHORIZATION, "SelfSubjectRulesReview", rules_status),
        (_AUTHENTICATION, "SelfSubjectReview", user_status),
    )
}
PATHS = tuple(_REVIEWS)
"""The paths of reviews."""


async def serve(context: KubeContext, request: Request) -> Response:
    """Serve a review."""
    document = await read_document(request, context.settings)
    api_version, kind, status = _REVIEWS[request.url.path]
    spec = _fields(document, "spec") or {}
    answer = {
        "kind": kind,
        "apiVersion": api_version,
        "metadata": {},
        "spec": spec,
        "status": status(context, request.scope[CALLER], spec),
    }
    return json_response(answer, 201)
