"""`paddock template ls|history|rollback|tag|delete|logs`: templates and their builds."""

import time
from datetime import UTC
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import click
import msgspec

from paddock.cli.click_ext import examples
from paddock.cli.context import with_target
from paddock.cli.http import CallError
from paddock.cli.output import Output, age, screen
from paddock.cli.target import CliTarget, delete_each
from paddock.cli.template.api import BuildApi
from paddock.kit.clock import system
from paddock.kit.errors import ConflictError, NotFoundError, PaddockError

_DEFAULT_TAG = "default"
_FOLLOW_SECONDS = 0.5


@click.command("ls")
@with_target
def list_templates(target: CliTarget, output: Output) -> None:
    """List the templates that you may use."""
    items: list[Any] = []
    token = ""
    while True:
        with target.e2b.open("GET", f"/v2/templates?limit=100{token}") as response:
            items += msgspec.json.decode(response.read())
            next_token = response.headers.get("X-Next-Token")
        if not next_token:
            break
        token = f"&nextToken={quote(next_token)}"
    now = system().now().astimezone(UTC)
    output.rows(
        items,
        ("name", "build", "status", "builds", "cpu", "memory", "public", "updated"),
        (
            (
                (item["names"] or [item["templateID"]])[0],
                item["buildID"],
                item["buildStatus"],
                str(item["buildCount"]),
                str(item["cpuCount"]),
                f"{item['memoryMB']}Mi",
                "yes" if item["public"] else "no",
                age(item["updatedAt"], now),
            )
            for item in items
        ),
    )


@click.command("history")
@click.argument("name")
@with_target
def history(target: CliTarget, output: Output, name: str) -> None:
    """List the builds of a template, newest first. The current one is marked with *."""
    found, tags = _template(target, name), _tags(target, name)
    builds: list[Any] = found["builds"]
    of_build: dict[str, list[str]] = {item["buildID"]: [] for item in builds}
    for tag, build in tags.items():
        of_build.setdefault(build, []).append(tag)
    now = system().now().astimezone(UTC)
    current = tags.get(_DEFAULT_TAG)
    output.rows(
        [{**item, "tags": of_build[item["buildID"]]} for item in builds],
        ("build", "status", "tags", "cpu", "memory", "age"),
        (
            (
                item["buildID"] + ("*" if item["buildID"] == current else ""),
                item["status"],
                ", ".join(of_build[item["buildID"]]) or "-",
                str(item["cpuCount"]),
                f"{item['memoryMB']}Mi",
                age(item["createdAt"], now),
            )
            for item in builds
        ),
    )


@click.command("rollback", epilog=examples("paddock template rollback web"))
@click.argument("name")
@click.argument("build", required=False)
@with_target
def rollback(target: CliTarget, output: Output, name: str, build: str | None) -> None:
    """Make an earlier build the current one.  [default: the last ready build before it]

    Pools of the template replace their idle sandboxes. Sandboxes that are in use stay.
    """
    chosen = build or _build_before(_template(target, name)["builds"], _tags(target, name), name)
    made = target.e2b.call(
        "POST", "/templates/tags", {"target": f"{name}:{chosen}", "tags": [_DEFAULT_TAG]}
    )
    output.done(f"{name} is build {made['buildID']} now", made)


def _build_before(builds: list[Any], tags: dict[str, str], name: str) -> str:
    """Return the newest ready build of the default before the current one.

    Builds with other tags, such as stages of a Dockerfile, were never what the name stood for.
    """
    ids = [
        item["buildID"]
        for item in builds
        if item["buildID"] == tags.get(_DEFAULT_TAG)
        or (item["status"] == "ready" and _DEFAULT_TAG in item["tags"])
    ]
    current = tags.get(_DEFAULT_TAG)
    older = ids[ids.index(current) + 1 :] if current in ids else []
    if not older:
        raise ConflictError(
            f"template {name} has no ready build before the current one",
            hint=f"`paddock template history {name}` lists the builds",
        )
    return older[0]


@click.command(
    "tag",
    epilog=examples(
        "paddock template tag web production", "paddock template tag web:v2 production --remove"
    ),
)
@click.argument("name")
@click.argument("tags", nargs=-1, required=True)
@click.option("--remove", is_flag=True, help="Remove the tags instead.")
@with_target
def tag(target: CliTarget, output: Output, name: str, tags: tuple[str, ...], remove: bool) -> None:
    """Assign tags to the build that NAME, NAME:TAG or NAME:BUILD stands for."""
    names = ", ".join(tags)
    if remove:
        plain = name.partition(":")[0]
        target.e2b.call("DELETE", "/templates/tags", {"name": plain, "tags": list(tags)})
        output.done(f"removed {names} from {plain}", {"name": plain, "removed": list(tags)})
        return
    made = target.e2b.call("POST", "/templates/tags", {"target": name, "tags": list(tags)})
    output.done(f"{names}: build {made['buildID']}", made)


@click.command("delete")
@click.argument("names", nargs=-1, required=True)
@with_target
def delete(target: CliTarget, output: Output, names: tuple[str, ...]) -> None:
    """Delete templates with their builds."""
    delete_each(target, output, names, path_of=_path, done="deleted")


@click.command("logs")
@click.argument("name")
@click.argument("build", required=False)
@click.option("--follow", "-f", is_flag=True, help="Follow the log until the build ends.")
@with_target
def logs(target: CliTarget, output: Output, name: str, build: str | None, follow: bool) -> None:
    """Show the log of a build.  [default: the newest]

    With --follow, the exit code is 1 if the build fails.
    """
    api = BuildApi(target.e2b)
    chosen = build or _newest(_template(target, name)["builds"], name)
    entries: list[Any] = []
    while True:
        status = api.status(name, chosen, len(entries))
        for entry in status["logEntries"]:
            entries.append(entry)
            if not output.is_json:
                text = f"{entry['timestamp']} {entry['level']:5} {entry['message']}"
                screen.print(text, markup=False, soft_wrap=True)
        if status["logEntries"]:
            continue
        if not follow or status["status"] in ("ready", "error"):
            break
        time.sleep(_FOLLOW_SECONDS)
    if output.is_json:
        output.data({**status, "logEntries": entries})
    if follow and status["status"] == "error":
        raise PaddockError(f"build {chosen} failed: {status['reason']['message']}")


def _newest(builds: list[Any], name: str) -> str:
    if not builds:
        raise NotFoundError(f"template {name} has no builds")
    return str(builds[0]["buildID"])


def _template(target: CliTarget, name: str) -> dict[str, Any]:
    try:
        return target.e2b.call("GET", _path(name))
    except CallError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            error.hint = "`paddock template ls` lists the templates"
        raise


def _tags(target: CliTarget, name: str) -> dict[str, str]:
    """Return the build of each tag."""
    found = target.e2b.call("GET", f"{_path(name)}/tags")
    return {str(item["tag"]): str(item["buildID"]) for item in found}


def _path(name: str) -> str:
    return f"/templates/{quote(name, safe='')}"


COMMANDS = (list_templates, history, rollback, tag, delete, logs)
