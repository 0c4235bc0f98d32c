"""`paddock sandbox exec|shell|cp`: what is done inside one sandbox."""

import shlex
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import click

from paddock.cli.click_ext import Running, examples, pairs
from paddock.cli.context import with_place
from paddock.cli.output import Output
from paddock.cli.sandbox.copy import copied
from paddock.cli.sandbox.envd_client import CommandError, Shell, output_of
from paddock.cli.sandbox.terminal import run_terminal
from paddock.cli.target import Place
from paddock.kit.errors import PaddockError


def _shell(place: Place, sandbox_id: str, user: str | None) -> Shell:
    return Shell(place.inside(sandbox_id), user)


@click.command(
    "exec",
    cls=Running,
    epilog=examples(
        "paddock sandbox exec $ID python3 -c 'print(6 * 7)'",
        "paddock sandbox exec $ID 'cd /srv && ls | wc -l'",
        "echo hello | paddock sandbox exec -i $ID 'cat > greeting.txt'",
    ),
)
@click.argument("sandbox_id")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--user", "-u", help="As whom.  [default: the template's user]")
@click.option("--cwd", help="Where.  [default: the user's home]")
@click.option("--env", "-e", multiple=True, help="NAME=VALUE.")
@click.option("--stdin", "-i", "has_stdin", is_flag=True, help="Pass standard input on.")
@with_place
def execute(
    place: Place,
    output: Output,
    sandbox_id: str,
    command: tuple[str, ...],
    user: str | None,
    cwd: str | None,
    env: tuple[str, ...],
    has_stdin: bool,
) -> None:
    """Run a command; its output and exit code are this command's.

    One word is a line for the shell, several are a program and its arguments. Ctrl-C ends the
    command, too.
    """
    text = command[0] if len(command) == 1 else shlex.join(command)
    shell = _shell(place, sandbox_id, user)
    events = shell.start(text, env=pairs(env, "--env"), cwd=cwd, has_stdin=has_stdin)
    pid = 0
    try:
        pid = int(next(events)["start"]["pid"])
        if has_stdin:
            _feed(shell, pid)
        code = _pass_on(events, output)
    except KeyboardInterrupt:
        with suppress(PaddockError):  # it may have ended by itself
            # Who is interrupted before it is said what was started waits for that first.
            shell.end(pid or int(next(events)["start"]["pid"]))
        raise
    sys.exit(code)


def _pass_on(events: Iterable[Mapping[str, Any]], output: Output) -> int:
    """Show what a command says as it says it; gives its exit code."""
    said = (bytearray(), bytearray())
    for event in events:
        for kept, data, stream in zip(
            said, output_of(event), (sys.stdout, sys.stderr), strict=True
        ):
            if output.is_json:
                kept.extend(data)
            elif data:
                stream.buffer.write(data)
                stream.buffer.flush()
        if end := event.get("end"):
            if output.is_json:
                out, err = (kept.decode(errors="replace") for kept in said)
                output.data({"exitCode": _exit_code(end), "stdout": out, "stderr": err})
            return _exit_code(end)
    raise CommandError("the sandbox did not say how the command ended")


def _feed(shell: Shell, pid: int) -> None:
    """Pass standard input on while the command runs; it may end before its input does."""

    def feed() -> None:
        with suppress(PaddockError):
            shell.feed(pid, sys.stdin.fileno())

    threading.Thread(target=feed, name="standard input", daemon=True).start()


def _exit_code(end: Mapping[str, Any]) -> int:
    code = int(end.get("exitCode", 0))
    return code if code >= 0 else 137


@click.command("shell")
@click.argument("sandbox_id")
@click.option("--user", "-u", help="As whom.  [default: the template's user]")
@with_place
def shell(place: Place, _output: Output, sandbox_id: str, user: str | None) -> None:
    """Open a terminal in a sandbox; `exit` or Ctrl-D leaves it."""
    sys.exit(run_terminal(_shell(place, sandbox_id, user)))


@click.command(
    "cp",
    epilog=examples(
        "paddock sandbox cp data.csv $ID:/tmp/",
        "paddock sandbox cp $ID:/tmp/result.json results/7.json",
    ),
)
@click.argument("source")
@click.argument("target")
@with_place
def copy(place: Place, output: Output, source: str, target: str) -> None:
    """Copy a file: FILE ID:PATH, or ID:PATH FILE. A directory keeps the file's name."""
    if (":" in source) == (":" in target):
        raise click.UsageError("one side is ID:PATH, the other a file here: a.txt i3x…:/tmp/a")
    try:
        size = copied(place, source, target)
    except OSError as error:
        raise PaddockError(f"{error.filename or target}: {error.strerror}") from error
    output.done(f"{size} bytes copied", {"bytes": size})
