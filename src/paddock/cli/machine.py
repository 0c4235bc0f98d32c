"""Paddock on this machine: up, down, status, doctor, logs."""

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import click
import msgspec

from paddock.cli.context import with_target
from paddock.cli.http import CallError
from paddock.cli.output import Output, notes, screen
from paddock.cli.target import CliTarget
from paddock.kit import pidfile
from paddock.kit.errors import DeadlineExceededError, PaddockError, UnavailableError
from paddock.resources import quantity

STOP_SECONDS = 60.0


@click.command()
@click.option("--port", type=int, help="Listen for clients on this port.  [default: 3000]")
@click.option("--host", help="Listen on this address.  [default: 127.0.0.1]")
@click.option(
    "--pool-size",
    type=int,
    help="Keep this many sandboxes warm (set at the first start).  [default: 4]",
)
@click.option(
    "--image",
    help="Use this image for the default template (set at the first start).  [default: base]",
)
@click.option(
    "--code-interpreter",
    is_flag=True,
    help="Install the code interpreter in the background, once everything is up.",
)
@click.option("--detach", "-d", is_flag=True, help="Run in the background once everything is up.")
@with_target
def up(
    target: CliTarget,
    output: Output,
    port: int | None,
    host: str | None,
    pool_size: int | None,
    image: str | None,
    code_interpreter: bool,
    detach: bool,
) -> None:
    """Start Paddock on this machine and print how to connect."""
    given = {
        "PADDOCK_PORT": port,
        "PADDOCK_HOST": host,
        "PADDOCK_POOL_SIZE": pool_size,
        "PADDOCK_DEFAULT_IMAGE": image,
        "PADDOCK_CODE_INTERPRETER": "true" if code_interpreter else None,
    }
    environment = {
        **os.environ,
        **{key: str(value) for key, value in given.items() if value is not None},
    }
    command = [sys.executable, "-m", "paddock.app"]
    if target.config is not None:
        command += ["--config", str(target.config)]
    command += ["up", *(["--json"] if output.is_json else []), *(["--detach"] if detach else [])]
    sys.stdout.flush()
    # The supervisor replaces this process, so it gets Ctrl-C and the terminal.
    os.execve(command[0], command, environment)  # noqa: S606 - our own program


def _pid(target: CliTarget) -> int | None:
    return pidfile.holder(target.settings.run / "paddock.pid")


@click.command()
@click.option("--purge", is_flag=True, help="Kill all sandboxes and remove the state directory.")
@click.option("--yes", "-y", is_flag=True, help="Purge without confirmation.")
@with_target
def down(target: CliTarget, output: Output, purge: bool, yes: bool) -> None:
    """Stop Paddock on this machine; the next `up` adopts its sandboxes.

    --purge removes everything: sandboxes, snapshots, images, keys and logs.
    """
    if not purge:
        was_up = _stop(target)
        output.done("stopped" if was_up else "Paddock is not running", {"stopped": was_up})
        return
    from paddock.cli import purge as purging  # only this command needs it

    has_state = purging.confirm(target, yes=yes)
    was_up = _stop(target, purging.announce if has_state else None)
    if has_state:
        with notes.status("killing sandboxes"):
            purging.purge(target)
    text = f"purged {target.settings.state}" if has_state else "nothing to purge"
    output.done(text, {"stopped": was_up, "purged": has_state})


def _stop(target: CliTarget, announce: Callable[[CliTarget, int], None] | None = None) -> bool:
    """Stop Paddock and wait for its end; return whether it was running.

    `announce` is called with the process id before the process is stopped.
    """
    pid = _pid(target)
    if pid is None:
        return False
    if announce is not None:
        announce(target, pid)
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while _pid(target) == pid:
        if time.monotonic() > deadline:
            raise DeadlineExceededError(
                f"process {pid} does not stop", hint=f"see {target.settings.state}/logs"
            )
        time.sleep(0.05)
    return True


@click.command()
@with_target
def status(target: CliTarget, output: Output) -> None:
    """Show whether Paddock runs on this machine or at --url, with its sandboxes and pools."""
    report: dict[str, Any] = {"url": target.url}
    if target.is_local:
        pid = _pid(target)
        report |= {"running": pid is not None, "pid": pid, "disk": _disk(target)}
    try:
        pools = target.kube.call("GET", "/apis/paddock.dev/v1alpha1/sandboxpools")["items"]
        boxes = target.kube.call("GET", "/apis/paddock.dev/v1alpha1/sandboxes")["items"]
        report["pools"] = {
            f"{item['metadata']['namespace']}/{item['metadata']['name']}": item.get("status", {})
            for item in pools
        }
        phases: dict[str, int] = {}
        for item in boxes:
            phase = item.get("status", {}).get("phase", "Pending")
            phases[phase] = phases.get(phase, 0) + 1
        report["sandboxes"] = phases
        report["answers"] = True
    except (UnavailableError, CallError) as error:
        report["answers"] = False
        is_down = target.is_local and report["pid"] is None
        report["problem"] = (
            "Paddock is not running; `paddock up` starts it" if is_down else error.message
        )
    if output.is_json:
        output.data(report)
    else:
        _show_status(report)
    if not report["answers"]:
        sys.exit(1)


def _disk(target: CliTarget) -> dict[str, Any] | None:
    """Return the space of the disk of the state directory; `None` if there is none yet."""
    from paddock.runtime.local.storage.reserve import DiskReserve  # only this command needs it

    state = target.settings.state
    if not state.exists():
        return None
    return msgspec.to_builtins(DiskReserve(state, target.settings.disk_reserve_bytes).status())


def _show_status(report: dict[str, Any]) -> None:
    if "pid" in report:  # only for this machine
        screen.print(f"process    {report['pid'] or 'none on this machine'}")
    screen.print(f"address    {report['url']}")
    if disk := report.get("disk"):
        free, total, kept = (
            quantity.shown_bytes(disk[name])
            for name in ("free_bytes", "total_bytes", "reserve_bytes")
        )
        low = "; new work is refused" if disk["free_bytes"] < disk["reserve_bytes"] else ""
        screen.print(f"disk       {free} free of {total}, {kept} reserved{low}", soft_wrap=True)
    if not report["answers"]:
        screen.print(f"problem    {report['problem']}", markup=False, soft_wrap=True)
        return
    counts = ", ".join(f"{count} {phase}" for phase, count in sorted(report["sandboxes"].items()))
    screen.print(f"sandboxes  {counts or 'none'}")
    for name, pool in report["pools"].items():
        screen.print(
            f"pool       {name}: {pool.get('available', 0)} ready, "
            f"{pool.get('creating', 0)} starting, {pool.get('allocated', 0)} in use",
            soft_wrap=True,
        )


@click.command()
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, as `paddock -o json doctor` does."
)
@with_target
def doctor(target: CliTarget, output: Output, as_json: bool) -> None:
    """Show what this machine can isolate, freeze and checkpoint, and what is missing."""
    from paddock.runtime.local.doctor import report as doctors  # only this command needs it

    state = target.settings.state
    report = doctors.diagnose(
        state if state.exists() else Path("/tmp"),  # noqa: S108 - any directory will do
        target.settings.disk_reserve_bytes,
    )
    if as_json or output.is_json:
        output.data(report)
    else:
        screen.print(doctors.render(report), markup=False, soft_wrap=True, end="")
    if not report.is_usable:
        sys.exit(1)


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Follow the log.")
@click.option(
    "--lines", "-n", type=click.IntRange(min=0), help="Show only the last lines.  [default: all]"
)
@click.argument("process", default="control")
@with_target
def logs(target: CliTarget, output: Output, process: str, follow: bool, lines: int | None) -> None:
    """Show the log of a process of Paddock: control, node, gateway-0, …"""
    path = target.settings.state / "logs" / f"{process}.log"
    if not path.exists():
        names = ", ".join(sorted(item.stem for item in path.parent.glob("*.log"))) or "none"
        raise PaddockError(f"process {process!r} has no log", hint=f"processes with a log: {names}")
    with path.open(errors="replace") as file:
        last = deque(file, maxlen=lines)
        if output.is_json and not follow:
            output.data([line.rstrip("\n") for line in last])
            return
        for line in chain(last, _following(file) if follow else ()):
            text = msgspec.json.encode(line.rstrip("\n")).decode() + "\n"
            sys.stdout.write(text if output.is_json else line)
            sys.stdout.flush()


def _following(file: TextIO) -> Iterator[str]:
    """Yield lines as they are written; start over when the log is rotated."""
    while True:
        if line := file.readline():
            yield line
        elif os.fstat(file.fileno()).st_size < file.tell():
            file.seek(0)
        else:
            time.sleep(0.2)


COMMANDS = (up, down, status, doctor, logs)
