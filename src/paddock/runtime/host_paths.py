"""Directories of the machine that sandboxes may mount (`hostPath`).

Only directories below those that the operator lists can be mounted. What a sandbox creates there
belongs to an id range of its own on the machine, never to root: a set-uid program that it leaves
there gives nobody more rights than that range has.
"""

import posixpath

from paddock.kit.errors import FieldProblem, InvalidError

SHARED_IDS = 0x3FFF0000
"""The owner on the machine of files that root in a sandbox creates; that of `user` is 1000 higher.
All sandboxes share this range, so that they can share files. The same constant is in `launcher.c`.
"""
_ROOTS = ("/", "/bin", "/boot", "/dev", "/etc", "/lib", "/proc", "/root", "/run", "/sbin", "/sys",
          "/usr", "/var", "/home")  # fmt: skip


def parse(setting: str) -> tuple[str, ...]:
    """Return the directories of the setting `host_paths`; `InvalidError` names a bad one."""
    found = tuple(part.strip() for part in setting.split(",") if part.strip())
    for path in found:
        if not path.startswith("/") or posixpath.normpath(path) != path.rstrip("/"):
            fault = f"{path!r} is not a normalized absolute path"
        elif path.rstrip("/") in _ROOTS or path == "/":
            fault = f"{path!r} is a directory of the system"
        else:
            continue
        problem = FieldProblem("host_paths", fault)
        raise InvalidError(
            str(problem), problems=[problem], hint="list directories with data, such as /srv/data"
        )
    return tuple(path.rstrip("/") for path in found)


def refusal(path: str, allowed: tuple[str, ...]) -> str | None:
    """Return why a directory may not be mounted, or `None`."""
    inside = posixpath.normpath(path) == path.rstrip("/") and any(
        path == one or path.startswith(f"{one}/") for one in allowed
    )
    if inside:
        return None
    below = f"those below {', '.join(allowed)}" if allowed else "none"
    return f"{path!r} may not be mounted: the operator allows {below} (setting host_paths)"
