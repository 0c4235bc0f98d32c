"""Credentials of registries, from a `config.json` of Docker, Podman or another tool.

For a host, the credential helper in `credHelpers` is asked, then the one in `credsStore`, then
`auths` is read. A helper is the program `docker-credential-<name>`. These credentials are the
operator's: pulls for teams do not use them.
"""

import asyncio
import os
import re
from pathlib import Path

import msgspec
from msgspec import Struct

from paddock.kit.errors import InvalidError, UnavailableError
from paddock.runtime.docker_config import (
    DockerConfig,
    decode_config,
    keys_of,
    stored_credentials,
)
from paddock.runtime.port import RegistryCredentials

_TOKEN_USER = "<token>"  # noqa: S105 # the marker of credential helpers for an identity token
_HELPER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HELPER_SECONDS = 30.0
_NOT_FOUND = "credentials not found"
_MAX_BYTES = 1 << 20


class _HelperAnswer(Struct, frozen=True, kw_only=True, rename="pascal"):
    username: str = ""
    secret: str = ""


_answer_decoder = msgspec.json.Decoder(_HelperAnswer)


def read_config(path: Path) -> DockerConfig:
    """Read a `config.json`; a missing file has no credentials."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return DockerConfig()
    except OSError as error:
        raise InvalidError(f"{path} cannot be read: {error.strerror}") from error
    return decode_config(data, str(path))


async def operator_credentials(path: Path | None, host: str) -> RegistryCredentials | None:
    """Return the credentials of a registry in the operator's `config.json`, or None."""
    if path is None:
        return None
    return await credentials_of(await asyncio.to_thread(read_config, path), host)


async def credentials_of(config: DockerConfig, host: str) -> RegistryCredentials | None:
    """Return the credentials of a registry, or None."""
    keys = keys_of(host)
    for key in keys:
        if (helper := config.cred_helpers.get(key)) is not None:
            return await _ask_helper(helper, key, host)
    if config.creds_store:
        for key in keys:
            if (found := await _ask_helper(config.creds_store, key, host)) is not None:
                return found
    return stored_credentials(config, host)


async def _ask_helper(name: str, key: str, host: str) -> RegistryCredentials | None:
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
        return RegistryCredentials(host=host, identity_token=answer.secret)
    return RegistryCredentials(host=host, username=answer.username, password=answer.secret)
