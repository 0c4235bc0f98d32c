"""Entering a sandbox for good: namespaces, identity, capabilities, and what Python must unlearn.

Once the mount namespace is joined every path leads into the sandbox. Nothing may be looked up by
path on our own behalf any more: a module, a shared library, a time zone or a source line read
there would be the sandbox's, in a process outside of it. `seal_interpreter` makes Python forget
how; `preload` fetches before what the C library would fetch late.
"""

import contextlib
import ctypes
import linecache
import os
import resource
import sys
from collections.abc import Mapping

CLONE_NEWUSER, CLONE_NEWNS, CLONE_NEWNET = 0x10000000, 0x00020000, 0x40000000
_NAMESPACES = (("userns", CLONE_NEWUSER), ("mntns", CLONE_NEWNS), ("netns", CLONE_NEWNET))
_PR_SET_DUMPABLE, _PR_SET_NAME, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 15, 24, 38
_CAPABILITY_VERSION = 0x20080522
# Types of our own: making one in every child costs time and memory.
_CapabilityHead = ctypes.c_uint32 * 2
_CapabilityData = ctypes.c_uint32 * 6
_M_ARENA_MAX = -8
# For the sandbox's files: CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID.
FILE_CAPABILITIES = frozenset({0, 1, 2, 3, 4})
# Forking commands ourselves, where there is no init: KILL, SETGID, SETUID, SYS_RESOURCE.
FORK_CAPABILITIES = frozenset({5, 6, 7, 24})

_libc = ctypes.CDLL(None, use_errno=True)
_kept: list[ctypes.CDLL] = []


def preload() -> None:
    """Load what would else be searched for when it is too late; called once, before forking."""
    os.environ["TZ"] = "UTC0"
    # One heap for all threads: each further one is written to by every fork.
    _libc.mallopt(_M_ARENA_MAX, 1)
    # Looked up here: the first use of a function makes objects that stay.
    for name in ("setns", "prctl", "capset"):
        getattr(_libc, name)
    try:
        _kept.append(ctypes.CDLL("libgcc_s.so.1"))  # pthread_exit asks for it by name
    except OSError:
        return  # a C library that does not use it


def seal_interpreter() -> None:
    """Make every further import fail, and tracebacks do without source lines."""
    sys.path.clear()
    sys.path_hooks.clear()
    sys.path_importer_cache.clear()
    sys.meta_path.clear()
    sys.dont_write_bytecode = True
    linecache.clearcache()

    def no_lines(*_: object, **__: object) -> list[str]:
        return []

    def no_check(*_: object, **__: object) -> None:
        return

    linecache.updatecache = no_lines
    linecache.checkcache = no_check


def enter(namespaces: Mapping[str, int]) -> None:
    """Join the given namespaces (user, mount, network) and become their root."""
    for name, kind in _NAMESPACES:
        if (fd := namespaces.get(name)) is not None:
            _check(_libc.setns(fd, kind), f"joining the sandbox's {name}")
    if "userns" in namespaces:
        # A user namespace made without root forbids it; its groups then mean nothing inside.
        with contextlib.suppress(PermissionError):
            os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    os.chdir("/")


def restrict(keep: frozenset[int]) -> None:
    """Drop every capability not in `keep`, for good; who is not root keeps none."""
    if os.geteuid() != 0:
        keep = frozenset()
    for capability in range(64):
        if capability not in keep and _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # past the last one this kernel knows
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "setting no_new_privs")
    mask = sum(1 << capability for capability in keep)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    head = _CapabilityHead(_CAPABILITY_VERSION, 0)
    data = _CapabilityData(low, low, 0, high, high, 0)
    _check(_libc.capset(head, data), "dropping capabilities")
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, most)
    )  # hundreds of commands, each with pipes


def rename(name: str) -> None:
    """Set what process listings show."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _check(result: int, doing: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")
