"""Secrets of this installation: made once, kept in a file that only the owner reads."""

import os
import secrets
from pathlib import Path

import msgspec
from msgspec import Struct

from paddock.kit import ids
from paddock.kit.errors import InvalidError
from paddock.settings import Settings


class Secrets(Struct, frozen=True, kw_only=True):
    """What must be the same over every restart and on every process."""

    seed: str
    """Sandboxes' tokens and peers' signatures follow from this."""
    token: str
    """Bearer token of the declarative API."""
    api_key: str
    """The first API key; an administrator's."""


def load_or_create(settings: Settings) -> Secrets:
    """Read the secrets file, or make it; settings win over the file.

    On a cluster several processes on several machines must agree, so settings are the only source.
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
            f"on a cluster {names} must be set, the same for every process",
            hint="`paddock kube install` makes a Secret with them",
        )
    return Secrets(seed=settings.seed, token=settings.token, api_key=settings.api_key)


def _read(path: Path) -> Secrets | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidError(
            f"{path} cannot be read: {error.strerror}", hint="run as the user who started Paddock"
        ) from error
    try:
        return msgspec.json.decode(data, type=Secrets)
    except msgspec.DecodeError as error:
        raise InvalidError(
            f"{path} is damaged: {error}", hint="restore it from a backup"
        ) from error


def _create(path: Path) -> Secrets:
    made = Secrets(seed=secrets.token_hex(32), token=secrets.token_hex(24), api_key=ids.api_key())
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(made))
        file.flush()
        os.fsync(file.fileno())
    try:
        # A link fails where another process was quicker; then theirs counts.
        os.link(temporary, path)
    except FileExistsError:
        return _read(path) or made
    finally:
        temporary.unlink()
    return made
