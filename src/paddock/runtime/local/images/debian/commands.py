"""Runs the programs that build an image and reports what they print."""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence

from paddock.kit.errors import UnavailableError

Progress = Callable[[str], None]

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KEPT_LINES = 10
_PROXIES = {"http_proxy": "Acquire::http::Proxy", "https_proxy": "Acquire::https::Proxy"}
_MIRROR_HINT = "check that the package mirror is reachable, then build again"


def run(
    command: Sequence[str],
    report: Progress,
    *,
    environment: Mapping[str, str] | None = None,
    hint: str = _MIRROR_HINT,
) -> None:
    """Run a command and report each line; a failure is raised with the last lines."""
    last: list[str] = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=build_environment() if environment is None else environment,
        umask=0o022,
    ) as process:
        if process.stdout is not None:
            for line in process.stdout:
                last = [*last[1 - _KEPT_LINES :], line.rstrip()]
                report(line.rstrip())
    if process.returncode != 0:
        raise UnavailableError(
            f"{command[0]} failed with status {process.returncode}: {' | '.join(last)}", hint=hint
        )


def build_environment() -> dict[str, str]:
    """Return the variables of programs that install packages: the proxies of this machine."""
    proxies = {key: value for key, value in os.environ.items() if key.lower().endswith("_proxy")}
    for variable, option in _PROXIES.items():
        if variable not in proxies and (value := _apt_option(option)):
            proxies[variable] = value
    return {"PATH": _PATH, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C", **proxies}


def _apt_option(name: str) -> str:
    """Return an option of this machine's apt; empty if it is not set."""
    if (program := shutil.which("apt-config")) is None:
        return ""
    done = subprocess.run(
        [program, "dump", "--format", "%f %v%n", name], capture_output=True, text=True, check=False
    )
    values = (line.removeprefix(f"{name} ") for line in done.stdout.splitlines())
    return next(values, "") if done.stdout.startswith(f"{name} ") else ""
