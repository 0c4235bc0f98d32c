"""Entering a sandbox: namespaces, ids, capabilities, and sealing the interpreter.

Once the mount namespace is joined, every path is a path of the sandbox. envd must not look up
anything by path on its own behalf any more: a module, a shared library, a time zone or a source
line would come from the sandbox, into a process outside of it. `seal_interpreter` disables such
lookups in Python; `preload` loads in advance what the C library would load late.
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
# Created once: creating them in every child costs time and memory.
_CapabilityHead = ctypes.c_uint32 * 2
_CapabilityData = ctypes.c_uint32 * 6
_M_ARENA_MAX = -8
# For the sandbox's files: CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID.
FILE_CAPABILITIES = frozenset({0, 1, 2, 3, 4})
# For an envd that forks commands itself, without init: KILL, SETGID, SETUID, SYS_RESOURCE.
FORK_CAPABILITIES = frozenset({5, 6, 7, 24})

_libc = ctypes.CDLL(None, use_errno=True)
_loaded_libraries: list[ctypes.CDLL] = []


def preload() -> None:
    """Load what would otherwise be loaded after joining; called once, before forking."""
    os.environ["TZ"] = "UTC0"
    # One heap for all threads: every fork writes to each further one.
    _libc.mallopt(_M_ARENA_MAX, 1)
    # Looked up here: the first use of a function creates objects that stay.
    for name in ("setns", "prctl", "capset"):
        getattr(_libc, name)
    try:
        _loaded_libraries.append(ctypes.CDLL("libgcc_s.so.1"))  # pthread_exit loads it by name
    except OSError:
        return  # this C library does not use it


def seal_interpreter() -> None:
    """Disable imports, and source lines in tracebacks."""
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
    """Join the given namespaces (user, mount, network) as root."""
    for name, kind in _NAMESPACES:
        if (fd := namespaces.get(name)) is not None:
            _check(_libc.setns(fd, kind), f"joining the sandbox's {name}")
    if "userns" in namespaces:
        # Not permitted in a user namespace created without root, where groups have no effect.
        with contextlib.suppress(PermissionError):
            os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    os.chdir("/")


def restrict(keep: frozenset[int]) -> None:
    """Drop every capability not in `keep`, permanently; without root drop all."""
    if os.geteuid() != 0:
        keep = frozenset()
    for capability in range(64):
        if capability not in keep and _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # past the last capability of this kernel
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
    """Set the name in process listings."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _check(result: int, doing: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")
