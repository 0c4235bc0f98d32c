"""`paddock batch`: one command in many sandboxes, with progress, outputs and an exit code."""

import shlex
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paddock.cli.context import with_place
from paddock.cli.http import CallError
from paddock.cli.output import Output, notes, screen
from paddock.cli.place import Place
from paddock.kit import ids
from paddock.kit.errors import InvalidError, PaddockError, UnavailableError

_OVER = ("Completed", "Failed")
_TASKS_PORT = 5758
_LOOK_SECONDS = 30.0


@click.group()
def batch() -> None:
    """Many sandboxes as one object, each with its task."""


def _path(namespace: str, name: str = "") -> str:
    base = f"/apis/paddock.dev/v1alpha1/namespaces/{namespace}/batchsandboxes"
    return f"{base}/{name}" if name else base


@batch.command("run")
@click.option("--replicas", "-r", default=1, show_default=True, help="How many sandboxes.")
@click.option("--pool", default="base", show_default=True, help="Where from; * is any that fits.")
@click.option("--name", help="Of the batch.  [default: made up]")
@click.option("--namespace", "-n", default="default", show_default=True)
@click.option("--timeout", type=int, help="Seconds each task may take.")
@click.option("--attempts", default=1, show_default=True, help="How often a task is tried.")
@click.option("--env", "-e", multiple=True, help="NAME=VALUE for every task.")
@click.option("--workdir", help="Where tasks run.")
@click.option("--priority", default=0, show_default=True, help="Higher is served first.")
@click.option("--all-or-nothing", is_flag=True, help="Begin only when all can begin.")
@click.option("--release", is_flag=True, help="Give each sandbox back as soon as it is done.")
@click.option("--keep", is_flag=True, help="Leave the batch there afterwards.")
@click.option(
    "--logs",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write each task's whole output to a file here.",
)
@click.argument("command", nargs=-1, required=True)
@with_place
def run(place: Place, output: Output, command: tuple[str, ...], **wanted: Any) -> None:
    """Run COMMAND once in each of many sandboxes; exit with 0 if all succeeded, else with 1."""
    if wanted["release"] and wanted["logs"]:
        raise InvalidError("--logs needs the sandboxes: leave --release out")
    name = wanted["name"] or f"run-{ids.name_suffix(8)}"
    namespace: str = wanted["namespace"]
    place.kube.call("POST", _path(namespace), manifest(name, command, wanted))
    try:
        final = _follow(place, namespace, name, quiet=output.is_json)
        if wanted["logs"] is not None:
            _collect(place, final, wanted["logs"])
    finally:
        if not wanted["keep"]:
            _delete(place, namespace, name)
    _show(output, final)
    failed = int(final["status"].get("taskFailed", 0))
    sys.exit(1 if failed or final["status"].get("phase") != "Completed" else 0)


def manifest(name: str, command: tuple[str, ...], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Write the batch that is asked for."""
    env: list[dict[str, str]] = []
    for item in wanted["env"]:
        variable, equals, value = item.partition("=")
        if not equals or not variable:
            raise InvalidError(f"--env wants NAME=VALUE, not {item!r}")
        env.append({"name": variable, "value": value})
    # One word is a line for the shell; several are a program and its arguments.
    argv = ["/bin/sh", "-c", command[0]] if len(command) == 1 else list(command)
    process: dict[str, Any] = {"command": argv, "env": env}
    if wanted["workdir"]:
        process["workingDir"] = wanted["workdir"]
    task: dict[str, Any] = {"process": process, "maxAttempts": wanted["attempts"]}
    if wanted["timeout"]:
        task["timeoutSeconds"] = wanted["timeout"]
    spec: dict[str, Any] = {
        "replicas": wanted["replicas"],
        "poolRef": wanted["pool"],
        "priority": wanted["priority"],
        "taskTemplate": {"spec": task},
        "taskResourcePolicyWhenCompleted": "Release" if wanted["release"] else "Retain",
    }
    if wanted["all_or_nothing"]:
        spec["minAvailable"] = max(wanted["replicas"], 1)
    return {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "BatchSandbox",
        "metadata": {"name": name, "namespace": wanted["namespace"]},
        "spec": spec,
    }


def _follow(place: Place, namespace: str, name: str, *, quiet: bool) -> dict[str, Any]:
    """Show progress until every task is over; gives the batch as it is then."""
    total = 0
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=notes,
        transient=True,
        disable=not notes.is_terminal,
    )
    with nullcontext() if quiet else progress:
        bars = {key: progress.add_task(key, total=None) for key in ("sandboxes", "tasks")}
        told = ""
        for item in _watch(place, namespace, name):
            status: dict[str, Any] = item.get("status") or {}
            if (why := hindrance(status)) and why != told:
                notes.print(f"batch {name} waits: {why}", markup=False, soft_wrap=True)
            told = why
            total = int(item["spec"].get("replicas", 1))
            failed = int(status.get("taskFailed", 0))
            done = int(status.get("taskSucceeded", 0)) + failed
            words = f"tasks ({failed} failed)" if failed else "tasks"
            progress.update(
                bars["sandboxes"], completed=max(int(status.get("ready", 0)), done), total=total
            )
            progress.update(bars["tasks"], completed=done, total=total, description=words)
            if status.get("phase") in _OVER:
                return item
    raise UnavailableError(f"batch {name} is gone before it was done")


def hindrance(status: Mapping[str, Any]) -> str:
    """Say what keeps a batch from going on that waiting alone may not cure; empty if nothing.

    `InvalidError` where it can never go on.
    """
    message = str(status.get("message") or "")
    for item in status.get("conditions") or ():
        if item["status"] != "True":
            continue
        if item["type"] == "Quarantined":
            raise InvalidError(f"the batch makes no sense: {item.get('message')}")
        if item.get("reason") in ("Unsatisfiable", "PoolTooSmall"):
            message = str(item.get("message"))
    return message


def _watch(place: Place, namespace: str, name: str) -> Generator[dict[str, Any]]:
    """Give the batch now and at every change; opens the watch again when it ends."""
    selector = quote(f"metadata.name={name}")
    while True:
        item = place.kube.call("GET", _path(namespace, name))
        yield item
        version = item["metadata"]["resourceVersion"]
        path = f"{_path(namespace)}?watch=true&fieldSelector={selector}&resourceVersion={version}"
        started = time.monotonic()
        try:
            with place.kube.open("GET", path, timeout_seconds=_LOOK_SECONDS) as response:
                for line in response:
                    event = msgspec.json.decode(line)
                    if event["type"] == "DELETED":
                        return
                    if event["type"] in ("ADDED", "MODIFIED"):
                        yield event["object"]
        except (UnavailableError, CallError):
            # Quiet for too long, or too far behind: look anew, but never in a hurry.
            time.sleep(max(0.0, 0.5 - (time.monotonic() - started)))


def _delete(place: Place, namespace: str, name: str) -> None:
    try:
        place.kube.call("DELETE", _path(namespace, name))
    except PaddockError as error:
        notes.print(f"batch {name} was not deleted: {error.message}")


def _collect(place: Place, item: Mapping[str, Any], directory: Path) -> None:
    """Download the whole output of each task."""
    directory.mkdir(parents=True, exist_ok=True)
    uid = item["metadata"]["uid"][:8]
    name = item["metadata"]["name"]
    for allocation in item["status"].get("allocations", []):
        shard, sandbox_id = allocation["shard"], allocation.get("sandboxId")
        if not sandbox_id:
            continue
        try:
            token = place.e2b.call("GET", f"/sandboxes/{sandbox_id}").get("envdAccessToken")
            endpoint = place.sandbox(sandbox_id, token, port=_TASKS_PORT)
            with endpoint.open("GET", f"/tasks/{name}-{shard}-{uid}/log") as response:
                (directory / f"{shard}.log").write_bytes(response.read())
        except PaddockError as error:
            # Its sandbox went meanwhile, say: the others' logs and all results are still shown.
            notes.print(f"no log of shard {shard}: {error.message}", markup=False, soft_wrap=True)


def _show(output: Output, item: Mapping[str, Any]) -> None:
    status: Mapping[str, Any] = item["status"]
    if output.is_json:
        output.data(item)
        return
    for task in status.get("tasks", []):
        text = task.get("outputHead", "")
        tail = task.get("outputTail", "")
        if tail:
            text += f"\n…\n{tail}"
        head = f"shard {task['shard']}: {task['state']}"
        ended = f"exit code {task['exitCode']}" if task.get("exitCode") else ""
        if ended:
            head += f", {ended}"
        if task["state"] != "Succeeded" and task.get("message") not in (None, "", ended):
            head += f" ({task['message']})"
        if text or task["state"] != "Succeeded":
            screen.print(f"[bold]{head}[/]", soft_wrap=True)
            sys.stdout.write(text if text.endswith("\n") or not text else text + "\n")
            sys.stdout.flush()
    done, failed = status.get("taskSucceeded", 0), status.get("taskFailed", 0)
    notes.print(f"{done} succeeded, {failed} failed: {shlex.quote(item['metadata']['name'])}")
