"""Access reviews: `kubectl auth can-i` and `kubectl auth whoami`.

An authenticated caller may do everything (`kube.auth`), so every review has the same result and its
body is not parsed. Nothing is stored.
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
            {"allowed": True, "reason": "authenticated callers may do everything"},
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
"""The paths of reviews."""


async def serve(context: KubeContext, request: Request) -> Response:
    """Serve a review."""
    await read_body(request, context.settings)
    return json_response(_REVIEWS[request.url.path], 201)
