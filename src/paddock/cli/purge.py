"""`paddock down --purge`: ends every sandbox of this machine and removes what Paddock kept.

The node itself does the first half, as it alone knows what its sandboxes have in the kernel. Here
is who may ask for it, and the files.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click

from paddock.cli.target import Place
from paddock.kit import pidfile
from paddock.kit.errors import ConflictError, InvalidError, PaddockError
from paddock.settings import Settings

NODE_SECONDS = 300.0
_OURS = ("secrets.json", "node/images")
"""One of these lies in every state directory that Paddock has used."""
_RUNNING = ("paddock.pid", "node.sock", "purge.sock", "envoy.json", "envoy-certificate.json")


def agree(place: Place, *, yes: bool) -> bool:
    """Ask, unless `yes`, and say whether there is anything to purge."""
    settings = place.settings
    if "kubernetes" in (settings.store, settings.runtime):
        raise InvalidError(
            "the sandboxes of a cluster are not on this machine",
            hint="`paddock kube uninstall --purge` removes them",
        )
    state = settings.state
    if not state.is_dir() or not any(state.iterdir()):
        return False
    if not any((state / name).exists() for name in _OURS):
        raise InvalidError(
            f"{state} does not look like a state directory of Paddock: nothing was removed",
            hint="look at PADDOCK_STATE_DIR",
        )
    if yes:
        return True
    if not sys.stdin.isatty():
        raise InvalidError(
            f"nobody is there to agree that every sandbox is killed and {state} is removed",
            hint="say `paddock down --purge --yes`",
        )
    question = f"Kill every sandbox and remove {state}, with all files, images and keys in it?"
    click.confirm(question, abort=True, err=True)
    return True


def purge(place: Place) -> None:
    """End all sandboxes and remove the state directory; Paddock must be down."""
    settings = place.settings
    with pidfile.lock(
        settings.run / "paddock.pid",
        what="Paddock",
        hint="somebody started it meanwhile; say `paddock down --purge` again",
    ):
        if (settings.state / "node").is_dir():
            _end_sandboxes(settings)
        _remove(settings.state)
        for name in _RUNNING:
            (settings.run / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others' files may be there, and then they stay
        settings.run.rmdir()


def _end_sandboxes(settings: Settings) -> None:
    log = settings.state / "logs" / "purge.log"
    log.parent.mkdir(mode=0o700, exist_ok=True)
    command = [
        *(sys.executable, "-m", "paddock.runtime.local.node.process", "--purge"),
        *("--state", str(settings.state / "node")),
        *("--socket", str(settings.run / "purge.sock")),
    ]
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=NODE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise PaddockError(
                f"the sandboxes did not end within {NODE_SECONDS:g} s", hint=f"look at {log}"
            ) from error
    if done.returncode != 0:
        lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        raise PaddockError(f"the sandboxes could not be ended: {lines[-1]}", hint=f"look at {log}")


def _remove(state: Path) -> None:
    """Remove the directory; never what is mounted into it, which is somebody else's."""
    mounts = [point for point in _mount_points() if point.startswith(f"{os.path.realpath(state)}/")]
    if mounts:
        raise ConflictError(
            f"{mounts[0]} is still mounted: nothing was removed", hint=f"`umount {mounts[0]}`"
        )
    if state.is_symlink() or os.path.ismount(state):
        # Only what it holds: the place itself was given by somebody.
        for item in state.iterdir():
            shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
        return
    shutil.rmtree(state)


def _mount_points() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4].encode().decode("unicode_escape") for line in lines]
