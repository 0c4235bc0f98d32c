"""Credentials in the format of Docker's `config.json`, also in Secrets of Kubernetes. Pure."""

import base64
import binascii
from collections.abc import Mapping

import msgspec
from msgspec import Struct, field

from paddock.kit.errors import InvalidError
from paddock.runtime.port import RegistryCredentials

DOCKER_HUB = "docker.io"
_DOCKER_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", DOCKER_HUB)


class ConfigEntry(Struct, frozen=True, kw_only=True):
    """The credentials of one registry."""

    auth: str = ""
    username: str = ""
    password: str = ""
    identitytoken: str = ""

    def __repr__(self) -> str:
        return "ConfigEntry(…)"


class DockerConfig(Struct, frozen=True, kw_only=True):
    """The part of a `config.json` that names credentials."""

    auths: Mapping[str, ConfigEntry] = field(default_factory=dict[str, ConfigEntry])
    creds_store: str = field(default="", name="credsStore")
    cred_helpers: Mapping[str, str] = field(default_factory=dict[str, str], name="credHelpers")

    def __repr__(self) -> str:
        return "DockerConfig(…)"


_decoder = msgspec.json.Decoder(DockerConfig)


def decode_config(data: bytes, origin: str) -> DockerConfig:
    """Decode a `config.json`. Raises `InvalidError` if it is malformed."""
    try:
        return _decoder.decode(data or b"{}")
    except msgspec.DecodeError as error:
        raise InvalidError(
            f"{origin} is not a valid config.json: {error}", hint="see `docker login`"
        ) from error


def keys_of(host: str) -> tuple[str, ...]:
    """Return the keys by which a `config.json` may have a registry."""
    if host == DOCKER_HUB:
        return _DOCKER_HUB_KEYS
    return (host, f"https://{host}", f"http://{host}")


def stored_credentials(config: DockerConfig, host: str) -> RegistryCredentials | None:
    """Return the credentials of a registry that are in the file itself, or None."""
    keys = keys_of(host)
    for key, entry in config.auths.items():
        if key in keys or _host_of(key) == host:
            return _decoded(entry, key, host)
    return None


def all_credentials(config: DockerConfig) -> tuple[RegistryCredentials, ...]:
    """Return the credentials of all registries that are in the file itself."""
    found = ((_host_of(key), key, entry) for key, entry in config.auths.items())
    decoded = (
        _decoded(entry, key, DOCKER_HUB if key in _DOCKER_HUB_KEYS else host)
        for host, key, entry in found
    )
    return tuple(one for one in decoded if one is not None)


def _host_of(key: str) -> str:
    """Return the host of a key such as `https://registry.example/v2/`."""
    return key.partition("://")[2].partition("/")[0] if "://" in key else key.partition("/")[0]


def _decoded(entry: ConfigEntry, key: str, host: str) -> RegistryCredentials | None:
    if entry.identitytoken:
        return RegistryCredentials(host=host, identity_token=entry.identitytoken)
    if not entry.auth:
        if not entry.username:
            return None
        return RegistryCredentials(host=host, username=entry.username, password=entry.password)
    try:
        username, colon, password = (
            base64.b64decode(entry.auth, validate=True).decode().partition(":")
        )
    except (binascii.Error, UnicodeDecodeError) as error:
        raise InvalidError(f"the credentials of {key} in config.json are damaged") from error
    if not colon:
        raise InvalidError(f"the credentials of {key} in config.json have no password")
    return RegistryCredentials(host=host, username=username, password=password.rstrip("\0"))
