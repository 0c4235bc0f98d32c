"""Where things are inside the sandbox, and the limits of a run."""

import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "CODE_INTERPRETER_"
_MAX_RUNTIME_BYTES = 60
"""The path of a socket has at most 107 bytes, of which the names of kernels need some 40."""


def _variable(name: str, default: str) -> str:
    return os.environ.get(PREFIX + name, default)


@dataclass(frozen=True)
class Settings:
    """Settings of the server; variables `CODE_INTERPRETER_…` of its environment change some."""

    host: str = field(default_factory=lambda: _variable("HOST", "0.0.0.0"))  # noqa: S104
    """The gateway reaches the server by the address of the sandbox."""
    port: int = field(default_factory=lambda: int(_variable("PORT", "49999")))
    python: str = field(default_factory=lambda: _variable("PYTHON", "/usr/bin/python3"))
    """The Python of the sandbox, which runs the Python kernel."""
    server: Path = field(default_factory=lambda: Path(_variable("SERVER", sys.prefix)))
    """The virtual environment of the server, with the programs of the other kernels."""
    home: Path = field(default_factory=lambda: Path(_variable("HOME", str(Path.home()))))
    """The working directory of contexts that request no other."""
    runtime: Path = field(default_factory=lambda: _runtime_directory())
    """Connection files and sockets of kernels."""
    environment_url: str = field(
        default_factory=lambda: _variable("ENVIRONMENT_URL", "http://localhost:49983/envs")
    )
    """Where envd serves the variables of the sandbox."""
    generation: Path = field(
        default_factory=lambda: Path(_variable("GENERATION", "/run/paddock/generation"))
    )
    """A file that has other contents in each clone of a sandbox."""
    max_output_bytes: int = field(
        default_factory=lambda: int(_variable("MAX_OUTPUT_BYTES", str(1 << 30)))
    )
    """A run with more output than this is interrupted."""
    start_seconds: float = 60.0
    """A kernel that does not answer within this time has failed."""
    interrupt_seconds: float = 5.0
    """A kernel that still runs code this long after an interrupt is replaced."""
    keepalive_seconds: float = 5.0
    """A silent run sends a line this often, so that a client that is gone is noticed."""

    def program(self, name: str) -> str:
        """Return the path of a program of the server's virtual environment."""
        return str(self.server / "bin" / name)


def _runtime_directory() -> Path:
    usual = Path(tempfile.gettempdir()) / f"code-interpreter-{os.getuid()}"
    directory = Path(_variable("RUNTIME", str(usual)))
    if len(os.fsencode(directory)) > _MAX_RUNTIME_BYTES:
        raise ValueError(f"{PREFIX}RUNTIME: the path {directory} is too long for sockets")
    return directory
