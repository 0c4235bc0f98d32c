"""Exchanges AWS access keys for the user and password of the registries of a region (ECR).

The keys are sent nowhere: a request is signed with them, and goes to AWS only. The password is for
registries of AWS in that region, and valid for twelve hours.
"""

import base64
import binascii
import re

import aiohttp
import msgspec
from msgspec import Struct

from paddock.builds.aws.signature import AwsKeys, signed_headers
from paddock.builds.credentials import RegistryLogin
from paddock.kit.clock import Clock
from paddock.kit.errors import ForbiddenError, InvalidError, UnavailableError

_REGION = re.compile(r"[a-z]{2,3}(-[a-z]{2,20}){1,3}-[0-9]{1,2}")
_REGISTRY = r"[0-9]{12}\.dkr[.-]ecr(-fips)?\.REGION\.(amazonaws\.com(\.cn)?|on\.aws)"
_TARGET = "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken"
_CONTENT_TYPE = "application/x-amz-json-1.1"
_BODY = b"{}"
_SECONDS = 20.0
_MAX_BYTES = 1 << 20
_REASON = re.compile(r"[A-Za-z0-9._#:/-]{1,100}")


class _Authorization(Struct, frozen=True, rename="camel"):
    authorization_token: str


class _Answer(Struct, frozen=True, rename="camel"):
    authorization_data: tuple[_Authorization, ...]


class _Refusal(Struct, frozen=True):
    kind: str = msgspec.field(name="__type", default="")


_answer_decoder = msgspec.json.Decoder(_Answer)
_refusal_decoder = msgspec.json.Decoder(_Refusal)


def check_keys(keys: AwsKeys, image: str) -> None:
    """Raise `InvalidError` for keys that cannot be for the registry of an image."""
    if not keys.access_key_id or not keys.secret_access_key:
        raise InvalidError(
            "fromImageRegistry of the type 'aws' needs awsAccessKeyId and awsSecretAccessKey"
        )
    if not _REGION.fullmatch(keys.region):
        raise InvalidError.at("fromImageRegistry.awsRegion", "is not a region such as eu-west-1")
    host = host_of(image)
    if not re.fullmatch(_REGISTRY.replace("REGION", re.escape(keys.region)), host):
        raise InvalidError.at(
            "fromImageRegistry",
            f"AWS credentials are for registries of the region, not for {host or 'Docker Hub'!r}: "
            f"name the image as 123456789012.dkr.ecr.{keys.region}.amazonaws.com/name:tag",
        )


def host_of(image: str) -> str:
    """Return the host in the name of an image; empty if there is none."""
    host, slash, _ = image.partition("/")
    return host if slash and "." in host else ""


async def log_in(keys: AwsKeys, image: str, clock: Clock, *, endpoint: str = "") -> RegistryLogin:
    """Return the user and password for the registry of an image.

    `ForbiddenError` if AWS refuses the keys, `UnavailableError` if it does not answer. `endpoint`
    replaces the URL of AWS.
    """
    domain = "amazonaws.com.cn" if keys.region.startswith("cn-") else "amazonaws.com"
    host = f"api.ecr.{keys.region}.{domain}"
    plain = {"Host": host, "Content-Type": _CONTENT_TYPE, "X-Amz-Target": _TARGET}
    headers = signed_headers(keys, "ecr", plain, _BODY, clock.now())
    try:
        async with (
            aiohttp.ClientSession(
                trust_env=True, timeout=aiohttp.ClientTimeout(total=_SECONDS)
            ) as session,
            session.post(
                endpoint or f"https://{host}/", data=_BODY, headers=headers, allow_redirects=False
            ) as response,
        ):
            status, body = response.status, await _read(response)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise UnavailableError(f"{host} cannot be reached: {error or 'timeout'}") from error
    if 400 <= status < 500 and status != 429:
        raise ForbiddenError(f"AWS refuses the credentials for {keys.region}: {_reason(body)}")
    if status != 200:
        raise UnavailableError(f"{host} answers with status {status}")
    username, password = _decoded(body, host)
    return RegistryLogin(username=username, password=password, host=host_of(image))


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Return the body, or its beginning if it is far too long."""
    body = b""
    async for chunk in response.content.iter_chunked(_MAX_BYTES):
        body += chunk
        if len(body) >= _MAX_BYTES:
            break
    return body


def _decoded(body: bytes, host: str) -> tuple[str, str]:
    try:
        token = _answer_decoder.decode(body).authorization_data[0].authorization_token
        username, colon, password = base64.b64decode(token, validate=True).decode().partition(":")
    except (msgspec.DecodeError, IndexError, binascii.Error, UnicodeDecodeError) as error:
        raise UnavailableError(f"{host} issued no password for its registries") from error
    if not colon or not password:
        raise UnavailableError(f"{host} issued no password for its registries")
    return username, password


def _reason(body: bytes) -> str:
    """Return the kind of an error of AWS, such as `UnrecognizedClientException`."""
    try:
        kind = _refusal_decoder.decode(body).kind.rpartition("#")[2]
    except msgspec.DecodeError:
        kind = ""
    return kind if _REASON.fullmatch(kind) else "no reason was given"
