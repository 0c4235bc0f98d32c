"""Generates `docs/reference/cli.md` from the commands."""

import inspect
from collections.abc import Generator

import click

from paddock.cli.program import COMMANDS, program

_COMMON_OPTIONS = ("--output", "--help")
"""Options of every command, described once."""


def page() -> str:
    """Return the page."""
    context = click.Context(program, info_name="paddock")
    lines = [
        "# Commands",
        "",
        "Generated from `cli/`; do not edit. Every command has `--help` and `--output json`. Data",
        "goes to standard output, everything else to standard error. Output has no colours if",
        "`NO_COLOR` is set or it is not a terminal. Options before the name of the command:",
        "",
        *_options(program),
        "",
        " ".join(str(program.epilog).partition("\b")[0].split()),
    ]
    for name in COMMANDS:
        command = program.get_command(context, name)
        if command is not None:
            lines += _describe(command, f"paddock {name}")
    return "\n".join([*lines, ""])


def _describe(command: click.Command, path: str) -> Generator[str]:
    """Yield the lines about a command and its subcommands."""
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from _describe(below, f"{path} {name}")
        return
    words = (item.make_metavar(click.Context(command)) for item in _arguments(command))
    yield from ("", f"## `{' '.join((path, *words))}`", "")
    yield inspect.cleandoc(command.help or "").replace("\b\n", "")
    options = list(_options(command))
    if len(options) > 2:
        yield from ("", *options)
    if command.epilog:
        examples = command.epilog.removeprefix("\b\nExamples:\n")
        yield from ("", "```sh", inspect.cleandoc(examples), "```")


def _arguments(command: click.Command) -> list[click.Argument]:
    return [item for item in command.params if isinstance(item, click.Argument)]


def _options(command: click.Command) -> Generator[str]:
    yield from ("| Option | |", "|---|---|")
    for item in command.params:
        if isinstance(item, click.Option) and not set(item.opts) & set(_COMMON_OPTIONS):
            shown = item.get_help_record(click.Context(command))
            if shown is not None:
                words, meaning = (part.replace("|", "\\|") for part in shown)
                yield f"| `{words}` | {meaning} |"
