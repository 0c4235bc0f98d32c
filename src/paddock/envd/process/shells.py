"""The shell that runs command lines.

SDKs start `/bin/bash -l -c ...`. An image may have bash elsewhere, another shell, or none.
"""

import os
from collections.abc import Callable

BASH = "/bin/bash"
SHELLS = (BASH, "/usr/bin/bash", "/usr/local/bin/bash", "/bin/sh", "/usr/bin/sh", "/busybox/sh")
"""Where a shell is looked for, best first. All accept `-l` and `-c`."""
NO_SHELL = (
    "the sandbox's image has no shell (neither bash nor sh), so command lines cannot run: start a "
    "program by its path, or use an image with a shell"
)


def find_shell(is_program: Callable[[str], bool]) -> str | None:
    """Return the best shell for which `is_program` is true, or None."""
    return next((path for path in SHELLS if is_program(path)), None)


def is_program_here(path: str) -> bool:
    """Whether a path is an executable file in this mount namespace."""
    return os.path.isfile(path) and os.access(path, os.X_OK)


class ShellFinder:
    """Finds the shell of one sandbox, once if it is `/bin/bash`."""

    def __init__(self) -> None:
        self._has_bash = False

    def assign(self) -> None:
        """Serve another sandbox."""
        self._has_bash = False

    def resolve(self, program: str) -> str | None:
        """Return the program to run instead of `/bin/bash`; None if the sandbox has no shell."""
        if program != BASH or self._has_bash:
            return program
        # A sandbox without bash is asked again: a command may have installed it.
        found = find_shell(is_program_here)
        self._has_bash = found == BASH
        return found
