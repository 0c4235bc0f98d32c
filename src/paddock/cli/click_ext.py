"""How the words of a command line are read, where click alone would read them otherwise."""

from collections.abc import Iterable

import click


def examples(*lines: str) -> str:
    """Write what a command's help ends with: lines to copy, each as it is."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def pairs(items: Iterable[str], option: str) -> dict[str, str]:
    """Read what was given as NAME=VALUE."""
    found: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{option} wants NAME=VALUE, not {item!r}")
        found[name] = value
    return found


def with_output(command: click.Command) -> click.Command:
    """Let a command, and those below it, be told the form of their output themselves."""
    if not any("--output" in option.opts for option in command.params):
        command.params.append(
            click.Option(
                ["--output", "-o"],
                type=click.Choice(["text", "json"]),
                expose_value=False,
                callback=_choose_output,
                help="For people or for programs.",
            )
        )
    if isinstance(command, click.Group):
        for below in command.commands.values():
            with_output(below)
    return command


def _choose_output(ctx: click.Context, _: click.Parameter, output: str | None) -> None:
    root = ctx.find_root()
    if output is not None:
        root.obj = root.obj._replace(output=output)


class Running(click.Command):
    """Takes a name and a command that runs elsewhere, whose words may look like options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read options before and after the name; the rest is the command's own."""
        options = [item for item in self.params if isinstance(item, click.Option)]
        followed = {name for item in options if not item.is_flag for name in item.opts}
        place, has_name = 0, False
        while place < len(args) and args[place] != "--":
            if args[place].startswith("-"):
                place += 1 + (args[place] in followed)
            elif not has_name:
                place, has_name = place + 1, True
            else:
                args = [*args[:place], "--", *args[place:]]
        return super().parse_args(ctx, args)
