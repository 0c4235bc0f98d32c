"""The identity files of a sandbox.

Each start writes /etc/hostname, /etc/hosts and /etc/resolv.conf. A new sandbox or clone also gets
a machine id and a generation, which then stay. All are written into the upper directory of a disk
before anything runs. The disk may have been used before: symlinks in it are not followed.
"""

import contextlib
import os
import stat
import uuid
from collections.abc import Sequence
from pathlib import Path

GENERATION = "/run/paddock/generation"
"""File inside whose content is new in every sandbox and clone."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def write_identity(upper: Path, *, hostname: str, ip: str | None, resolv_conf: str | None) -> None:
    """Write the files of the host name and the network."""
    files = {
        "hostname": f"{hostname}\n",
        "hosts": _hosts(hostname, ip),
        "resolv.conf": resolv_conf or "# this sandbox has no network\n",
    }
    root = os.open(upper, _DIRECTORY)
    try:
        etc = _open_directory(root, "etc")
        if etc is None:  # the sandbox replaced its /etc by something else
            return
        try:
            for name, text in files.items():
                _replace(etc, name, text)
        finally:
            os.close(etc)
    finally:
        os.close(root)


def write_new_identity(upper: Path, layers: Sequence[str]) -> str:
    """Write a new machine id and a new generation; return the generation.

    `layers` are the directories below the upper one, highest first.
    """
    machine_id, generation = uuid.uuid4().hex, str(uuid.uuid4())
    root = os.open(upper, _DIRECTORY)
    try:
        for path in ("etc", "var/lib/dbus"):
            _write_machine_id(root, path, machine_id)
        if _is_directory_in(layers, "run"):
            _write_generation(root, generation)
    finally:
        os.close(root)
    return generation


def rewrite_identity(upper: Path, *, hostname: str, ip: str | None) -> None:
    """Change the host name in a disk whose root is mounted and in which nothing has run.

    The files are changed in place, not replaced: overlayfs may have cached them.
    """
    texts = {
        "hostname": f"{hostname}\n",
        "hosts": _hosts(hostname, ip),
    }
    for name, text in texts.items():
        fd = os.open(upper / "etc" / name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            data = text.encode()
            os.write(fd, data)
            # Not truncated first: some file systems then write the file out on close. And
            # truncating without need takes longer than all the rest.
            if os.fstat(fd).st_size > len(data):
                os.ftruncate(fd, len(data))
        finally:
            os.close(fd)


def _hosts(hostname: str, ip: str | None) -> str:
    return (
        "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
        f"{ip or '127.0.1.1'} {hostname}\n"
    )


def _write_machine_id(root: int, path: str, machine_id: str) -> None:
    """Write /etc/machine-id, or the copy of D-Bus if the sandbox has written one."""
    with contextlib.ExitStack() as opened:
        directory = root
        for part in path.split("/"):
            found = _open_directory(directory, part, create=path == "etc")
            if found is None:
                return
            opened.callback(os.close, found)
            directory = found
        if path == "etc" or _is_regular(directory, "machine-id"):
            _overwrite(directory, "machine-id", f"{machine_id}\n")


def _write_generation(root: int, generation: str) -> None:
    with contextlib.ExitStack() as opened:
        directory = root
        for part in ("run", "paddock"):
            if part == "paddock":
                with contextlib.suppress(OSError):  # absent, or a directory as it should be
                    os.unlink(part, dir_fd=directory)
            found = _open_directory(directory, part)
            if found is None:
                return
            opened.callback(os.close, found)
            directory = found
        _overwrite(directory, "generation", f"{generation}\n")


def _is_directory_in(layers: Sequence[str], name: str) -> bool:
    """Whether a directory of this name in the upper directory would hide nothing else."""
    for layer in layers:
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(f"{layer}/{name}").st_mode
            return stat.S_ISDIR(mode) or stat.S_ISCHR(mode)  # the second: removed by this layer
    return True


def _is_regular(directory: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _open_directory(parent: int, name: str, *, create: bool = True) -> int | None:
    """Open a directory, without following a link; `None` if something else is there."""
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=parent)
            # The node's umask is for its own files; this directory belongs to the sandbox.
            os.chmod(name, 0o755, dir_fd=parent)  # noqa: S103 - every user inside reads it
    try:
        return os.open(name, _DIRECTORY, dir_fd=parent)
    except OSError:
        return None


def _overwrite(directory: int, name: str, text: str) -> None:
    """Write a file in place if it is a regular one, else replace it.

    In place its mode stays: a process that has it open is restored only with the same mode and
    size.
    """
    if not _is_regular(directory, name):
        _replace(directory, name, text, mode=0o444)
        return
    try:
        fd = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except PermissionError:  # a node without root, and a read-only file
        _replace(directory, name, text, mode=0o444)
        return
    try:
        os.write(fd, text.encode())
        os.ftruncate(fd, len(text))
    finally:
        os.close(fd)


def _replace(directory: int, name: str, text: str, *, mode: int = 0o644) -> None:
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(name, dir_fd=directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, mode, dir_fd=directory)
    except FileExistsError:
        return
    try:
        os.write(fd, text.encode())
        os.fchmod(fd, mode)
    finally:
        os.close(fd)
