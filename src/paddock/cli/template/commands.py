"""`paddock template`: build and install templates, list, tag, roll back and delete them."""

import os

import click

from paddock.cli.click_ext import examples, pairs
from paddock.cli.context import with_target
from paddock.cli.output import Output
from paddock.cli.target import CliTarget
from paddock.cli.template import listing
from paddock.cli.template.api import BuildApi
from paddock.cli.template.build import BuildOptions, TemplateBuilder
from paddock.cli.template.cancel import cancel
from paddock.cli.template.context import BuildContext
from paddock.cli.template.dockerfile.stages import find_target, parse
from paddock.cli.template.dockerfile.translate import translate
from paddock.cli.template.interpreter.install import install
from paddock.cli.template.options import mebibytes, place
from paddock.cli.template.progress import progress
from paddock.cli.template.stage_files import stage_files
from paddock.cli.termination import exit_on_signals


@click.group()
def template() -> None:
    """Build, install, list, tag, roll back and delete templates."""


@template.command(
    "build",
    epilog=examples(
        "paddock template build .",
        "paddock template build web . --build-arg VERSION=3 --target production",
        "paddock template build web . --start-command 'npm start' --memory 2Gi --tag v3",
    ),
)
@click.argument("words", nargs=-1, required=True, metavar="[NAME] CONTEXT")
@click.option(
    "--file",
    "-f",
    help="Read this Dockerfile; `-` is standard input.  [default: CONTEXT/Dockerfile]",
)
@click.option(
    "--build-arg",
    multiple=True,
    help="Set a build argument NAME=VALUE, or NAME to take it from the environment.",
)
@click.option("--target", "stage", help="Build this stage.  [default: the last]")
@click.option(
    "--tag", "-t", "tags", multiple=True, help="Give the build this tag.  [default: default]"
)
@click.option(
    "--no-cache",
    is_flag=True,
    help="Run every step, even if its layer is cached, and ask for the base image again.",
)
@click.option(
    "--start-command",
    help="Start this command after the steps; empty for none.  [default: ENTRYPOINT and CMD]",
)
@click.option(
    "--ready-command",
    help="Store the template once this command exits with 0.  "
    "[default: HEALTHCHECK, else 20 seconds after the start]",
)
@click.option("--cpu", type=click.IntRange(min=1), help="Set the number of CPUs.")
@click.option("--memory", callback=mebibytes, help="Set the memory, such as 2Gi.")
@click.option(
    "--progress",
    "display",
    type=click.Choice(["auto", "plain", "tty", "quiet"]),
    default="auto",
    show_default=True,
    help="Show lines of the log, or the step.",
)
@with_target
def build(
    target: CliTarget,
    output: Output,
    words: tuple[str, ...],
    file: str | None,
    build_arg: tuple[str, ...],
    stage: str | None,
    tags: tuple[str, ...],
    no_cache: bool,
    start_command: str | None,
    ready_command: str | None,
    cpu: int | None,
    memory: int | None,
    display: str,
) -> None:
    """Build a template from a Dockerfile and the files of CONTEXT.

    Each step runs in a sandbox; its result is cached for your team. NAME is that of the directory
    unless it is set. Ctrl-C, SIGTERM and the end of the terminal cancel the build.
    """
    if len(words) > 2:
        raise click.UsageError("the arguments are [NAME] CONTEXT, such as `web .`")
    where = place(words, file)
    arguments = pairs(_from_environment(build_arg), "--build-arg")
    dockerfile = parse(where.read(), arguments)
    steps = translate(dockerfile, find_target(dockerfile, stage), arguments)
    resources = {"cpuCount": cpu, "memoryMB": memory}
    options = BuildOptions(
        name=where.name,
        tags=tags,
        arguments=arguments,
        no_cache=no_cache,
        start_command=start_command,
        ready_command=ready_command,
        resources={name: value for name, value in resources.items() if value is not None},
    )
    with exit_on_signals(), stage_files(target) as files, progress(display) as shown:
        for note in (*dockerfile.notes, *steps.notes):
            shown.note(note)
        builder = TemplateBuilder(
            BuildApi(target.e2b), files, shown, cancel=lambda item: cancel(target, item)
        )
        context = BuildContext(where.context, where.dockerfile)
        built = builder.build(dockerfile, steps, context, options)
    output.done(
        f"built {where.name}: paddock sandbox create {where.name}",
        {"name": where.name, "templateID": built.template, "buildID": built.build},
    )


def _from_environment(words: tuple[str, ...]) -> list[str]:
    """Return NAME=VALUE options; a name alone takes its value from the environment."""
    return [word if "=" in word else f"{word}={os.environ.get(word, '')}" for word in words]


for _command in (install, *listing.COMMANDS):
    template.add_command(_command)
