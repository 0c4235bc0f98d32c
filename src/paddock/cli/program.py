"""The command `paddock`: its commands, global options and error handling.

A command is imported when it is called, so that help and usage errors are fast.
"""

import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

import click

from paddock import __version__
from paddock.cli.click_ext import with_output
from paddock.cli.context import GlobalOptions
from paddock.kit.errors import PaddockError

EPILOG = """Exit codes: 0 success; 1 failure, with an error message; 2 usage error; 130 Ctrl-C;
for `sandbox exec` and `run`, the exit code of the command.

\b
Completion, in the start-up file of your shell:
  eval "$(_PADDOCK_COMPLETE=bash_source paddock)"     (or zsh_source)
"""

COMMANDS = {
    "up": ("machine.up", "Start Paddock on this machine and print how to connect."),
    "down": ("machine.down", "Stop Paddock on this machine; the next `up` adopts its sandboxes."),
    "status": ("machine.status", "Show whether Paddock runs, with its sandboxes and pools."),
    "doctor": ("machine.doctor", "Show what this machine supports, and what is missing."),
    "logs": ("machine.logs", "Show the log of a process of Paddock."),
    "audit": (
        "audit.commands.audit",
        "Show who changed what on this machine, and what was refused.",
    ),
    "get": ("resources.get", "Show resources: sandboxes, pools, templates, …"),
    "describe": ("resources.describe", "Show one resource in full, with its events."),
    "apply": ("resources.apply", "Create or change resources from files."),
    "delete": ("resources.delete", "Delete resources."),
    "sandbox": (
        "sandbox.commands.sandbox",
        "Create, use, pause, fork and kill sandboxes.",
    ),
    "run": ("run.commands.run", "Run code in a new sandbox and show what it returns."),
    "mcp": ("mcp.commands.mcp", "Serve tools for sandboxes to a client of MCP."),
    "batch": ("batch.commands.batch", "Run a command in many sandboxes."),
    "task-executor": ("task_executor.task_executor", "Serve the task API in a pod."),
    "keys": ("keys.keys", "List, create and revoke API keys."),
    "teams": ("teams.teams", "List teams and set their quotas."),
    "kube": ("kube.commands.kube", "Install, inspect and remove Paddock on Kubernetes."),
    "kubeconfig": ("kube.kubeconfig.kubeconfig", "Let kubectl use the API of this machine."),
    "image": ("image.commands.image", "List, build, pull, import and delete images of this host."),
    "template": (
        "template.commands.template",
        "Build, install, list, tag, roll back and delete templates.",
    ),
    "keyring": (
        "installation.keyring.keyring",
        "Show and rotate the secrets of this machine's installation.",
    ),
    "simulate": ("simulate.simulate", "Replay a trace of claims in virtual time."),
    "bench": ("bench.commands.bench", "Run the benchmarks: all suites, or those named."),
}
"""The attribute below `paddock.cli` that holds each command, and its line in the help."""


class Program(click.Group):
    """Imports commands when they are called, and prints errors as one line and a hint."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
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
        """Return the called command; suggest a similar name if there is none."""
        similar = get_close_matches(args[0], COMMANDS, n=1) if args[0] not in COMMANDS else ()
        if similar and not ctx.resilient_parsing:  # Completion continues after a misspelt command.
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{similar[0]}'?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one line per command, without importing any."""
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
            raise  # the reader of our output has closed it; click exits quietly
        except OSError as error:
            from paddock.cli.output import fail

            fail(f"{error.filename or 'the output'}: {error.strerror or error}")
            sys.exit(1)


@click.group(cls=Program, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="paddock %(version)s")
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Read settings from this TOML file.",
)
@click.option("--url", help="Use Paddock at this URL.  [default: this machine]")
@click.option(
    "--output",
    "-o",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Output format.",
)
@click.pass_context
def program(ctx: click.Context, config: Path | None, url: str | None, output: str) -> None:
    """Sandboxes for AI agents on your own machines."""
    ctx.obj = GlobalOptions(config, url, output)


def main() -> None:
    """Run the program."""
    program.main(prog_name="paddock")
