"""Authentication by bearer token. Tokens are compared in constant time and never logged."""

from starlette.requests import HTTPConnection

from paddock.api.kube.settings import KubeApiSettings
from paddock.api.login_limits import LoginLimits
from paddock.kit import bearer
from paddock.kit.errors import UnauthenticatedError


def authenticate(
    connection: HTTPConnection, settings: KubeApiSettings, logins: LoginLimits
) -> None:
    """Raise unless the caller is authenticated; wrong tokens are slowed down."""
    token = bearer.token_of(connection.headers.get("authorization", ""))
    if token is None:
        raise UnauthenticatedError(
            "a bearer token is needed",
            hint="kubectl sends one over https only: `paddock kubeconfig` configures it",
        )
    logins.check(connection, token, lambda: _verify(token, settings))


def _verify(token: str, settings: KubeApiSettings) -> None:
    if not bearer.is_known(token, *settings.tokens):
        raise UnauthenticatedError("the bearer token is not known")
