"""Real kubectl binaries for tests.

`PADDOCK_TEST_KUBECTL` names them (separated by `:`). The default is the distribution's, fetched by
`scripts/fetch-kubectl`; the control plane's own, if it is built; else the one in PATH.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.cluster.binaries import BinariesMissingError, directory_with

CACHE = Path(os.environ.get("PADDOCK_CACHE", "/var/cache/paddock"))


def binaries() -> list[Path]:
    """Return every kubectl binary to test with."""
    if given := os.environ.get("PADDOCK_TEST_KUBECTL"):
        return [Path(path) for path in given.split(":")]
    found = [CACHE / "kubectl" / "usr" / "bin" / "kubectl"]
    with contextlib.suppress(BinariesMissingError):  # then another kubectl will do
        found.append(directory_with(["kubectl"], build=False) / "kubectl")
    present = [path for path in found if os.access(path, os.X_OK)]
    on_path = shutil.which("kubectl")
    return present or ([Path(on_path)] if on_path else [])


class Outcome(NamedTuple):
    """The result of a command."""

    code: int
    out: str
    err: str


class Kubectl:
    """One kubectl binary with one server and its own home directory."""

    def __init__(
        self, binary: Path, home: Path, server: str | None = None, *arguments: str
    ) -> None:
        """Use this server, or that of the file `config` in the home directory."""
        self._command = [str(binary), *(("--server", server) if server else ()), *arguments]
        self._environment = {
            "HOME": str(home),
            "PATH": os.environ["PATH"],
            "KUBECONFIG": str(home / "config"),
        }
        (home / "config").touch()

    def run(self, *arguments: str, stdin: str = "", **environment: str) -> Outcome:
        """Run a command and return its result."""
        done = subprocess.run(
            [*self._command, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=self._environment | environment,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    def __call__(self, *arguments: str, stdin: str = "", **environment: str) -> str:
        """Run a command that must succeed; return its output."""
        outcome = self.run(*arguments, stdin=stdin, **environment)
        assert outcome.code == 0, f"kubectl {' '.join(arguments)}: {outcome.out}{outcome.err}"
        return outcome.out

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run a command in the background; it is killed at the end of the block."""
        with subprocess.Popen(
            [*self._command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
        ) as process:
            try:
                yield process
            finally:
                process.kill()
