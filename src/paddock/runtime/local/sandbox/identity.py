"""The identity files of a sandbox: /etc/hostname, /etc/hosts and /etc/resolv.conf.

The disk may have been used before: symlinks in it are not followed.
"""

import contextlib
import os
from pathlib import Path


def write_identity(upper: Path, *, hostname: str, ip: str | None, resolv_conf: str | None) -> None:
    """Write the identity files into the upper directory of a disk."""
    files = {
        "hostname": f"{hostname}\n",
        "hosts": _hosts(hostname, ip),
        "resolv.conf": resolv_conf or "# this sandbox has no network\n",
    }
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    root = os.open(upper, flags)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir("etc", dir_fd=root)
            # The node's umask is for its own files; this directory belongs to the sandbox.
            os.chmod("etc", 0o755, dir_fd=root)  # noqa: S103 - every user inside reads it
        try:
            etc = os.open("etc", flags, dir_fd=root)
        except OSError:  # the sandbox replaced its /etc by something else
            return
        try:
            for name, text in files.items():
                _replace(etc, name, text)
        finally:
            os.close(etc)
    finally:
        os.close(root)


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


def _replace(directory: int, name: str, text: str) -> None:
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(name, dir_fd=directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, 0o644, dir_fd=directory)
    except FileExistsError:
        return
    try:
        os.write(fd, text.encode())
        os.fchmod(fd, 0o644)
    finally:
        os.close(fd)
