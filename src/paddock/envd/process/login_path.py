"""Keeps the PATH of the environment in login shells.

SDKs run command lines with `bash -l -c`. In many images /etc/profile sets PATH anew, which would
discard what the image, the template or the request has set. Then envd passes PATH a second time,
in a variable of its own. A file that /etc/profile reads takes PATH from there and removes the
variable. What runs later, such as ~/.profile, can still extend PATH.
"""

import os
import posixpath
from collections.abc import Mapping, Sequence

from paddock.envd.config import DEFAULT_PATH
from paddock.envd.files import texts

VARIABLE = "PADDOCK_PATH"
_SHELLS = ("sh", "bash", "ash", "dash")
_PROFILE = "/etc/profile"
_PARTS = "/etc/profile.d"
_PART = f"{_PARTS}/00-paddock-path.sh"
"""Read first: the other files there may extend PATH."""
_TEXT = f"""\
# Keeps the PATH of the sandbox's environment, which {_PROFILE} has replaced.
if [ -n "${{{VARIABLE}-}}" ]; then
  PATH=${VARIABLE}
  unset {VARIABLE}
fi
"""


def with_standard_directories(path: str) -> str:
    """Return a PATH that also has the standard directories, at its end."""
    known = path.split(":") if path else []
    missing = (one for one in DEFAULT_PATH.split(":") if one not in known)
    return ":".join((*known, *missing))


def path_to_keep(argv: Sequence[str], env: Mapping[str, str]) -> str | None:
    """Return the PATH that a login shell must keep; None if its profile may decide."""
    path = env.get("PATH")
    if not path or path == DEFAULT_PATH or not is_login_shell(argv):
        return None
    return with_standard_directories(path)


def is_login_shell(argv: Sequence[str]) -> bool:
    """Whether a command is a shell that reads /etc/profile."""
    if posixpath.basename(argv[0]) not in _SHELLS:
        return False
    arguments = iter(argv[1:])
    for argument in arguments:
        if argument == "--login":
            return True
        if argument.startswith("--"):
            continue
        if not argument.startswith(("-", "+")):
            return False
        if argument[0] == "-" and "l" in argument:
            return True
        if argument.endswith("o"):  # the name of an option follows
            next(arguments, None)
    return False


def install() -> bool:
    """Make /etc/profile of this sandbox take PATH from the variable; return whether it does.

    Called before each command whose PATH is kept: users may change the files. An image without
    /etc/profile needs nothing. `OSError` if a file cannot be written.
    """
    try:
        profile = texts.read(_PROFILE)
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not (_reads_parts(profile) and _install_part()) and _TEXT not in profile:
        texts.replace(_PROFILE, f"{profile.rstrip()}\n\n{_TEXT}")
    return True


def _install_part() -> bool:
    """Whether our file is among those that /etc/profile reads.

    In a sandbox without root, the directory may be read-only although /etc is not.
    """
    try:
        if not os.path.exists(_PART):
            os.makedirs(os.path.dirname(_PART), 0o755, exist_ok=True)
            texts.replace(_PART, _TEXT, mode=0o644)
    except OSError:
        return False
    return True


def _reads_parts(profile: str) -> bool:
    lines = (line.strip() for line in profile.splitlines())
    return any(_PARTS in line and not line.startswith("#") for line in lines)
