"""`paddock template install`: builds a template that is part of Paddock, for all teams."""

from pathlib import Path
from typing import Any

import click

from paddock.cli.click_ext import examples
from paddock.cli.context import with_target
from paddock.cli.http import CallError, Endpoint
from paddock.cli.output import Output, notes
from paddock.cli.target import CliTarget
from paddock.cli.template.api import BuildApi, BuildId
from paddock.cli.template.build import BuildOptions, TemplateBuilder
from paddock.cli.template.cancel import cancel
from paddock.cli.template.interpreter import assets, recipe
from paddock.cli.template.options import mebibytes
from paddock.cli.template.progress import progress
from paddock.cli.template.stage_files import stage_files
from paddock.kit.errors import InvalidError
from paddock.resources.rights import SHARED_NAMESPACE

NAME, ALIAS = "code-interpreter-v1", "code-interpreter"
"""The template that E2B's code interpreter SDK asks for, and its short name."""
_IMAGE = "base"
_API = "/apis/paddock.dev/v1alpha1/namespaces"
_NOT_FOUND = 404


@click.command(
    "install",
    epilog=examples(
        "paddock template install code-interpreter",
        "paddock template install code-interpreter --with r,java --warm 4",
        "paddock template install code-interpreter --wheels ./wheels",
    ),
)
@click.argument("name", type=click.Choice([ALIAS]))
@click.option(
    "--with",
    "languages",
    default="",
    help="Also install these languages, separated by commas: r, java.  "
    "[default: Python, JavaScript, TypeScript and bash alone]",
)
@click.option(
    "--warm",
    type=click.IntRange(min=0),
    help="Keep this many sandboxes warm.  [default: 1 at the first installation, then unchanged]",
)
@click.option("--cpu", type=click.IntRange(min=1), help="Set the number of CPUs.  [default: 2]")
@click.option(
    "--memory", callback=mebibytes, default="2Gi", show_default=True, help="Limit the memory."
)
@click.option(
    "--wheels",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    envvar="PADDOCK_WHEELS",
    show_envvar=True,
    help="Install Python packages from the files of this directory, without a package index.",
)
@click.option("--no-cache", is_flag=True, help="Run every step, even if its layer is cached.")
@click.option(
    "--progress",
    "display",
    type=click.Choice(["auto", "plain", "tty", "quiet"]),
    default="auto",
    show_default=True,
    help="Show lines of the log, or the step.",
)
@with_target
def install(
    target: CliTarget,
    output: Output,
    name: str,
    languages: str,
    warm: int | None,
    cpu: int | None,
    memory: int | None,
    wheels: Path | None,
    no_cache: bool,
    display: str,
) -> None:
    """Build the template `code-interpreter-v1`, which serves run_code(), for all teams.

    It needs the key of an operator. Packages come from PyPI and Debian, or the mirrors that are
    set. A second call builds only what has changed. Ctrl-C cancels it.
    """
    wanted = _languages(languages)
    found = assets.find(wheels)
    kube = target.kube  # Raises without its credential, which should not happen after the build.
    resources = {"cpuCount": cpu or 2, "memoryMB": memory or 2048}
    options = BuildOptions(name=NAME, no_cache=no_cache, resources=resources)
    body: dict[str, Any] = {
        "fromImage": _IMAGE,
        "force": no_cache,
        "startCmd": recipe.START_COMMAND,
        "readyCmd": recipe.READY_COMMAND,
    }
    with stage_files(target) as files, progress(display) as shown:
        builder = TemplateBuilder(
            BuildApi(target.e2b), files, shown, cancel=lambda item: cancel(target, item)
        )
        built = builder.run(recipe.steps(found, wanted), body, options, f"{NAME} from {_IMAGE}")
    share(kube, built)
    size = ensure_pool(kube, built, warm)
    output.done(
        f"installed {NAME} with {size} warm: `Sandbox.create()` of e2b-code-interpreter uses it",
        {"name": NAME, "templateID": built.template, "buildID": built.build, "warm": size},
    )


def _languages(text: str) -> tuple[str, ...]:
    wanted = tuple(item.strip().lower() for item in text.split(",") if item.strip())
    if unknown := [item for item in wanted if item not in recipe.LANGUAGES]:
        known = ", ".join(recipe.LANGUAGES)
        raise InvalidError(
            f"--with: {unknown[0]!r} is not one of {known}",
            hint="Python, JavaScript, TypeScript and bash are always installed",
        )
    return wanted


def share(kube: Endpoint, built: BuildId) -> None:
    """Set the short name of the template, and publish it if it belongs to the shared team."""
    is_shared = built.team == SHARED_NAMESPACE
    if not is_shared:
        notes.print(
            f"only team {built.team} can use {NAME}: a key of team {SHARED_NAMESPACE} installs it "
            "for all teams",
            soft_wrap=True,
        )
    spec = {"aliases": [NAME, ALIAS], "public": is_shared}
    kube.call(
        "PATCH",
        f"{_API}/{built.team}/sandboxtemplates/{built.template}",
        {"spec": spec},
        headers={"Content-Type": "application/merge-patch+json"},
    )


def ensure_pool(kube: Endpoint, built: BuildId, warm: int | None) -> int:
    """Create or resize the pool of the template; return its size. None keeps that of a pool."""
    path = f"{_API}/{built.team}/sandboxpools/{NAME}"
    try:
        pool = kube.call("GET", path)
    except CallError as error:
        if error.status != _NOT_FOUND:
            raise
        pool = None
    if pool is not None and warm is None:
        return int(pool["spec"].get("replicas") or 0)
    size = 1 if warm is None else warm
    if pool is None:
        body = {
            "apiVersion": "paddock.dev/v1alpha1",
            "kind": "SandboxPool",
            "metadata": {"name": NAME, "namespace": built.team},
            "spec": {"templateRef": {"name": built.template}, "replicas": size},
        }
        kube.call("POST", f"{_API}/{built.team}/sandboxpools", body)
    else:
        kube.call(
            "PATCH",
            path,
            {"spec": {"replicas": size}},
            headers={"Content-Type": "application/merge-patch+json"},
        )
    return size
