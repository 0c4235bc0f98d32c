"""`paddock sandbox exec`, `shell` and `cp`."""

import shlex
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import click

from paddock.cli.click_ext import RemoteCommand, examples, pairs
from paddock.cli.context import with_target
from paddock.cli.output import Output
from paddock.cli.sandbox.copy import copied
from paddock.cli.sandbox.envd_client import CommandError, Shell, output_of
from paddock.cli.sandbox.terminal import run_terminal
from paddock.cli.target import CliTarget
from paddock.kit.errors import PaddockError


def _shell(target: CliTarget, sandbox_id: str, user: str | None) -> Shell:
    return Shell(target.envd(sandbox_id), user)


@click.command(
    "exec",
    cls=RemoteCommand,
    epilog=examples(
        "paddock sandbox exec $ID python3 -c 'print(6 * 7)'",
        "paddock sandbox exec $ID 'cd /srv && ls | wc -l'",
        "echo hello | paddock sandbox exec -i $ID 'cat > greeting.txt'",
    ),
)
@click.argument("sandbox_id")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--user", "-u", help="Run as this user.  [default: the user of the template]")
@click.option("--cwd", help="Run in this directory.  [default: the home of the user]")
@click.option("--env", "-e", multiple=True, help="Set an environment variable NAME=VALUE.")
@click.option("--stdin", "-i", "has_stdin", is_flag=True, help="Forward standard input.")
@with_target
def execute(
    target: CliTarget,
    output: Output,
    sandbox_id: str,
    command: tuple[str, ...],
    user: str | None,
    cwd: str | None,
    env: tuple[str, ...],
    has_stdin: bool,
) -> None:
    """Run a command in a sandbox; forward its output and exit code.

    A single argument is a shell command line; several are a program and its arguments. Ctrl-C
    also ends the command.
    """
    text = command[0] if len(command) == 1 else shlex.join(command)
    shell = _shell(target, sandbox_id, user)
    events = shell.start(text, env=pairs(env, "--env"), cwd=cwd, has_stdin=has_stdin)
    pid = 0
    try:
        pid = int(next(events)["start"]["pid"])
        if has_stdin:
            _feed(shell, pid)
        code = _forward(events, output)
    except KeyboardInterrupt:
        with suppress(PaddockError):  # it may have ended already
            # If interrupted before the start event, wait for it to get the process id.
            shell.terminate(pid or int(next(events)["start"]["pid"]))
        raise
    sys.exit(code)


def _forward(events: Iterable[Mapping[str, Any]], output: Output) -> int:
    """Forward the output of a command; return its exit code."""
    captured = (bytearray(), bytearray())
    for event in events:
        for kept, data, stream in zip(
            captured, output_of(event), (sys.stdout, sys.stderr), strict=True
        ):
            if output.is_json:
                kept.extend(data)
            elif data:
                stream.buffer.write(data)
                stream.buffer.flush()
        if end := event.get("end"):
            if output.is_json:
                out, err = (kept.decode(errors="replace") for kept in captured)
                output.data({"exitCode": _exit_code(end), "stdout": out, "stderr": err})
            return _exit_code(end)
    raise CommandError("the sandbox did not report the end of the command")


def _feed(shell: Shell, pid: int) -> None:
    """Forward standard input while the command runs, which may end before its input."""

    def feed() -> None:
        with suppress(PaddockError):
            shell.feed(pid, sys.stdin.fileno())

    threading.Thread(target=feed, name="standard input", daemon=True).start()


def _exit_code(end: Mapping[str, Any]) -> int:
    code = int(end.get("exitCode", 0))
    return code if code >= 0 else 137


@click.command("shell")
@click.argument("sandbox_id")
@click.option("--user", "-u", help="Run as this user.  [default: the user of the template]")
@with_target
def shell(target: CliTarget, _output: Output, sandbox_id: str, user: str | None) -> None:
    """Open a terminal in a sandbox; leave it with `exit` or Ctrl-D."""
    sys.exit(run_terminal(_shell(target, sandbox_id, user)))


@click.command(
    "cp",
    epilog=examples(
        "paddock sandbox cp data.csv $ID:/tmp/",
        "paddock sandbox cp $ID:/tmp/result.json results/7.json",
    ),
)
@click.argument("source")
@click.argument("destination")
@with_target
def copy(target: CliTarget, output: Output, source: str, destination: str) -> None:
    """Copy a file into a sandbox (FILE ID:PATH) or out of it (ID:PATH FILE).

    If the destination is a directory, the file keeps its name.
    """
    if (":" in source) == (":" in destination):
        raise click.UsageError(
            "exactly one side must be ID:PATH, the other a local file: a.txt i3x…:/tmp/a"
        )
    try:
        size = copied(target, source, destination)
    except OSError as error:
        raise PaddockError(f"{error.filename or destination}: {error.strerror}") from error
    output.done(f"{size} bytes copied", {"bytes": size})
