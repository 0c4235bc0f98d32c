"""Extensions of click: examples, NAME=VALUE options, the output option, remote commands."""

from collections.abc import Iterable

import click


def examples(*lines: str) -> str:
    """Return the examples at the end of a command's help, unwrapped."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def pairs(items: Iterable[str], option: str) -> dict[str, str]:
    """Parse NAME=VALUE options."""
    found: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{option} expects NAME=VALUE, not {item!r}")
        found[name] = value
    return found


def with_output(command: click.Command) -> click.Command:
    """Add the option --output to a command and its subcommands."""
    if not any("--output" in option.opts for option in command.params):
        command.params.append(
            click.Option(
                ["--output", "-o"],
                type=click.Choice(["text", "json"]),
                expose_value=False,
                callback=_choose_output,
                help="Output format.  [default: text]",
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


class RemoteCommand(click.Command):
    """Takes a name and a remote command line, whose arguments may look like options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse options before and after the name; the rest belongs to the remote command."""
        options = [item for item in self.params if isinstance(item, click.Option)]
        with_value = {name for item in options if not item.is_flag for name in item.opts}
        position, has_name = 0, False
        while position < len(args) and args[position] != "--":
            if args[position].startswith("-"):
                position += 1 + (args[position] in with_value)
            elif not has_name:
                position, has_name = position + 1, True
            else:
                args = [*args[:position], "--", *args[position:]]
        return super().parse_args(ctx, args)
