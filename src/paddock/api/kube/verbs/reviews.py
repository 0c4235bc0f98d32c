"""Who am I, and what may I do: `kubectl auth can-i` and `kubectl auth whoami`.

Whoever is let in may do everything (`auth` decides who is), so every question has the same answer
and nothing of it needs to be read. Nothing is stored.
"""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paddock.api.kube.context import KubeContext, json_response
from paddock.api.kube.requests import read_body

_AUTHORIZATION = "authorization.k8s.io/v1"
_AUTHENTICATION = "authentication.k8s.io/v1"

_REVIEWS: Mapping[str, dict[str, Any]] = {
    f"/apis/{api_version}/{kind.lower()}s": {
        "kind": kind,
        "apiVersion": api_version,
        "metadata": {},
        "spec": {},
        "status": status,
    }
    for api_version, kind, status in (
        (
            _AUTHORIZATION,
            "SelfSubjectAccessReview",
            {"allowed": True, "reason": "whoever is let in may do everything"},
        ),
        (
            _AUTHORIZATION,
            "SelfSubjectRulesReview",
            {
                "resourceRules": [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}],
                "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
                "incomplete": False,
            },
        ),
        (
            _AUTHENTICATION,
            "SelfSubjectReview",
            {"userInfo": {"username": "paddock:operator", "groups": ["system:authenticated"]}},
        ),
    )
}
PATHS = tuple(_REVIEWS)
"""Where reviews are asked for."""


async def serve(context: KubeContext, request: Request) -> Response:
    """Answer a review."""
    await read_body(request, context.settings)
    return json_response(_REVIEWS[request.url.path], 201)
