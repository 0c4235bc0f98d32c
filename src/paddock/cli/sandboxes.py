"""`paddock sandbox`: sandboxes by hand."""

import shlex
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC
from typing import Any
from urllib.parse import quote

import click
import msgspec

from paddock.cli.context import with_place
from paddock.cli.copying import copied
from paddock.cli.envd import Shell, output_of
from paddock.cli.http import CallError
from paddock.cli.output import Output, age, notes, screen, until
from paddock.cli.place import Place, path_of
from paddock.cli.terminal import run_terminal
from paddock.cli.words import Running
from paddock.kit.clock import system
from paddock.kit.errors import PaddockError


@click.group()
def sandbox() -> None:
    """Sandboxes: create, look, run commands, copy files, pause, fork, kill."""


def _pairs(items: tuple[str, ...], option: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{option} wants NAME=VALUE, not {item!r}")
        found[name] = value
    return found


def _shell(place: Place, sandbox_id: str, user: str | None) -> Shell:
    return Shell(place.inside(sandbox_id), user)


@sandbox.command("create")
@click.argument("template", default="base")
@click.option("--timeout", default=300, show_default=True, help="Seconds until it ends.")
@click.option("--env", "-e", multiple=True, help="NAME=VALUE for every process.")
@click.option("--metadata", "-m", multiple=True, help="NAME=VALUE to find it by.")
@click.option("--pause-at-end", is_flag=True, help="Pause it at its end instead of killing it.")
@click.option("--wake", is_flag=True, help="Let traffic wake it; with --pause-at-end.")
@with_place
def create(
    place: Place,
    output: Output,
    template: str,
    timeout: int,
    env: tuple[str, ...],
    metadata: tuple[str, ...],
    pause_at_end: bool,
    wake: bool,
) -> None:
    """Create a sandbox and print its id."""
    if wake and not pause_at_end:
        raise click.UsageError("--wake needs --pause-at-end: what is killed at its end never wakes")
    body: dict[str, Any] = {
        "templateID": template,
        "timeout": timeout,
        "envVars": _pairs(env, "--env"),
        "metadata": _pairs(metadata, "--metadata"),
        "autoPause": pause_at_end,
        "autoResume": {"enabled": wake},
    }
    made = place.e2b.call("POST", "/v2/sandboxes", body)
    output.done(made["sandboxID"], made)


@sandbox.command("ls")
@click.option("--state", type=click.Choice(["running", "paused"]), help="Only these.")
@click.option("--metadata", "-m", multiple=True, help="Only those with NAME=VALUE.")
@with_place
def list_sandboxes(
    place: Place, output: Output, state: str | None, metadata: tuple[str, ...]
) -> None:
    """List sandboxes."""
    wanted = "&".join(
        f"{quote(quote(name))}={quote(quote(value))}"
        for name, value in _pairs(metadata, "--metadata").items()
    )
    query = f"?limit=100&metadata={quote(wanted)}" + (f"&state={state}" if state else "")
    items: list[Any] = []
    token = ""
    while True:
        with place.e2b.open("GET", f"/v2/sandboxes{query}{token}") as response:
            items += msgspec.json.decode(response.read())
            following = response.headers.get("X-Next-Token")
        if not following:
            break
        token = f"&nextToken={quote(following)}"
    now = system().now().astimezone(UTC)
    output.rows(
        items,
        ("id", "template", "state", "age", "ends in", "metadata"),
        (
            (
                item["sandboxID"],
                item["templateID"],
                item["state"],
                age(item["startedAt"], now),
                "-" if item["state"] == "paused" else until(item["endAt"], now),
                " ".join(f"{key}={value}" for key, value in item["metadata"].items()),
            )
            for item in items
        ),
    )


@sandbox.command("exec", cls=Running)
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
    """Run a command; its output and exit code are this command's."""
    text = command[0] if len(command) == 1 else shlex.join(command)
    shell = _shell(place, sandbox_id, user)
    said = (bytearray(), bytearray())
    for event in shell.start(text, env=_pairs(env, "--env"), cwd=cwd, has_stdin=has_stdin):
        if has_stdin and (start := event.get("start")):
            _feed(shell, int(start["pid"]))
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
            sys.exit(_exit_code(end))


def _feed(shell: Shell, pid: int) -> None:
    """Pass standard input on while the command runs; it may end before its input does."""

    def feed() -> None:
        with suppress(PaddockError):
            shell.feed(pid, sys.stdin.fileno())

    threading.Thread(target=feed, name="standard input", daemon=True).start()


def _exit_code(end: Mapping[str, Any]) -> int:
    code = int(end.get("exitCode", 0))
    return code if code >= 0 else 137


@sandbox.command("shell")
@click.argument("sandbox_id")
@click.option("--user", "-u", help="As whom.  [default: the template's user]")
@with_place
def shell(place: Place, _output: Output, sandbox_id: str, user: str | None) -> None:
    """Open a terminal in a sandbox; `exit` or Ctrl-D leaves it."""
    sys.exit(run_terminal(_shell(place, sandbox_id, user)))


@sandbox.command("cp")
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


@sandbox.command("logs")
@click.argument("sandbox_id")
@click.option("--limit", default=1000, show_default=True)
@with_place
def sandbox_logs(place: Place, output: Output, sandbox_id: str, limit: int) -> None:
    """Show what happened in a sandbox."""
    entries = place.e2b.call("GET", f"/v2{path_of(sandbox_id)}/logs?limit={limit}")["logs"]
    if output.is_json:
        output.data(entries)
        return
    for entry in entries:
        text = f"{entry['timestamp']} {entry['level']:5} {entry['message']}"
        screen.print(text, markup=False, soft_wrap=True)


@sandbox.command("pause")
@click.argument("sandbox_id")
@click.option("--files-only", is_flag=True, help="Keep files, end processes.")
@with_place
def pause(place: Place, output: Output, sandbox_id: str, files_only: bool) -> None:
    """Pause a sandbox; everything is kept."""
    place.e2b.call("POST", f"{path_of(sandbox_id)}/pause", {"memory": not files_only})
    output.done(f"paused {sandbox_id}", {"paused": sandbox_id})


@sandbox.command("resume")
@click.argument("sandbox_id")
@click.option("--timeout", default=300, show_default=True, help="Seconds until it ends.")
@with_place
def resume(place: Place, output: Output, sandbox_id: str, timeout: int) -> None:
    """Resume a sandbox, or extend a running one."""
    made = place.e2b.call("POST", f"/v2{path_of(sandbox_id)}/connect", {"timeout": timeout})
    output.done(f"running {sandbox_id}", made)


@sandbox.command("fork")
@click.argument("sandbox_id")
@click.option("--count", default=1, show_default=True)
@click.option("--timeout", default=300, show_default=True, help="Seconds until they end.")
@with_place
def fork(place: Place, output: Output, sandbox_id: str, count: int, timeout: int) -> None:
    """Make clones of a running sandbox: files, memory, processes."""
    body = {"count": count, "timeout": timeout}
    with notes.status(f"forking {sandbox_id}"):
        results = place.e2b.call("POST", f"{path_of(sandbox_id)}/fork", body)
    ids = [item["sandbox"]["sandboxID"] for item in results if "sandbox" in item]
    output.done("\n".join(ids), results)
    failed = [item["error"]["message"] for item in results if "error" in item]
    if failed:
        raise PaddockError(f"{len(failed)} of {count} could not be made: {failed[0]}")


@sandbox.command("kill")
@click.argument("sandbox_ids", nargs=-1, required=True)
@with_place
def kill(place: Place, output: Output, sandbox_ids: tuple[str, ...]) -> None:
    """End sandboxes, running or paused."""
    killed: list[str] = []
    failed: list[str] = []
    for sandbox_id in sandbox_ids:
        try:
            place.e2b.call("DELETE", path_of(sandbox_id))
        except CallError as error:
            failed.append(error.message)
            continue
        killed.append(sandbox_id)
    if killed:
        output.done("\n".join(f"killed {item}" for item in killed), {"killed": killed})
    if failed:
        raise PaddockError("; ".join(failed))
