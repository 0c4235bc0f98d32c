"""Authentication by bearer token. Tokens are compared in constant time and never logged."""

from starlette.requests import HTTPConnection

from paddock.api.kube.settings import KubeApiSettings
from paddock.kit import bearer
from paddock.kit.errors import UnauthenticatedError


def authenticate(connection: HTTPConnection, settings: KubeApiSettings) -> None:
    """Raise unless the caller is authenticated."""
    token = bearer.token_of(connection.headers.get("authorization", ""))
    if token is None:
        raise UnauthenticatedError(
            "a bearer token is needed",
            hint="kubectl sends one over https only: `paddock kubeconfig` configures it",
        )
    if not bearer.is_known(token, *settings.tokens):
        raise UnauthenticatedError("the bearer token is not known")
