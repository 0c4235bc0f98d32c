"""`paddock down --purge`: kills all sandboxes of this machine and removes the state directory.

The node kills the sandboxes, because only it has the records of their kernel objects. This module
confirms the purge and removes the files.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click

from paddock.cli.target import CliTarget
from paddock.kit import pidfile
from paddock.kit.errors import ConflictError, InvalidError, PaddockError
from paddock.settings import IMAGES_FILE, OUTBOUND_FILE, PURGE_FILE, Settings

NODE_SECONDS = 300.0
_MARKERS = ("secrets.json", "store.db", "node/images")
"""Every state directory of Paddock holds one of these."""
_RUN_FILES = (
    *("paddock.pid", "node.sock", "purge.sock", "envoy.json", "envoy-certificate.json"),
    *(IMAGES_FILE, OUTBOUND_FILE, PURGE_FILE),
)


def confirm(target: CliTarget, *, yes: bool) -> bool:
    """Ask for confirmation unless `yes`; return whether there is anything to purge."""
    settings = target.settings
    if "kubernetes" in (settings.store, settings.runtime):
        raise InvalidError(
            "the sandboxes of a cluster are not on this machine",
            hint="`paddock kube uninstall --purge` removes them",
        )
    state = settings.state
    if not state.is_dir() or not any(state.iterdir()):
        return False
    if not any((state / name).exists() for name in _MARKERS):
        raise InvalidError(
            f"{state} does not look like a state directory of Paddock: nothing was removed",
            hint="check PADDOCK_STATE_DIR",
        )
    if yes:
        return True
    if not sys.stdin.isatty():
        raise InvalidError(
            f"cannot ask to confirm the removal of all sandboxes and {state}: no terminal",
            hint="confirm with `paddock down --purge --yes`",
        )
    question = f"Kill all sandboxes and remove {state} with all files, images and keys?"
    click.confirm(question, abort=True, err=True)
    return True


def announce(target: CliTarget, pid: int) -> None:
    """Record that a running supervisor is stopped for a purge, so that it reports that."""
    (target.settings.run / PURGE_FILE).write_text(str(pid))


def purge(target: CliTarget) -> None:
    """Kill all sandboxes and remove the state directory; Paddock must be stopped."""
    settings = target.settings
    with pidfile.lock(
        settings.run / "paddock.pid",
        what="Paddock",
        hint="it was started meanwhile; run `paddock down --purge` again",
    ):
        if (settings.state / "node").is_dir():
            _kill_sandboxes(settings)
        _remove(settings.state)
        for name in _RUN_FILES:
            (settings.run / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it may hold foreign files, which stay
        settings.run.rmdir()


def _kill_sandboxes(settings: Settings) -> None:
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
                f"the sandboxes did not end within {NODE_SECONDS:g} s", hint=f"see {log}"
            ) from error
    if done.returncode != 0:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        raise PaddockError(f"the sandboxes could not be killed: {lines[-1]}", hint=f"see {log}")


def _remove(state: Path) -> None:
    """Remove the directory; refuse if something is mounted in it."""
    mounts = [point for point in _mount_points() if point.startswith(f"{os.path.realpath(state)}/")]
    if mounts:
        raise ConflictError(
            f"{mounts[0]} is still mounted: nothing was removed", hint=f"`umount {mounts[0]}`"
        )
    if state.is_symlink() or os.path.ismount(state):
        # Remove the contents only: the link or mount point belongs to the user.
        for item in state.iterdir():
            shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
        return
    shutil.rmtree(state)


def _mount_points() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4].encode().decode("unicode_escape") for line in lines]
