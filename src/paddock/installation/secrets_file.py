"""The file of an installation's secrets: created once, changed under a lock, replaced whole.

Only its owner can read it. A process that is killed leaves the old file or the new one.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

from paddock.installation.secrets import Secrets, generated
from paddock.kit import private_files
from paddock.kit.errors import AlreadyExistsError, InvalidError, NotFoundError


def read(path: Path) -> Secrets | None:
    """Return the secrets; None if the file does not exist."""
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


def create(path: Path) -> Secrets:
    """Create the file; if another process was faster, return what that one wrote."""
    created = generated()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not private_files.create(path, _encoded(created)):
        return read(path) or created
    return created


def update(path: Path, change: Callable[[Secrets], Secrets]) -> Secrets:
    """Change the secrets and return them; concurrent changes wait for each other."""
    with _locked(path):
        current = existing(path)
        changed = change(current)
        if changed != current:
            private_files.replace(path, _encoded(changed))
        return changed


def back_up(path: Path, copy: Path) -> None:
    """Copy the keyring to a new file that only its owner can read."""
    current = existing(path)
    if not private_files.create(copy, _encoded(current)):
        raise AlreadyExistsError(f"{copy} exists", hint="choose another file, or delete it")


def restore(path: Path, copy: Path, *, force: bool = False) -> bool:
    """Replace the keyring by a copy; return False if it is the same.

    Without `force`, a keyring with other secrets stays: what it encrypted could not be read again.
    """
    wanted = read(copy)
    if wanted is None:
        raise NotFoundError(f"{copy} does not exist")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(path):
        current = read(path)
        if current == wanted:
            return False
        if current is not None and not force:
            raise AlreadyExistsError(
                f"{path} has other secrets than {copy}",
                hint="back it up first; --force replaces it, and a store that it encrypted is lost",
            )
        private_files.replace(path, _encoded(wanted))
    return True


def existing(path: Path) -> Secrets:
    """Return the secrets; `InvalidError` if the file does not exist."""
    current = read(path)
    if current is None:
        raise InvalidError(
            f"{path} does not exist", hint="`paddock up` creates it at the first start"
        )
    return current


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    # A file of its own: the one with the secrets is replaced, and its lock with it.
    lock = path.with_name(f"{path.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, private_files.MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _encoded(secrets: Secrets) -> bytes:
    return msgspec.json.format(msgspec.json.encode(secrets), indent=1)
