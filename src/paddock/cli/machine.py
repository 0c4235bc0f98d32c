"""Paddock on this machine: up, down, status, doctor."""

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import click
import msgspec

from paddock.cli.context import with_place
from paddock.cli.http import CallError
from paddock.cli.output import Output, notes, screen
from paddock.cli.target import Place
from paddock.kit import pidfile
from paddock.kit.errors import DeadlineExceededError, PaddockError, UnavailableError

STOP_SECONDS = 60.0


@click.command()
@click.option("--port", type=int, help="The port for clients.  [default: 3000]")
@click.option("--host", help="Where to listen.  [default: 127.0.0.1]")
@click.option(
    "--pool-size", type=int, help="Warm sandboxes to keep, at the first start.  [default: 4]"
)
@click.option(
    "--image", help="What the default template is made of, at the first start: base, host, …"
)
@click.option("--detach", "-d", is_flag=True, help="Go on in the background once everything is up.")
@with_place
def up(
    place: Place,
    output: Output,
    port: int | None,
    host: str | None,
    pool_size: int | None,
    image: str | None,
    detach: bool,
) -> None:
    """Start everything on this machine and say how to use it."""
    given = {
        "PADDOCK_PORT": port,
        "PADDOCK_HOST": host,
        "PADDOCK_POOL_SIZE": pool_size,
        "PADDOCK_DEFAULT_IMAGE": image,
    }
    environment = {
        **os.environ,
        **{key: str(value) for key, value in given.items() if value is not None},
    }
    command = [sys.executable, "-m", "paddock.app"]
    if place.config is not None:
        command += ["--config", str(place.config)]
    command += ["up", *(["--json"] if output.is_json else []), *(["--detach"] if detach else [])]
    sys.stdout.flush()
    # The supervisor takes this process's place: Ctrl-C and the terminal are its own.
    os.execve(command[0], command, environment)  # noqa: S606 - our own program


def _pid(place: Place) -> int | None:
    return pidfile.holder(place.settings.run / "paddock.pid")


@click.command()
@click.option("--purge", is_flag=True, help="Kill every sandbox and remove the state directory.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask before purging.")
@with_place
def down(place: Place, output: Output, purge: bool, yes: bool) -> None:
    """Stop Paddock on this machine; sandboxes are taken over by the next `up`.

    With --purge nothing stays: neither sandboxes nor snapshots, images, keys or logs.
    """
    if not purge:
        was_up = _stop(place)
        output.done("stopped" if was_up else "Paddock does not run here", {"stopped": was_up})
        return
    from paddock.cli import purge as purging  # what `up` and `status` never need

    is_there = purging.agree(place, yes=yes)
    was_up = _stop(place)
    if is_there:
        with notes.status("ending sandboxes"):
            purging.purge(place)
    said = f"purged {place.settings.state}" if is_there else "there is nothing to purge"
    output.done(said, {"stopped": was_up, "purged": is_there})


def _stop(place: Place) -> bool:
    """Stop what runs here and wait for its end; say whether anything did."""
    pid = _pid(place)
    if pid is None:
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while _pid(place) == pid:
        if time.monotonic() > deadline:
            raise DeadlineExceededError(
                f"process {pid} does not stop", hint=f"look at {place.settings.state}/logs"
            )
        time.sleep(0.05)
    return True


@click.command()
@with_place
def status(place: Place, output: Output) -> None:
    """Say whether Paddock runs here (or answers at --url), and how it does."""
    report: dict[str, Any] = {"url": place.url}
    if place.is_here:
        pid = _pid(place)
        report |= {"running": pid is not None, "pid": pid}
    try:
        pools = place.kube.call("GET", "/apis/paddock.dev/v1alpha1/sandboxpools")["items"]
        boxes = place.kube.call("GET", "/apis/paddock.dev/v1alpha1/sandboxes")["items"]
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
        is_down = place.is_here and report["pid"] is None
        report["problem"] = "it does not run; `paddock up` starts it" if is_down else error.message
    if output.is_json:
        output.data(report)
    else:
        _show_status(report)
    if not report["answers"]:
        sys.exit(1)


def _show_status(report: dict[str, Any]) -> None:
    if "pid" in report:  # otherwise it is another machine's
        screen.print(f"process    {report['pid'] or 'none on this machine'}")
    screen.print(f"address    {report['url']}")
    if not report["answers"]:
        screen.print(f"problem    {report['problem']}", markup=False, soft_wrap=True)
        return
    counts = ", ".join(f"{count} {phase}" for phase, count in sorted(report["sandboxes"].items()))
    screen.print(f"sandboxes  {counts or 'none'}")
    for name, pool in report["pools"].items():
        screen.print(
            f"pool       {name}: {pool.get('available', 0)} ready, "
            f"{pool.get('creating', 0)} in the making, {pool.get('allocated', 0)} in use",
            soft_wrap=True,
        )


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs, as `paddock -o json doctor`.")
@with_place
def doctor(place: Place, output: Output, as_json: bool) -> None:
    """Say what this machine can isolate, freeze and checkpoint, and what is missing."""
    from paddock.runtime.local.doctor import report as doctors  # probes what others never need

    state = place.settings.state
    report = doctors.diagnose(state if state.exists() else Path("/tmp"))  # noqa: S108 - any place will do
    if as_json or output.is_json:
        output.data(report)
    else:
        screen.print(doctors.render(report), markup=False, soft_wrap=True, end="")
    if not report.is_usable:
        sys.exit(1)


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Go on as they come.")
@click.option("--lines", "-n", type=click.IntRange(min=0), help="Only so many of the last.")
@click.argument("process", default="control")
@with_place
def logs(place: Place, output: Output, process: str, follow: bool, lines: int | None) -> None:
    """Show the log of one of Paddock's own processes: control, node, gateway-0, …"""
    path = place.settings.state / "logs" / f"{process}.log"
    if not path.exists():
        names = ", ".join(sorted(item.stem for item in path.parent.glob("*.log"))) or "none"
        raise PaddockError(f"there is no log of {process!r}", hint=f"there are: {names}")
    with path.open(errors="replace") as file:
        last = deque(file, maxlen=lines)
        if output.is_json and not follow:
            output.data([line.rstrip("\n") for line in last])
            return
        for line in chain(last, _coming(file) if follow else ()):
            text = msgspec.json.encode(line.rstrip("\n")).decode() + "\n"
            sys.stdout.write(text if output.is_json else line)
            sys.stdout.flush()


def _coming(file: TextIO) -> Iterator[str]:
    """Give lines as they are written; after a log was put aside, from the beginning of the new."""
    while True:
        if line := file.readline():
            yield line
        elif os.fstat(file.fileno()).st_size < file.tell():
            file.seek(0)
        else:
            time.sleep(0.2)


COMMANDS = (up, down, status, doctor, logs)
