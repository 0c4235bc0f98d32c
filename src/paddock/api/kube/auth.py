"""Authentication by bearer token: the token of the installation, or an API key.

Tokens are compared in constant time and never logged.
"""

from collections.abc import Callable

from starlette.requests import HTTPConnection

from paddock.api.kube.settings import KubeApiSettings
from paddock.api.login_limits import LoginLimits, limited_address
from paddock.claims.caller import Caller, Role
from paddock.kit import bearer
from paddock.kit.errors import UnauthenticatedError

OPERATOR = Caller("", role=Role.OPERATOR)
"""The caller with the token of the installation."""
FindKey = Callable[[str], Caller]
"""Returns the caller of an API key; raises `UnauthenticatedError`."""


def authenticate(
    connection: HTTPConnection,
    settings: KubeApiSettings,
    logins: LoginLimits,
    find_key: FindKey | None = None,
) -> Caller:
    """Return the caller; wrong tokens are slowed down, and calls of keys are counted."""
    token = bearer.token_of(connection.headers.get("authorization", ""))
    if token is None:
        raise UnauthenticatedError(
            "a bearer token is needed",
            hint="kubectl sends one over https only: `paddock kubeconfig` configures it",
        )
    caller = logins.check(connection, token, lambda: _verify(token, settings, find_key))
    if caller.key_id:
        logins.calls.take(limited_address(connection), caller.key_id)
    return caller


def _verify(token: str, settings: KubeApiSettings, find_key: FindKey | None) -> Caller:
    if bearer.is_known(token, *settings.tokens):
        return OPERATOR
    if find_key is None or not token:
        raise UnauthenticatedError("the bearer token is not known")
    return find_key(token)
