"""`paddock batch`: runs one command in many sandboxes, with progress, logs and an exit code."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import click

from paddock.cli.batch.progress import collect, follow, path, show
from paddock.cli.click_ext import examples, pairs
from paddock.cli.context import with_target
from paddock.cli.output import Output, notes
from paddock.cli.target import CliTarget
from paddock.kit import ids
from paddock.kit.errors import InvalidError, PaddockError


@click.group()
def batch() -> None:
    """Run a command in many sandboxes."""


_LOGS = click.option(
    "--logs",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the full output of each task to a file in this directory.",
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
    help="Run in this many sandboxes.",
)
@click.option(
    "--pool",
    default="base",
    show_default=True,
    help="Take sandboxes from this pool; * is any that fits.",
)
@click.option("--name", help="Set the name of the batch.  [default: generated]")
@click.option("--namespace", "-n", default="default", show_default=True, help="Set the namespace.")
@click.option(
    "--timeout",
    type=click.IntRange(min=1),
    help="End each task after this many seconds.  [default: no limit]",
)
@click.option(
    "--attempts",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Run each task at most this many times.",
)
@click.option(
    "--env", "-e", multiple=True, help="Set an environment variable NAME=VALUE for all tasks."
)
@click.option("--workdir", help="Run tasks in this directory.")
@click.option(
    "--priority", default=0, show_default=True, help="Set the priority; higher is served first."
)
@click.option("--all-or-nothing", is_flag=True, help="Start only when all sandboxes are available.")
@click.option("--release", is_flag=True, help="Release each sandbox when its task is done.")
@click.option("--keep", is_flag=True, help="Keep the batch afterwards.")
@_LOGS
@click.argument("command", nargs=-1, required=True)
@with_target
def run(target: CliTarget, output: Output, command: tuple[str, ...], **wanted: Any) -> None:
    """Run COMMAND once in each of many sandboxes; exit with 0 if all succeed, else with 1.

    A single argument is a shell command line; several are a program and its arguments. The number
    of each task is in PADDOCK_SHARD. Ctrl-C deletes the batch.
    """
    if wanted["release"] and wanted["logs"]:
        raise InvalidError("--logs needs the sandboxes: omit --release")
    if wanted["logs"] is not None:
        wanted["logs"].mkdir(parents=True, exist_ok=True)  # fail before anything runs
    name = wanted["name"] or f"run-{ids.name_suffix(8)}"
    namespace: str = wanted["namespace"]
    target.kube.call("POST", path(namespace), manifest(name, command, wanted))
    try:
        final = follow(target, namespace, name, quiet=output.is_json)
        if wanted["logs"] is not None:
            collect(target, final, wanted["logs"])
    finally:
        if not wanted["keep"]:
            _delete(target, namespace, name)
    _conclude(output, final)


@batch.command(
    "wait", epilog=examples("paddock apply -f rollouts.yaml && paddock batch wait rollouts")
)
@click.option("--namespace", "-n", default="default", show_default=True, help="Set the namespace.")
@_LOGS
@click.argument("name")
@with_target
def wait(target: CliTarget, output: Output, namespace: str, logs: Path | None, name: str) -> None:
    """Wait until all tasks of a batch have ended, show them, and exit as `batch run` does.

    The batch is not deleted, not even by Ctrl-C.
    """
    item = target.kube.call("GET", path(namespace, name))
    if not item["spec"].get("taskTemplate"):
        raise InvalidError(f"batch {name} has no tasks to wait for")
    if logs is not None and item["spec"].get("taskResourcePolicyWhenCompleted") == "Release":
        raise InvalidError(f"--logs needs the sandboxes, but batch {name} releases them")
    final = follow(target, namespace, name, quiet=output.is_json)
    if logs is not None:
        collect(target, final, logs)
    _conclude(output, final)


def _conclude(output: Output, final: Mapping[str, Any]) -> NoReturn:
    show(output, final)
    failed = int(final["status"].get("taskFailed", 0))
    sys.exit(1 if failed or final["status"].get("phase") != "Completed" else 0)


def manifest(name: str, command: tuple[str, ...], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the BatchSandbox."""
    env = [{"name": name, "value": value} for name, value in pairs(wanted["env"], "--env").items()]
    # A single argument is a shell command line; several are a program and its arguments.
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


def _delete(target: CliTarget, namespace: str, name: str) -> None:
    try:
        target.kube.call("DELETE", path(namespace, name))
    except PaddockError as error:
        notes.print(f"batch {name} was not deleted: {error.message}")
