"""The command `paddock` and what all its commands share.

Commands are imported when they are called: help and mistakes are shown at once.
"""

import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

import click

from paddock import __version__
from paddock.cli.click_ext import with_output
from paddock.cli.context import Chosen
from paddock.kit.errors import PaddockError

EPILOG = """Exit codes: 0 done; 1 it failed, and says why; 2 the command line was wrong; 130 Ctrl-C;
for `sandbox exec`, the command's own exit code.

\b
Completion, in your shell's start-up file:
  eval "$(_PADDOCK_COMPLETE=bash_source paddock)"     (or zsh_source)
"""

COMMANDS = {
    "up": ("machine.up", "Start everything on this machine and say how to use it."),
    "down": ("machine.down", "Stop Paddock on this machine; sandboxes are kept for the next `up`."),
    "status": ("machine.status", "Say whether Paddock runs here, and how it does."),
    "doctor": ("machine.doctor", "Say what this machine can do, and what is missing."),
    "logs": ("machine.logs", "Show the log of one of Paddock's own processes."),
    "get": ("resources.get", "Show resources: sandboxes, pools, templates, …"),
    "describe": ("resources.describe", "Show one resource in full, with what happened to it."),
    "apply": ("resources.apply", "Make resources as files say."),
    "delete": ("resources.delete", "Delete resources."),
    "sandbox": (
        "sandbox.commands.sandbox",
        "Sandboxes: create, run commands, copy, pause, fork, kill.",
    ),
    "batch": ("batch.commands.batch", "Many sandboxes as one object, each with its task."),
    "task-executor": ("task_executor.task_executor", "Serve the task API in a pod."),
    "keys": ("keys.keys", "API keys: list, create, revoke."),
    "teams": ("teams.teams", "Teams and their quotas."),
    "kube": ("kube.commands.kube", "Paddock on Kubernetes: install, uninstall, status, render."),
    "image": ("images.image", "Images of this machine: list, build, import, delete."),
    "simulate": ("simulate.simulate", "Replay a trace of claims in virtual time."),
    "bench": ("bench.commands.bench", "Measure: all suites, or those named."),
}
"""Where each command lives below `paddock.cli`, and its line in the help."""


class Program(click.Group):
    """Finds commands when they are called, and shows our errors as one line and a hint."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name every command."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].rpartition(".")
        return with_output(getattr(import_module(f"paddock.cli.{module}"), attribute))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find what is called; where there is no such command, one that looks like it is named."""
        similar = get_close_matches(args[0], COMMANDS, n=1) if args[0] not in COMMANDS else ()
        if similar and not ctx.resilient_parsing:  # Completion goes on past what is misspelt.
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{similar[0]}'?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show one line for each command, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except PaddockError as error:
            from paddock.cli.output import fail

            fail(error.message, error.hint)
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(130)
        except BrokenPipeError:
            raise  # whoever read our output has had enough, and click ends quietly
        except OSError as error:
            from paddock.cli.output import fail

            fail(f"{error.filename or 'the output'}: {error.strerror or error}")
            sys.exit(1)


@click.group(cls=Program, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="paddock %(version)s")
@click.option(
    "--config", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Settings, TOML."
)
@click.option("--url", help="Another machine's Paddock.  [default: this machine's]")
@click.option(
    "--output",
    "-o",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="For people or for programs.",
)
@click.pass_context
def program(ctx: click.Context, config: Path | None, url: str | None, output: str) -> None:
    """Sandboxes for AI agents on your own machines."""
    ctx.obj = Chosen(config, url, output)


def main() -> None:
    """Run the program."""
    program.main(prog_name="paddock")
