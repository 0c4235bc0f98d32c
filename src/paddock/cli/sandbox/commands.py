"""`paddock sandbox`: create, list, show, pause, resume, fork and kill sandboxes."""

from datetime import UTC
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import click
import msgspec

from paddock.cli.click_ext import examples, pairs
from paddock.cli.context import with_target
from paddock.cli.http import CallError
from paddock.cli.output import Output, age, notes, screen, until
from paddock.cli.sandbox.exec import copy, execute, shell
from paddock.cli.target import CliTarget, delete_each, path_of
from paddock.kit.clock import system
from paddock.kit.errors import PaddockError


class _Sandboxes(click.Group):
    """Adds a hint if a sandbox does not exist."""

    def invoke(self, ctx: click.Context) -> object:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except CallError as error:
            # Not for files in the sandbox that do not exist.
            if error.status == HTTPStatus.NOT_FOUND and error.message.startswith("sandbox "):
                error.hint = "`paddock sandbox ls` lists sandboxes"
            raise


@click.group(cls=_Sandboxes)
def sandbox() -> None:
    """Create, use, pause, fork and kill sandboxes."""


@sandbox.command(
    "create",
    epilog=examples(
        "ID=$(paddock sandbox create --timeout 3600 --metadata run=17)",
        "paddock sandbox create python --env SEED=7 --pause-at-end --wake",
    ),
)
@click.argument("template", default="base")
@click.option(
    "--timeout", default=300, show_default=True, help="End the sandbox after this many seconds."
)
@click.option("--env", "-e", multiple=True, help="Set an environment variable NAME=VALUE.")
@click.option("--metadata", "-m", multiple=True, help="Set metadata NAME=VALUE.")
@click.option(
    "--pause-at-end", is_flag=True, help="Pause the sandbox at its end instead of killing it."
)
@click.option("--wake", is_flag=True, help="Resume the sandbox on traffic; needs --pause-at-end.")
@with_target
def create(
    target: CliTarget,
    output: Output,
    template: str,
    timeout: int,
    env: tuple[str, ...],
    metadata: tuple[str, ...],
    pause_at_end: bool,
    wake: bool,
) -> None:
    """Create a sandbox from TEMPLATE and print its id.

    TEMPLATE is a template, a pool or an environment.  [default: base]
    """
    if wake and not pause_at_end:
        raise click.UsageError("--wake needs --pause-at-end: a killed sandbox cannot resume")
    body: dict[str, Any] = {
        "templateID": template,
        "timeout": timeout,
        "envVars": pairs(env, "--env"),
        "metadata": pairs(metadata, "--metadata"),
        "autoPause": pause_at_end,
        "autoResume": {"enabled": wake},
    }
    try:
        made = target.e2b.call("POST", "/v2/sandboxes", body)
    except CallError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            error.hint = "`paddock get templates` and `paddock get envs` list the names"
        raise
    output.done(made["sandboxID"], made)


@sandbox.command("ls")
@click.option(
    "--state", type=click.Choice(["running", "paused"]), help="List only sandboxes in this state."
)
@click.option(
    "--metadata", "-m", multiple=True, help="List only sandboxes with metadata NAME=VALUE."
)
@with_target
def list_sandboxes(
    target: CliTarget, output: Output, state: str | None, metadata: tuple[str, ...]
) -> None:
    """List sandboxes."""
    wanted = "&".join(
        f"{quote(quote(name))}={quote(quote(value))}"
        for name, value in pairs(metadata, "--metadata").items()
    )
    query = f"?limit=100&metadata={quote(wanted)}" + (f"&state={state}" if state else "")
    items: list[Any] = []
    token = ""
    while True:
        with target.e2b.open("GET", f"/v2/sandboxes{query}{token}") as response:
            items += msgspec.json.decode(response.read())
            next_token = response.headers.get("X-Next-Token")
        if not next_token:
            break
        token = f"&nextToken={quote(next_token)}"
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
                until(item["endAt"], now, is_paused=item["state"] == "paused"),
                " ".join(f"{key}={value}" for key, value in item["metadata"].items()),
            )
            for item in items
        ),
    )


@sandbox.command("logs")
@click.argument("sandbox_id")
@click.option("--limit", default=1000, show_default=True, help="Show at most this many lines.")
@with_target
def sandbox_logs(target: CliTarget, output: Output, sandbox_id: str, limit: int) -> None:
    """Show the log of a sandbox."""
    path = f"/v2{path_of(sandbox_id)}/logs?direction=backward&limit={limit}"
    entries = target.e2b.call("GET", path)["logs"][::-1]
    if output.is_json:
        output.data(entries)
        return
    for entry in entries:
        text = f"{entry['timestamp']} {entry['level']:5} {entry['message']}"
        screen.print(text, markup=False, soft_wrap=True)


@sandbox.command("network")
@click.argument("sandbox_id")
@with_target
def network(target: CliTarget, output: Output, sandbox_id: str) -> None:
    """Show the network policy in effect, and where each part of it comes from."""
    shown = target.e2b.call("GET", f"{path_of(sandbox_id)}/network")
    parts = [{**shown, "source": "in effect"}, *shown["parts"]]
    output.rows(
        shown,
        (
            "source",
            "internet",
            "allowed",
            "denied",
            "dns",
            "private networks",
            "ports",
            "to sandbox",
            "from sandbox",
        ),
        (_network_row(part) for part in parts),
    )


def _network_row(part: dict[str, Any]) -> tuple[str, ...]:
    rules = part.get("network")
    if rules is None:
        return (part["source"], part["internet"], "", "", "", "", "", *_rates(part))
    return (
        part["source"] + (" (exceeds its template)" if part.get("exceedsTemplate") else ""),
        "open" if part["allowInternetAccess"] else "closed",
        " ".join(rules.get("allowOut", ())) or "-",
        " ".join(rules.get("denyOut", ())) or "-",
        " ".join(rules.get("dnsServers", ())) or "-",
        "yes" if part["allowPrivateNetworks"] else "no",
        "public" if rules.get("allowPublicTraffic", True) else "with token",
        *_rates(part),
    )


def _rates(part: dict[str, Any]) -> tuple[str, str]:
    found = (part.get("ingressBandwidth"), part.get("egressBandwidth"))
    to_sandbox, from_sandbox = (f"{rate / 1e6:g} Mbit/s" if rate else "-" for rate in found)
    return to_sandbox, from_sandbox


@sandbox.command("pause")
@click.argument("sandbox_id")
@click.option("--files-only", is_flag=True, help="Keep files, but end processes.")
@with_target
def pause(target: CliTarget, output: Output, sandbox_id: str, files_only: bool) -> None:
    """Pause a sandbox; files, memory and processes are kept."""
    target.e2b.call("POST", f"{path_of(sandbox_id)}/pause", {"memory": not files_only})
    output.done(f"paused {sandbox_id}", {"paused": sandbox_id})


@sandbox.command("resume")
@click.argument("sandbox_id")
@click.option(
    "--timeout", default=300, show_default=True, help="End the sandbox after this many seconds."
)
@with_target
def resume(target: CliTarget, output: Output, sandbox_id: str, timeout: int) -> None:
    """Resume a sandbox, or extend the timeout of a running one."""
    made = target.e2b.call("POST", f"/v2{path_of(sandbox_id)}/connect", {"timeout": timeout})
    output.done(f"running {sandbox_id}", made)


@sandbox.command("fork")
@click.argument("sandbox_id")
@click.option("--count", default=1, show_default=True, help="Create this many clones.")
@click.option(
    "--timeout", default=300, show_default=True, help="End the clones after this many seconds."
)
@with_target
def fork(target: CliTarget, output: Output, sandbox_id: str, count: int, timeout: int) -> None:
    """Clone a running sandbox with its files, memory and processes; print the ids."""
    body = {"count": count, "timeout": timeout}
    with notes.status(f"forking {sandbox_id}"):
        results = target.e2b.call("POST", f"{path_of(sandbox_id)}/fork", body)
    ids = [item["sandbox"]["sandboxID"] for item in results if "sandbox" in item]
    output.done("\n".join(ids), results)
    failed = [item["error"]["message"] for item in results if "error" in item]
    if failed:
        raise PaddockError(f"{len(failed)} of {count} clones could not be created: {failed[0]}")


@sandbox.command("kill")
@click.argument("sandbox_ids", nargs=-1, required=True)
@with_target
def kill(target: CliTarget, output: Output, sandbox_ids: tuple[str, ...]) -> None:
    """Kill sandboxes, running or paused."""
    delete_each(target, output, sandbox_ids, path_of=path_of, done="killed")


for _command in (execute, shell, copy):
    sandbox.add_command(_command)
