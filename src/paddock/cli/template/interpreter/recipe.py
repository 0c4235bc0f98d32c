"""The steps that make a code interpreter of the image `base`. Pure.

What changes rarely comes first, so that a new version of the server reuses the layers with the
packages. The commands use the proxy, mirrors and CA certificates of the installation, as every
command in a sandbox does.
"""

from collections.abc import Mapping, Sequence

from paddock.cli.template.copies import SentStep
from paddock.cli.template.interpreter.assets import LOCKS, PACKAGE, Assets

HOME = "/opt/code-interpreter"
START_COMMAND = f"sh {HOME}/{PACKAGE}/supervise.sh {HOME}/venv/bin/python"
"""Starts the server again if it ends. Its kernels belong to the user of the sandbox."""
CLONE_HOOK = "/etc/paddock/clone.d/50-code-interpreter"
"""Seeds random generators again in each clone, also in code that is under way."""
READY_COMMAND = "curl -sf http://localhost:49999/health"
LANGUAGES: Mapping[str, tuple[str, ...]] = {
    "r": ("r-base-core", "r-cran-irkernel"),
    "java": ("openjdk-17-jdk-headless",),
}
"""Packages of Debian for each language that is not always installed."""
_ALL = "."
_PYTHON, _SERVER = (f"{HOME}/requirements/{name}" for name in LOCKS)
_WHEELS = f"{HOME}/wheels"


def steps(assets: Assets, languages: Sequence[str] = ()) -> list[SentStep]:
    """Return the steps of the build."""
    made = [SentStep("COPY", (_ALL, f"{HOME}/requirements/", "root", ""), 0, assets.locks)]
    source = ""
    if assets.wheels is not None:
        made.append(SentStep("COPY", (_ALL, f"{_WHEELS}/", "root", ""), 0, assets.wheels))
        source = f"--no-index --find-links {_WHEELS} "
    pip = "-m pip {}install --no-cache-dir --require-hashes --quiet " + source
    made += [
        # As root into /usr/local, where `pip install` of the user finds and may shadow them.
        _run(f"python3 {pip.format('')}-r {_PYTHON}"),
        _run(
            f"python3 -m venv --without-pip {HOME}/venv && "
            f"python3 {pip.format(f'--python {HOME}/venv/bin/python ')}-r {_SERVER}"
        ),
    ]
    packages = [name for language in sorted(set(languages)) for name in LANGUAGES[language]]
    if packages:
        install = f"apt-get install -y -q --no-install-recommends {' '.join(packages)}"
        made.append(_run(f"apt-get update -q && {install} && rm -rf /var/lib/apt/lists/*"))
    made.append(SentStep("COPY", (_ALL, f"{HOME}/", "root", ""), 0, assets.code))
    made.append(
        _run(
            # Compiled once, and not in the memory of each sandbox: the user cannot write there.
            f"python3 -m compileall -q {HOME}/{PACKAGE} && "
            f"install -D -m 755 {HOME}/{PACKAGE}/clone_hook.sh {CLONE_HOOK}"
        )
    )
    return made


def _run(command: str) -> SentStep:
    return SentStep("RUN", (command, "root"), 0)
