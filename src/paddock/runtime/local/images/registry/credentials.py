"""Credentials of registries, from a `config.json` of Docker, Podman or another tool.

For a host, the credential helper in `credHelpers` is asked, then the one in `credsStore`, then
`auths` is read. A helper is the program `docker-credential-<name>`. These credentials are the
operator's: pulls of tenants do not use them unless the operator lists the host.
"""

import asyncio
import base64
import binascii
import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct, field

from paddock.kit.errors import InvalidError, UnavailableError
from paddock.runtime.local.images.registry.reference import DOCKER_HUB

_DOCKER_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "docker.io")
_TOKEN_USER = "<token>"  # noqa: S105 # the marker of credential helpers for an identity token
_HELPER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HELPER_SECONDS = 30.0
_NOT_FOUND = "credentials not found"
_MAX_BYTES = 1 << 20


class RegistryCredentials(Struct, frozen=True, kw_only=True):
    """A user and a password, or an identity token that is exchanged for access tokens."""

    username: str = ""
    password: str = ""
    identity_token: str = ""

    def __repr__(self) -> str:
        return "RegistryCredentials(…)"


class _Entry(Struct, frozen=True, kw_only=True):
    auth: str = ""
    username: str = ""
    password: str = ""
    identitytoken: str = ""


class _HelperAnswer(Struct, frozen=True, kw_only=True, rename="pascal"):
    username: str = ""
    secret: str = ""


class DockerConfig(Struct, frozen=True, kw_only=True):
    """The part of a `config.json` that names credentials."""

    auths: Mapping[str, _Entry] = field(default_factory=dict[str, _Entry])
    creds_store: str = field(default="", name="credsStore")
    cred_helpers: Mapping[str, str] = field(default_factory=dict[str, str], name="credHelpers")

    def __repr__(self) -> str:
        return "DockerConfig(…)"


_config_decoder = msgspec.json.Decoder(DockerConfig)
_answer_decoder = msgspec.json.Decoder(_HelperAnswer)


def read_config(path: Path) -> DockerConfig:
    """Read a `config.json`; a missing file has no credentials."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return DockerConfig()
    except OSError as error:
        raise InvalidError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return _config_decoder.decode(data or b"{}")
    except msgspec.DecodeError as error:
        raise InvalidError(
            f"{path} is not a valid config.json: {error}", hint="see `docker login`"
        ) from error


async def credentials_of(config: DockerConfig, host: str) -> RegistryCredentials | None:
    """Return the credentials of a registry, or None."""
    keys = _DOCKER_HUB_KEYS if host == DOCKER_HUB else (host, f"https://{host}", f"http://{host}")
    for key in keys:
        if (helper := config.cred_helpers.get(key)) is not None:
            return await _ask_helper(helper, key)
    if config.creds_store:
        for key in keys:
            if (found := await _ask_helper(config.creds_store, key)) is not None:
                return found
    for key, entry in config.auths.items():
        if key in keys or _host_of(key) == host:
            return _decoded(entry, key)
    return None


def _host_of(key: str) -> str:
    """Return the host of a key such as `https://registry.example/v2/`."""
    return key.partition("://")[2].partition("/")[0] if "://" in key else key.partition("/")[0]


def _decoded(entry: _Entry, key: str) -> RegistryCredentials | None:
    if entry.identitytoken:
        return RegistryCredentials(identity_token=entry.identitytoken)
    if not entry.auth:
        if not entry.username:
            return None
        return RegistryCredentials(username=entry.username, password=entry.password)
    try:
        username, colon, password = (
            base64.b64decode(entry.auth, validate=True).decode().partition(":")
        )
    except (binascii.Error, UnicodeDecodeError) as error:
        raise InvalidError(f"the credentials of {key} in config.json are damaged") from error
    if not colon:
        raise InvalidError(f"the credentials of {key} in config.json have no password")
    return RegistryCredentials(username=username, password=password.rstrip("\0"))


async def _ask_helper(name: str, key: str) -> RegistryCredentials | None:
    """Run a credential helper. Its output is never logged."""
    if not _HELPER_NAME.fullmatch(name):
        raise InvalidError(f"{name!r} in config.json is not the name of a credential helper")
    program = f"docker-credential-{name}"
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            "get",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ,
        )
    except FileNotFoundError as error:
        raise UnavailableError(
            f"the credential helper {program} is not installed",
            hint=f"{key} in config.json needs it",
        ) from error
    try:
        async with asyncio.timeout(_HELPER_SECONDS):
            output, _ = await process.communicate(key.encode())
    except TimeoutError as error:
        raise UnavailableError(f"{program} did not answer in {_HELPER_SECONDS:.0f} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode or len(output) > _MAX_BYTES:
        if _NOT_FOUND in output[:1000].decode(errors="replace").lower():
            return None
        raise UnavailableError(
            f"{program} failed for {key} with status {process.returncode}",
            hint=f"run: echo {key} | {program} get",
        )
    try:
        answer = _answer_decoder.decode(output)
    except msgspec.DecodeError as error:
        raise UnavailableError(f"{program} printed no credentials for {key}") from error
    if answer.username == _TOKEN_USER:
        return RegistryCredentials(identity_token=answer.secret)
    return RegistryCredentials(username=answer.username, password=answer.secret)
