"""Authorization at registries: Basic, or Bearer tokens from the server that a registry names."""

import base64
import time
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Struct

from paddock.kit.errors import ForbiddenError, UnavailableError
from paddock.runtime.local.images.registry.bodies import read_bounded
from paddock.runtime.local.images.registry.challenge import Challenge
from paddock.runtime.local.images.registry.session import GuardedSession
from paddock.runtime.local.images.registry.settings import RegistrySettings
from paddock.runtime.port import RegistryCredentials

_DEFAULT_SECONDS = 60
"""How long a token is valid that has no `expires_in`."""
_EARLY_SECONDS = 10
_MAX_BYTES = 1 << 20
_CLIENT_ID = "paddock"


class _TokenResponse(Struct, frozen=True, kw_only=True):
    token: str = ""
    access_token: str = ""
    expires_in: float | None = None


_decoder = msgspec.json.Decoder(_TokenResponse)


class TokenSource:
    """Authorization headers for one registry and one set of credentials."""

    def __init__(
        self,
        session: GuardedSession,
        settings: RegistrySettings,
        credentials: RegistryCredentials | None,
    ) -> None:
        self._session = session
        self._settings = settings
        self._credentials = credentials
        self._kept: dict[str, tuple[float, str]] = {}

    def known(self, scope: str) -> str | None:
        """Return the header that was accepted for a scope before, unless it has expired."""
        until, header = self._kept.get(scope, (0.0, ""))
        return header if header and time.monotonic() < until else None

    async def answer(self, challenges: tuple[Challenge, ...], scope: str) -> str | None:
        """Return an Authorization header that answers one of the challenges; None: none can be."""
        by_scheme = {challenge.scheme: challenge for challenge in reversed(challenges)}
        if (bearer := by_scheme.get("bearer")) is not None and bearer.realm:
            until, header = await self._bearer(bearer, scope)
        elif "basic" in by_scheme and (header := self._basic()) is not None:
            until = float("inf")
        else:
            return None
        self._kept[scope] = (until, header)
        return header

    def _basic(self) -> str | None:
        if self._credentials is None or not self._credentials.username:
            return None
        pair = f"{self._credentials.username}:{self._credentials.password}"
        return f"Basic {base64.b64encode(pair.encode()).decode()}"

    async def _bearer(self, challenge: Challenge, scope: str) -> tuple[float, str]:
        began = time.monotonic()
        response = await self._request(challenge, scope)
        token = response.token or response.access_token
        if not token or not token.isascii() or not token.isprintable():
            raise UnavailableError(f"{_where(challenge)} issued no token")
        seconds = _DEFAULT_SECONDS if response.expires_in is None else response.expires_in
        return began + max(seconds - _EARLY_SECONDS, 1), f"Bearer {token}"

    async def _request(self, challenge: Challenge, scope: str) -> _TokenResponse:
        url = urlsplit(challenge.realm)
        if url.scheme != "https" and not (
            url.scheme == "http" and self._settings.may_be_plain(url.netloc)
        ):
            raise ForbiddenError(
                f"the registry sends clients to {challenge.realm[:200]!r} for a token, without TLS",
                hint="an operator allows it with the setting registry_plain_hosts",
            )
        query = {"scope": scope, **({"service": challenge.service} if challenge.service else {})}
        identity = self._credentials.identity_token if self._credentials else ""
        try:
            if identity:
                form = {
                    **query,
                    "grant_type": "refresh_token",
                    "refresh_token": identity,
                    "client_id": _CLIENT_ID,
                }
                call = self._session.request("POST", challenge.realm, data=form)
            else:
                basic = self._basic()
                headers = {"Authorization": basic} if basic else {}
                call = self._session.request("GET", challenge.realm, params=query, headers=headers)
            async with await call as response:
                body = await read_bounded(response, _MAX_BYTES)
                code = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"{_where(challenge)} cannot be reached: {error}") from error
        if code in (400, 401, 403):
            raise ForbiddenError(
                f"{_where(challenge)} refuses a token (status {code})",
                hint="check the credentials of the registry",
            )
        if code != 200:
            raise UnavailableError(f"{_where(challenge)} answers with status {code}")
        try:
            return _decoder.decode(body)
        except msgspec.DecodeError as error:
            raise UnavailableError(f"{_where(challenge)} issued no token: {error}") from error


def _where(challenge: Challenge) -> str:
    return f"the token server {urlsplit(challenge.realm).netloc[:200]}"
