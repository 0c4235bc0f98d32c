"""Requests to one repository of a registry: manifests and blobs, through mirrors.

Redirects are followed by hand: credentials are never sent to another host, and each target is
checked like the registry itself.
"""

import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from urllib.parse import urljoin, urlsplit

import aiohttp
from msgspec import Struct

from paddock.kit.errors import (
    ForbiddenError,
    InvalidError,
    NotFoundError,
    PaddockError,
    RateLimitedError,
    UnavailableError,
    UnsupportedError,
)
from paddock.runtime.local.images.registry.bodies import read_bounded
from paddock.runtime.local.images.registry.challenge import parse_challenges
from paddock.runtime.local.images.registry.guard import PrivateAddressError, refusal
from paddock.runtime.local.images.registry.manifests import MANIFEST_TYPES
from paddock.runtime.local.images.registry.reference import ImageReference
from paddock.runtime.local.images.registry.session import GuardedSession
from paddock.runtime.local.images.registry.settings import RegistrySettings, without_login
from paddock.runtime.local.images.registry.tokens import TokenSource
from paddock.runtime.port import RegistryCredentials

_MAX_REDIRECTS = 5
_MAX_MANIFEST_BYTES = 4 << 20
_REDIRECTS = (301, 302, 303, 307, 308)
_SUCCESSES = (200, 201, 202, 206)
_UPLOAD_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=30, sock_read=600)
"""A registry verifies a large blob before it answers."""


class RequestBody(Struct, frozen=True, kw_only=True):
    """What is sent to a registry."""

    size: int
    media_type: str
    chunks: Callable[[], AsyncIterator[bytes]]
    """Called for each attempt."""


class _Request(Struct, frozen=True, kw_only=True):
    url: str
    method: str = "GET"
    headers: Mapping[str, str] = {}
    body: RequestBody | None = None
    actions: str = "pull"
    """What the token must allow: `pull`, or `pull,push`."""

    @property
    def is_push(self) -> bool:
        return self.actions != "pull"


class ManifestBytes(Struct, frozen=True, kw_only=True):
    """A manifest as the registry sent it; its digest is that of these bytes."""

    data: bytes
    digest: str
    media_type: str


class RegistryClient:
    """Requests for the images of one repository."""

    def __init__(
        self,
        reference: ImageReference,
        settings: RegistrySettings,
        credentials: RegistryCredentials | None = None,
    ) -> None:
        self._reference = reference
        self._settings = settings
        *mirrors, registry = settings.endpoints(reference)
        # A mirror does not get the credentials of the registry.
        logins = [*map(without_login, mirrors), (registry, credentials)]
        self._endpoints = tuple(endpoint for endpoint, _ in logins)
        self._session = GuardedSession(settings)
        self._tokens = {
            endpoint: TokenSource(self._session, settings, login) for endpoint, login in logins
        }

    async def __aenter__(self) -> "RegistryClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def manifest(self, wanted: str) -> ManifestBytes:
        """Return a manifest by tag or digest. A digest is verified."""
        headers = {"Accept": ", ".join(MANIFEST_TYPES)}
        async with self._get(f"manifests/{wanted}", headers) as response:
            data = await read_bounded(response, _MAX_MANIFEST_BYTES)
            media_type = response.headers.get("Content-Type", "").partition(";")[0].strip()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if wanted.startswith("sha256:") and wanted != digest:
            raise InvalidError(
                f"the registry of {self._reference.name} sent a manifest with the digest {digest} "
                f"instead of {wanted}"
            )
        return ManifestBytes(data=data, digest=digest, media_type=media_type)

    @contextlib.asynccontextmanager
    async def blob(self, digest: str, *, start: int = 0) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Open a blob; from `start` on if the server supports it (status 206)."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        async with self._get(f"blobs/{digest}", headers) as response:
            yield response

    @contextlib.asynccontextmanager
    async def push(
        self, method: str, target: str, body: RequestBody | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Open the response to a request that belongs to a push: to the registry, not to a mirror.

        The target is a path below the repository, or the location that a response has named.
        """
        endpoint = self._endpoints[-1]
        url = urljoin(f"{endpoint}/v2/{self._reference.repository}/", target)
        request = _Request(url=url, method=method, body=body, actions="pull,push")
        async with await self._open(endpoint, request) as response:
            yield response

    @contextlib.asynccontextmanager
    async def _get(
        self, path: str, headers: Mapping[str, str]
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Open a response of status 200 or 206, of the first endpoint that has it."""
        problem: PaddockError = UnavailableError(f"{self._reference.name} has no registry")
        for endpoint in self._endpoints:
            url = f"{endpoint}/v2/{self._reference.repository}/{path}"
            try:
                response = await self._open(endpoint, _Request(url=url, headers=headers))
            except (NotFoundError, ForbiddenError, UnavailableError, RateLimitedError) as error:
                # The registry itself is tried last, so its error is the one that is reported.
                problem = error
                continue
            async with response:
                yield response
            return
        raise problem

    async def _open(self, endpoint: str, request: _Request) -> aiohttp.ClientResponse:
        tokens = self._tokens[endpoint]
        scope = f"repository:{self._reference.repository}:{request.actions}"
        authorization = tokens.known(scope)
        for attempt in (1, 2):
            response = await self._follow(endpoint, request, authorization)
            if response.status != 401 or attempt == 2:
                return await self._checked(response, endpoint, request)
            challenges = parse_challenges(response.headers.getall("WWW-Authenticate", []))
            response.close()
            authorization = await tokens.answer(challenges, scope)
            if authorization is None:
                raise self._denied(endpoint, "it requires credentials", request)
        raise AssertionError

    async def _follow(
        self, endpoint: str, request: _Request, authorization: str | None
    ) -> aiohttp.ClientResponse:
        url, origin = request.url, urlsplit(endpoint).netloc
        for _ in range(_MAX_REDIRECTS + 1):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https"):
                raise InvalidError(
                    f"the registry of {self._reference.name} redirects to {url[:200]!r}"
                )
            if parts.scheme == "http" and not (
                self._settings.may_be_plain(parts.netloc) or self._is_endpoint(url)
            ):
                raise ForbiddenError(
                    f"the registry of {self._reference.name} redirects to {parts.netloc}, without "
                    "TLS"
                )
            sent = dict(request.headers)
            if authorization is not None and parts.netloc == origin:
                sent["Authorization"] = authorization
            response = await self._send(url, request, sent)
            if response.status not in _REDIRECTS:
                return response
            location = response.headers.get("Location", "")
            response.close()
            if request.method not in ("GET", "HEAD"):
                raise UnsupportedError(
                    f"the registry of {self._reference.name} redirects a {request.method} to "
                    f"{urlsplit(location).netloc[:200]!r}",
                    hint="push to the registry by the name that it redirects to",
                )
            url = urljoin(url, location)
        raise UnavailableError(f"the registry of {self._reference.name} redirects too often")

    async def _send(
        self, url: str, request: _Request, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        host = urlsplit(url).netloc
        try:
            if (body := request.body) is None:
                return await self._session.request(
                    request.method, url, headers=headers, is_checked=self._is_endpoint(url)
                )
            sizes = {"Content-Length": str(body.size), "Content-Type": body.media_type}
            return await self._session.request(
                request.method,
                url,
                data=body.chunks(),
                headers={**headers, **sizes},
                timeout=_UPLOAD_TIMEOUT,
                is_checked=self._is_endpoint(url),
            )
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, PrivateAddressError):
                raise refusal(error.os_error) from error
            raise UnavailableError(f"{host} cannot be reached: {error.os_error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"{host} cannot be reached: {error or 'timeout'}") from error

    async def _checked(
        self, response: aiohttp.ClientResponse, endpoint: str, request: _Request
    ) -> aiohttp.ClientResponse:
        if response.status in _SUCCESSES:
            return response
        status, retry_after = response.status, response.headers.get("Retry-After", "")
        response.close()
        name, host = self._reference.name, urlsplit(endpoint).netloc
        if status == 404:
            raise NotFoundError(f"image {name!r} not found: {host} does not have it")
        if status in (401, 403):
            raise self._denied(endpoint, f"{host} answers with status {status}", request)
        if status == 429:
            raise RateLimitedError(
                f"{host} limits the rate of requests",
                retry_after_seconds=float(retry_after) if retry_after.isdigit() else 60.0,
                hint="log in to the registry"
                + ("" if request.is_push else ", or set a mirror with registry_mirrors"),
            )
        if request.is_push and status < 500:
            raise InvalidError(f"{host} refuses {request.method} for {name} with status {status}")
        raise UnavailableError(f"{host} answers with status {status} for {name}")

    def _denied(self, endpoint: str, reason: str, request: _Request) -> ForbiddenError:
        if request.is_push:
            return ForbiddenError(
                f"pushing {self._reference.name!r} is denied: {reason}",
                hint="log in with an account that can push to this repository: the setting "
                "registry_config names the file with credentials",
            )
        return ForbiddenError(
            f"access denied to {self._reference.name!r}: {reason}",
            hint="the image does not exist, or the registry needs other credentials",
        )

    def _is_endpoint(self, url: str) -> bool:
        """Whether a URL is one that the operator has configured as a mirror."""
        return any(url.startswith(f"{mirror}/") for mirror in self._endpoints[:-1])
