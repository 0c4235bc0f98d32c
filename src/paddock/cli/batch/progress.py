"""The progress, task logs and results of a batch."""

import shlex
import sys
import time
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    track,
)

from paddock.cli.http import CallError
from paddock.cli.output import Output, notes, screen
from paddock.cli.target import CliTarget, path_of
from paddock.kit.errors import InvalidError, PaddockError, UnavailableError

_END_PHASES = ("Completed", "Failed")
_TASKS_PORT = 5758
_WATCH_SECONDS = 30.0
_DOWNLOADS = 8
"""How many logs are fetched concurrently."""


def path(namespace: str, name: str = "") -> str:
    """Return the path of all batches or of one."""
    base = f"/apis/paddock.dev/v1alpha1/namespaces/{namespace}/batchsandboxes"
    return f"{base}/{name}" if name else base


def follow(target: CliTarget, namespace: str, name: str, *, quiet: bool) -> dict[str, Any]:
    """Show progress until all tasks have ended; return the final batch."""
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
        shown = ""
        for item in _watch(target, namespace, name):
            status: dict[str, Any] = item.get("status") or {}
            if (why := blocking_reason(status)) and why != shown:
                notes.print(f"batch {name} waits: {why}", markup=False, soft_wrap=True)
            shown = why
            total = int(item["spec"].get("replicas", 1))
            failed = int(status.get("taskFailed", 0))
            done = int(status.get("taskSucceeded", 0)) + failed
            description = f"tasks ({failed} failed)" if failed else "tasks"
            progress.update(
                bars["sandboxes"], completed=max(int(status.get("ready", 0)), done), total=total
            )
            progress.update(bars["tasks"], completed=done, total=total, description=description)
            if status.get("phase") in _END_PHASES:
                return item
    raise UnavailableError(f"batch {name} was deleted before it ended")


def blocking_reason(status: Mapping[str, Any]) -> str:
    """Return why a batch may never be scheduled, or an empty string.

    Raise `InvalidError` if it can never be scheduled.
    """
    message = str(status.get("message") or "")
    for item in status.get("conditions") or ():
        if item["status"] != "True":
            continue
        if item["type"] == "Quarantined":
            raise InvalidError(f"the batch is invalid: {item.get('message')}")
        if item.get("reason") in ("Unsatisfiable", "PoolTooSmall"):
            message = str(item.get("message"))
    return message


def _watch(target: CliTarget, namespace: str, name: str) -> Generator[dict[str, Any]]:
    """Yield the batch now and at every change; reopen the watch when it ends."""
    selector = quote(f"metadata.name={name}")
    while True:
        item = target.kube.call("GET", path(namespace, name))
        yield item
        version = item["metadata"]["resourceVersion"]
        watch = f"{path(namespace)}?watch=true&fieldSelector={selector}&resourceVersion={version}"
        started = time.monotonic()
        try:
            with target.kube.open("GET", watch, timeout_seconds=_WATCH_SECONDS) as response:
                for line in response:
                    event = msgspec.json.decode(line)
                    if event["type"] == "DELETED":
                        return
                    if event["type"] in ("ADDED", "MODIFIED"):
                        yield event["object"]
        except (UnavailableError, CallError):
            # The watch was idle too long or is too old: read again, at most twice per second.
            time.sleep(max(0.0, 0.5 - (time.monotonic() - started)))


def collect(target: CliTarget, item: Mapping[str, Any], directory: Path) -> None:
    """Download the full output of each task."""
    directory.mkdir(parents=True, exist_ok=True)
    uid, name = item["metadata"]["uid"][:8], item["metadata"]["name"]
    shards = {
        allocation["shard"]: str(allocation["sandboxId"])
        for allocation in item["status"].get("allocations", [])
        if allocation.get("sandboxId")
    }

    def fetch(shard: int, sandbox_id: str) -> str | None:
        """Write one log; return the problem, if any."""
        try:
            token = target.e2b.call("GET", path_of(sandbox_id)).get("envdAccessToken")
            endpoint = target.sandbox(sandbox_id, token, port=_TASKS_PORT)
            with endpoint.open("GET", f"/tasks/{name}-{shard}-{uid}/log") as response:
                (directory / f"{shard}.log").write_bytes(response.read())
        except PaddockError as error:
            # The sandbox may have ended: the other logs and all results are still shown.
            return f"no log of shard {shard}: {error.message}"
        return None

    with ThreadPoolExecutor(_DOWNLOADS) as threads:
        problems = track(
            threads.map(fetch, shards, shards.values()),
            description="logs",
            total=len(shards),
            console=notes,
            transient=True,
            disable=not notes.is_terminal,
        )
        for problem in problems:
            if problem:
                notes.print(problem, markup=False, soft_wrap=True)


def show(output: Output, item: Mapping[str, Any]) -> None:
    """Print the result of each task with the stored part of its output."""
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
