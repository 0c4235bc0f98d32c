"""`paddock get`, `describe`, `apply` and `delete`: resources of the declarative API."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import click
import yaml

from paddock.cli.click_ext import examples
from paddock.cli.context import with_target
from paddock.cli.http import CallError
from paddock.cli.output import Output, age, screen, until
from paddock.cli.target import CliTarget
from paddock.kit.clock import system
from paddock.kit.errors import InvalidError, PaddockError
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.registry import Column, KindInfo, info_for

_SHORT = {
    short: f"sandbox{short if short.endswith('s') else short + 's'}"
    for word in ("pool", "template", "claim", "env")
    for short in (word, f"{word}s")
} | {"batch": "batchsandboxes", "batches": "batchsandboxes"}


def _path(info: KindInfo, namespace: str, name: str | None = None) -> str:
    group = info.cls.API_VERSION
    base = f"/api/{group}" if "/" not in group else f"/apis/{group}"
    if info.cls.NAMESPACED and namespace:
        base += f"/namespaces/{namespace}"
    return f"{base}/{info.cls.PLURAL}" + (f"/{name}" if name else "")


def _split(kind: str, name: str | None) -> tuple[KindInfo, str | None]:
    prefix, slash, rest = kind.partition("/")
    return _info(prefix), rest if slash else name


def _info(kind: str) -> KindInfo:
    """Return a kind by any of its names; `sandbox` at the start may be omitted."""
    return info_for(_SHORT.get(kind.lower(), kind))


def _at(item: Any, path: Sequence[str]) -> Any:
    for part in path:
        if not isinstance(item, dict):
            return None
        item = cast("dict[str, Any]", item).get(part.replace("\0", "."))
    return item


def _cell(item: Mapping[str, Any], column: Column, now: datetime) -> str:
    value = _at(item, column.path.replace(r"\.", "\0").strip(".").split("."))
    if value is None:
        return "-"
    return age(str(value), now) if column.type == "date" else str(value)


def _ends_in(item: Mapping[str, Any], now: datetime) -> str:
    """Return when a sandbox is paused or deleted; one that waits in a pool has no end."""
    spec = item["spec"]
    if end := spec.get("pauseTime") or spec.get("shutdownTime"):
        return until(end, now)
    return "never" if spec.get("claim") else "-"


@click.command(
    epilog=examples(
        "paddock get pools",
        "paddock get sandboxes -A --selector paddock.dev/pool=base",
        "paddock get batch rollouts -o json",
    )
)
@click.argument("kind")
@click.argument("name", required=False)
@click.option("--namespace", "-n", default="default", show_default=True, help="Set the namespace.")
@click.option("--all-namespaces", "-A", is_flag=True, help="List the resources of all namespaces.")
@click.option("--selector", "-l", help="List only resources with these labels, such as a=b,c!=d.")
@with_target
def get(
    target: CliTarget,
    output: Output,
    kind: str,
    name: str | None,
    namespace: str,
    all_namespaces: bool,
    selector: str | None,
) -> None:
    """Show resources: sandboxes, pools, templates, claims, envs, batches, checkpoints, events."""
    info, wanted = _split(kind, name)
    if wanted and (all_namespaces or selector):
        raise click.UsageError("NAME cannot be combined with --all-namespaces or --selector")
    query = f"?labelSelector={quote(selector)}" if selector else ""
    path = _path(info, "" if all_namespaces else namespace, wanted)
    response = target.kube.call("GET", path + query)
    items: list[Any] = [response] if wanted else response["items"]
    now = system().now().astimezone(UTC)
    columns = [column for column in info.columns if column.priority == 0]
    ends = ("ends in",) if info.cls is Sandbox else ()
    names = ("namespace", "name") if all_namespaces and info.cls.NAMESPACED else ("name",)
    output.rows(
        response if wanted else items,
        (*names, *(column.name for column in columns), *ends),
        (
            (
                *(item["metadata"][each] for each in names),
                *(_cell(item, column, now) for column in columns),
                *(_ends_in(item, now) for _ in ends),
            )
            for item in items
        ),
    )


@click.command()
@click.argument("kind")
@click.argument("name", required=False)
@click.option("--namespace", "-n", default="default", show_default=True, help="Set the namespace.")
@with_target
def describe(
    target: CliTarget, output: Output, kind: str, name: str | None, namespace: str
) -> None:
    """Show one resource in full, with its events."""
    info, wanted = _split(kind, name)
    if wanted is None:
        raise InvalidError("the name is missing", hint=f"paddock describe {info.singular} NAME")
    item = target.kube.call("GET", _path(info, namespace, wanted))
    uid = item["metadata"]["uid"]
    listed = target.kube.call(
        "GET", f"/api/v1/namespaces/{namespace}/events?fieldSelector=involvedObject.uid%3D{uid}"
    )
    if output.is_json:
        output.data({"object": item, "events": listed["items"]})
        return
    sys.stdout.write(yaml.safe_dump(item, sort_keys=False, width=1000, allow_unicode=True))
    screen.print("events:" if listed["items"] else "events: none")
    now = system().now().astimezone(UTC)
    for event in sorted(listed["items"], key=lambda item: item.get("lastTimestamp") or ""):
        when = age(event.get("lastTimestamp"), now)
        text = f"  {when:>6}  {event['type']:8} {event['reason']}: {event['message']}"
        screen.print(text, markup=False, soft_wrap=True)


def _files(name: str) -> Iterable[str]:
    if not Path(name).is_dir():
        return (name,)
    found = sorted(map(str, (*Path(name).glob("*.yaml"), *Path(name).glob("*.yml"))))
    if not found:
        raise InvalidError(f"{name} contains no YAML file")
    return found


def documents(files: Iterable[str]) -> Iterable[Mapping[str, Any]]:
    """Yield every document of the files; `-` is standard input, a directory all its YAML files."""
    for file in chain.from_iterable(map(_files, files)):
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise InvalidError(f"{file} cannot be read: {reason}") from error
        try:
            found = list(yaml.safe_load_all(text))
        except yaml.YAMLError as error:
            raise InvalidError(f"{file} is not YAML: {error}") from error
        for document in found:
            if document is None:
                continue
            if not isinstance(document, dict) or "kind" not in document:
                raise InvalidError(f"{file} contains a document that is not a resource")
            yield document


@click.command(
    epilog=examples("paddock apply -f examples/quickstart.yaml", "paddock apply -f - < pool.yaml")
)
@click.option(
    "--file",
    "-f",
    "files",
    multiple=True,
    required=True,
    help="Read this YAML file or directory; `-` is standard input.",
)
@click.option("--namespace", "-n", default="default", show_default=True, help="Set the namespace.")
@with_target
def apply(target: CliTarget, output: Output, files: tuple[str, ...], namespace: str) -> None:
    """Create or change resources from files."""
    done: list[Any] = []
    for document in documents(files):
        info = info_for(str(document["kind"]))
        metadata: Mapping[str, Any] = document.get("metadata") or {}
        if not metadata.get("name"):
            raise InvalidError(f"a {info.kind} has no metadata.name", hint="set metadata.name")
        home = str(metadata.get("namespace") or namespace)
        path = _path(info, home, str(metadata.get("name", "")))
        written = target.kube.call(
            "PATCH",
            f"{path}?fieldManager=paddock&force=true",
            document,
            headers={"Content-Type": "application/apply-patch+yaml"},
        )
        done.append(written)
        if not output.is_json:
            screen.print(f"{info.singular}/{written['metadata']['name']} applied")
    if output.is_json:
        output.data(done)


@click.command(
    epilog=examples("paddock delete pool hello", "paddock delete -f examples/quickstart.yaml")
)
@click.argument("kind", required=False)
@click.argument("name", required=False)
@click.option("--file", "-f", "files", multiple=True, help="Delete the resources in these files.")
@click.option("--namespace", "-n", default="default", show_default=True, help="Set the namespace.")
@with_target
def delete(
    target: CliTarget,
    output: Output,
    kind: str | None,
    name: str | None,
    files: tuple[str, ...],
    namespace: str,
) -> None:
    """Delete resources. Deleting a pool does not affect its claimed sandboxes."""
    targets: list[tuple[KindInfo, str, str]] = []
    if kind is not None:
        info, wanted = _split(kind, name)
        if wanted is None:
            raise InvalidError("the name is missing", hint=f"paddock delete {info.singular} NAME")
        targets.append((info, namespace, wanted))
    for document in documents(files):
        metadata: Mapping[str, Any] = document.get("metadata") or {}
        home = str(metadata.get("namespace") or namespace)
        targets.append((info_for(str(document["kind"])), home, str(metadata.get("name", ""))))
    if not targets:
        raise InvalidError("nothing to delete", hint="pass a kind and a name, or a file")
    deleted: list[str] = []
    failed: list[str] = []
    for info, home, wanted in targets:
        try:
            target.kube.call("DELETE", _path(info, home, wanted))
        except CallError as error:
            failed.append(error.message)
            continue
        deleted.append(f"{info.singular}/{wanted}")
    if deleted or not failed:
        output.done("\n".join(f"{name} deleted" for name in deleted), {"deleted": deleted})
    if failed:
        raise PaddockError("; ".join(failed))


COMMANDS = (get, describe, apply, delete)
