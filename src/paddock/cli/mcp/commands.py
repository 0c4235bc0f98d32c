"""`paddock mcp`: the tools of sandboxes for a client of MCP that starts this command."""

import asyncio

import click

from paddock.api.mcp.package import require_package
from paddock.api.mcp.session import DEFAULT_TEMPLATE, IDLE_SECONDS
from paddock.cli.context import with_target
from paddock.cli.output import Output
from paddock.cli.target import CliTarget


@click.command("mcp")
@click.option(
    "--template",
    default=DEFAULT_TEMPLATE,
    show_default=True,
    help="Create the default sandbox from this template.",
)
@click.option(
    "--idle",
    "idle_seconds",
    default=IDLE_SECONDS,
    show_default=True,
    type=click.IntRange(min=1),
    help="Pause a sandbox so many seconds after its last call.",
)
@with_target
def mcp(target: CliTarget, _output: Output, template: str, idle_seconds: int) -> None:
    """Serve tools for sandboxes to a client of the Model Context Protocol (MCP).

    The client starts this command and speaks on its standard input and output. The first call of a
    tool creates a sandbox, later ones use it again. It pauses when the client ends.
    """
    require_package()
    # Not at the top: the package takes a second to import.
    from paddock.api.mcp.stdio import serve

    headers = {"X-API-Key": target.api_key}
    asyncio.run(serve(target.url, headers, template=template, idle_seconds=idle_seconds))
