"""`paddock batch`: one command in many sandboxes, with progress, outputs and an exit code."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import click

from paddock.cli.batch.progress import collect, follow, path, show
from paddock.cli.click_ext import examples, pairs
from paddock.cli.context import with_place
from paddock.cli.output import Output, notes
from paddock.cli.target import Place
from paddock.kit import ids
from paddock.kit.errors import InvalidError, PaddockError


@click.group()
def batch() -> None:
    """Many sandboxes as one object, each with its task."""


_LOGS = click.option(
    "--logs",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write each task's whole output to a file here.",
)


@batch.command(
    "run",
    epilog=examples(
        "paddock batch run --replicas 100 --logs out -- 'python3 rollout.py --seed $PADDOCK_SHARD'",
        "paddock batch run -r 1000 --pool agents --attempts 3 --timeout 600 --release -- make test",
    ),
)
@click.option(
    "--replicas",
    "-r",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many sandboxes.",
)
@click.option("--pool", default="base", show_default=True, help="Where from; * is any that fits.")
@click.option("--name", help="Of the batch.  [default: made up]")
@click.option("--namespace", "-n", default="default", show_default=True)
@click.option("--timeout", type=click.IntRange(min=1), help="Seconds each task may take.")
@click.option(
    "--attempts",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How often a task is tried.",
)
@click.option("--env", "-e", multiple=True, help="NAME=VALUE for every task.")
@click.option("--workdir", help="Where tasks run.")
@click.option("--priority", default=0, show_default=True, help="Higher is served first.")
@click.option("--all-or-nothing", is_flag=True, help="Begin only when all can begin.")
@click.option("--release", is_flag=True, help="Give each sandbox back as soon as it is done.")
@click.option("--keep", is_flag=True, help="Leave the batch there afterwards.")
@_LOGS
@click.argument("command", nargs=-1, required=True)
@with_place
def run(place: Place, output: Output, command: tuple[str, ...], **wanted: Any) -> None:
    """Run COMMAND once in each of many sandboxes; exit with 0 if all succeeded, else with 1.

    One word is a line for the shell, several are a program and its arguments. Each task finds its
    number in PADDOCK_SHARD. Ctrl-C deletes the batch.
    """
    if wanted["release"] and wanted["logs"]:
        raise InvalidError("--logs needs the sandboxes: leave --release out")
    if wanted["logs"] is not None:
        wanted["logs"].mkdir(parents=True, exist_ok=True)  # where it cannot be, nothing is run
    name = wanted["name"] or f"run-{ids.name_suffix(8)}"
    namespace: str = wanted["namespace"]
    place.kube.call("POST", path(namespace), manifest(name, command, wanted))
    try:
        final = follow(place, namespace, name, quiet=output.is_json)
        if wanted["logs"] is not None:
            collect(place, final, wanted["logs"])
    finally:
        if not wanted["keep"]:
            _delete(place, namespace, name)
    _conclude(output, final)


@batch.command(
    "wait", epilog=examples("paddock apply -f rollouts.yaml && paddock batch wait rollouts")
)
@click.option("--namespace", "-n", default="default", show_default=True)
@_LOGS
@click.argument("name")
@with_place
def wait(place: Place, output: Output, namespace: str, logs: Path | None, name: str) -> None:
    """Wait until every task of a batch is over, show them, and exit as `batch run` does.

    The batch stays; so it does on Ctrl-C.
    """
    item = place.kube.call("GET", path(namespace, name))
    if not item["spec"].get("taskTemplate"):
        raise InvalidError(f"batch {name} has no tasks: there is nothing to wait for")
    if logs is not None and item["spec"].get("taskResourcePolicyWhenCompleted") == "Release":
        raise InvalidError(f"--logs needs the sandboxes, which batch {name} gives back")
    final = follow(place, namespace, name, quiet=output.is_json)
    if logs is not None:
        collect(place, final, logs)
    _conclude(output, final)


def _conclude(output: Output, final: Mapping[str, Any]) -> NoReturn:
    show(output, final)
    failed = int(final["status"].get("taskFailed", 0))
    sys.exit(1 if failed or final["status"].get("phase") != "Completed" else 0)


def manifest(name: str, command: tuple[str, ...], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Write the batch that is asked for."""
    env = [{"name": name, "value": value} for name, value in pairs(wanted["env"], "--env").items()]
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


def _delete(place: Place, namespace: str, name: str) -> None:
    try:
        place.kube.call("DELETE", path(namespace, name))
    except PaddockError as error:
        notes.print(f"batch {name} was not deleted: {error.message}")
