"""Routes of E2B that Paddock does not offer: each fails with a hint on what to do instead."""

from starlette.requests import Request
from starlette.responses import Response

from paddock.api.e2b.context import UNSUPPORTED, E2bContext, Handler, route
from paddock.claims.caller import Caller
from paddock.kit.errors import UnsupportedError

_OLD_BUILDS = (
    "builds from a Dockerfile on the client's machine are not supported",
    "update the client: newer ones use POST /v3/templates",
)
_VOLUMES = ("volumes are not supported", "declare volumes in a SandboxTemplate")
_CONTENTS = (
    *(("dir", method) for method in ("GET", "POST")),
    *(("path", method) for method in ("GET", "PATCH", "DELETE")),
    *(("file", method) for method in ("GET", "PUT")),
)
_TOKENS = ("access tokens are not supported", "create an API key: `paddock keys create NAME`")
_METRICS = (
    "metrics of teams are not supported",
    "operators find them at /metrics of the API's port",
)
_NODES = ("nodes are not managed through this API", "`paddock status` and `paddock get sandboxes`")
_SECRETS = ("secrets are not supported", "pass secrets as envVars at create")


def _refuses(what: tuple[str, str]) -> Handler:
    message, hint = what

    async def refuse(_context: E2bContext, _request: Request, _caller: Caller) -> Response:
        """Refuse a route that is not supported."""
        raise UnsupportedError(message, hint=hint)

    return refuse


_METHODS: tuple[tuple[str, str, tuple[str, str]], ...] = (
    ("/templates", "POST", _OLD_BUILDS),
    ("/volumes", "GET", _VOLUMES),
    ("/volumes", "POST", _VOLUMES),
    ("/volumes/{id}", "GET", _VOLUMES),
    ("/volumes/{id}", "DELETE", _VOLUMES),
    ("/secrets", "GET", _SECRETS),
    ("/secrets", "POST", _SECRETS),
    ("/secrets/{id}", "GET", _SECRETS),
    ("/secrets/{id}", "DELETE", _SECRETS),
    *((f"/volumecontent/{{id}}/{part}", method, _VOLUMES) for part, method in _CONTENTS),
    ("/access-tokens", "POST", _TOKENS),
    ("/access-tokens/{id}", "DELETE", _TOKENS),
    ("/teams/{id}/metrics", "GET", _METRICS),
    ("/teams/{id}/metrics/max", "GET", _METRICS),
    ("/nodes", "GET", _NODES),
    ("/nodes/{id}", "GET", _NODES),
    ("/nodes/{id}", "POST", _NODES),
    ("/admin/{rest:path}", "POST", _NODES),
)

ROUTES = tuple(route(path, method, _refuses(what), UNSUPPORTED) for path, method, what in _METHODS)
"""Must precede the template routes, whose ids may contain slashes."""
