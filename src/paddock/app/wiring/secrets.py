"""Secrets of this installation: generated once, kept in a file that only its owner can read."""

import os
import secrets
from pathlib import Path

import msgspec
from msgspec import Struct

from paddock.kit import ids
from paddock.kit.errors import InvalidError
from paddock.settings import Settings


class Secrets(Struct, frozen=True, kw_only=True):
    """Secrets that all processes share and that survive restarts."""

    seed: str
    """The tokens of sandboxes and the signatures of peers are derived from it."""
    token: str
    """Bearer token of the declarative and the internal API."""
    api_key: str
    """The first API key, with the role of an administrator."""


def load_or_create(settings: Settings) -> Secrets:
    """Read the secrets file, or create it; settings take precedence.

    On a cluster settings are the only source: processes on several machines must agree.
    """
    if settings.store == "kubernetes":
        return _from_settings(settings)
    path = settings.state / "secrets.json"
    stored = _read(path) or _create(path)
    return Secrets(
        seed=settings.seed or stored.seed,
        token=settings.token or stored.token,
        api_key=stored.api_key,
    )


def _from_settings(settings: Settings) -> Secrets:
    missing = [name for name in ("seed", "token") if not getattr(settings, name)]
    if missing:
        names = " and ".join(f"PADDOCK_{name.upper()}" for name in missing)
        raise InvalidError(
            f"on a cluster {names} must be set to the same value for every process",
            hint="`paddock kube install` creates a Secret with them",
        )
    return Secrets(seed=settings.seed, token=settings.token, api_key=settings.api_key)


def _read(path: Path) -> Secrets | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidError(
            f"{path} cannot be read: {error.strerror}", hint="run as the user that started Paddock"
        ) from error
    try:
        return msgspec.json.decode(data, type=Secrets)
    except msgspec.DecodeError as error:
        raise InvalidError(
            f"{path} is damaged: {error}", hint="restore it from a backup"
        ) from error


def _create(path: Path) -> Secrets:
    created = Secrets(
        seed=secrets.token_hex(32), token=secrets.token_hex(24), api_key=ids.api_key()
    )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(created))
        file.flush()
        os.fsync(file.fileno())
    try:
        # The link fails if another process was faster; then its secrets are used.
        os.link(temporary, path)
    except FileExistsError:
        return _read(path) or created
    finally:
        temporary.unlink()
    return created
