"""Find or build the programs of the control plane.

`PADDOCK_KUBE_ASSETS` names a directory that contains them; otherwise `scripts/kube-build` builds
them once into its cache. The message of `BinariesMissingError` is shown to the user.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NO_GO = 3
"""Exit code of `scripts/kube-build` where Go is missing or too old."""
NOT_BUILT = 4
"""Exit code of `scripts/kube-build --check` where something is missing."""


class BinariesMissingError(Exception):
    """The programs are missing and cannot be built; the message says why."""


def directory_with(programs: Sequence[str], *, build: bool = True) -> Path:
    """Return a directory that contains all of these programs; build them if `build` is set."""
    if given := os.environ.get("PADDOCK_KUBE_ASSETS"):
        directory = Path(given)
        missing = [name for name in programs if not os.access(directory / name, os.X_OK)]
        if missing:
            raise BinariesMissingError(f"PADDOCK_KUBE_ASSETS={given} lacks {', '.join(missing)}")
        return directory
    done = subprocess.run(
        [str(ROOT / "scripts" / "kube-build"), *(() if build else ("--check",)), *programs],
        stdout=subprocess.PIPE,
        stderr=None,
        text=True,
        check=False,
    )
    if done.returncode == NOT_BUILT:
        raise BinariesMissingError("no Kubernetes control plane: run scripts/kube-build")
    if done.returncode == NO_GO:
        raise BinariesMissingError(
            "no Kubernetes control plane: Go is missing and PADDOCK_KUBE_ASSETS is not set"
        )
    if done.returncode != 0:
        raise BinariesMissingError(f"scripts/kube-build failed with exit code {done.returncode}")
    return Path(done.stdout.strip().splitlines()[-1])
