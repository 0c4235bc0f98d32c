"""Run nftables commands, in process through libnftables or else by the `nft` program.

A batch is one transaction. A small batch takes about 0.1 ms in process and a few milliseconds by
the program. `ruleset` writes the commands.
"""

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from paddock.kit.errors import PaddockError, UnsupportedError
from paddock.runtime.local.net.netns import entered

_JSON = 1 << 4
_HINT = "install nftables (Debian and Ubuntu: apt-get install nftables)"


class NftError(PaddockError):
    """The kernel or the parser rejected a batch; nothing was changed."""

    reason = "FirewallRefused"


class Firewall(Protocol):
    """Runs batches of nftables commands in one network namespace."""

    def run(self, commands: Sequence[str]) -> None:
        """Run all commands in one transaction. Raises `NftError`; then nothing was changed."""
        ...

    def query(self, command: str) -> list[dict[str, Any]]:
        """Run a listing command; return its objects."""
        ...

    def close(self) -> None:
        """Free resources; the rules stay."""
        ...


class LibraryFirewall:
    """Libnftables through ctypes; its netlink socket belongs to the given namespace."""

    def __init__(self, library: ctypes.CDLL, netns_fd: int | None = None) -> None:
        self._library = library
        self._lock = threading.Lock()
        library.nft_ctx_new.restype = ctypes.c_void_p
        library.nft_ctx_get_output_buffer.restype = ctypes.c_char_p
        library.nft_ctx_get_error_buffer.restype = ctypes.c_char_p
        with entered(netns_fd):
            context = library.nft_ctx_new(0)
        if not context:
            raise UnsupportedError("libnftables could not be started", hint=_HINT)
        self._context = ctypes.c_void_p(context)
        library.nft_ctx_buffer_output(self._context)
        library.nft_ctx_buffer_error(self._context)

    def run(self, commands: Sequence[str]) -> None:
        if commands:
            self._execute("\n".join(commands), json=False)

    def query(self, command: str) -> list[dict[str, Any]]:
        return _objects(self._execute(command, json=True))

    def close(self) -> None:
        with self._lock:
            if self._context:
                self._library.nft_ctx_free(self._context)
                self._context = ctypes.c_void_p(None)

    def _execute(self, text: str, *, json: bool) -> bytes:
        with self._lock:
            if not self._context:
                raise NftError("the firewall connection is closed")
            self._library.nft_ctx_output_set_flags(self._context, _JSON if json else 0)
            status = self._library.nft_run_cmd_from_buffer(self._context, text.encode())
            output = self._library.nft_ctx_get_output_buffer(self._context) or b""
            errors = self._library.nft_ctx_get_error_buffer(self._context) or b""
        if status != 0:
            raise _refused(text, errors)
        return output


class ProgramFirewall:
    """The `nft` program; one process per batch."""

    def __init__(self, program: str, netns_fd: int | None = None) -> None:
        self._program = program
        self._netns_fd = None if netns_fd is None else os.dup(netns_fd)

    def run(self, commands: Sequence[str]) -> None:
        if commands:
            self._execute("\n".join(commands), ["-f", "-"])

    def query(self, command: str) -> list[dict[str, Any]]:
        return _objects(self._execute("", ["-j", command]))  # From a file it must be JSON.

    def close(self) -> None:
        if self._netns_fd is not None:
            os.close(self._netns_fd)
            self._netns_fd = None

    def _execute(self, text: str, arguments: list[str]) -> bytes:
        with entered(self._netns_fd):  # A child starts in the namespace of the forking thread.
            done = subprocess.run(
                [self._program, *arguments], input=text.encode(), capture_output=True, check=False
            )
        if done.returncode != 0:
            raise _refused(text or arguments[-1], done.stderr)
        return done.stdout


def open_firewall(netns_fd: int | None = None) -> Firewall:
    """Open libnftables, or else the `nft` program."""
    try:
        return LibraryFirewall(ctypes.CDLL("libnftables.so.1"), netns_fd)
    except OSError:
        program = shutil.which("nft") or shutil.which("nft", path="/usr/sbin:/sbin")
    if program is None:
        raise UnsupportedError(
            "neither libnftables.so.1 nor the nft program is installed: egress cannot be filtered",
            hint=_HINT,
        )
    return ProgramFirewall(program, netns_fd)


def _objects(output: bytes) -> list[dict[str, Any]]:
    if not output.strip():
        return []
    return msgspec.json.decode(output, type=dict[str, list[dict[str, Any]]])["nftables"]


def _refused(text: str, errors: bytes) -> NftError:
    message = " ".join(errors.decode(errors="replace").split())
    if "Operation not permitted" in message:
        return NftError(
            f"nftables failed: {message}", hint="run the node as root, or give it CAP_NET_ADMIN"
        )
    return NftError(f"nftables rejected {text[:200]!r}: {message[:600]}")


_library: type[Firewall] = LibraryFirewall
_program: type[Firewall] = ProgramFirewall
