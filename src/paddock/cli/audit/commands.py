"""`paddock audit`: who changed what on this machine, and what was refused."""

import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import click

from paddock.api.audit import reader
from paddock.api.audit.event import AuditEvent
from paddock.cli.audit.rows import AuditFilter, parse_since, row
from paddock.cli.click_ext import examples
from paddock.cli.context import with_target
from paddock.cli.output import Output
from paddock.cli.target import CliTarget
from paddock.kit import clock
from paddock.kit.errors import PaddockError


@click.command(epilog=examples("paddock audit --since 1h --refused", "paddock audit --follow"))
@click.option("--follow", "-f", is_flag=True, help="Follow the log.")
@click.option("--team", help="Show only calls of this team.")
@click.option("--key", help="Show only calls of the key with this id (`paddock keys ls`).")
@click.option("--since", help="Show only newer lines: an age (10m, 2h, 7d) or a time.")
@click.option("--refused", is_flag=True, help="Show only calls that failed.")
@with_target
def audit(
    target: CliTarget,
    output: Output,
    follow: bool,
    team: str | None,
    key: str | None,
    since: str | None,
    refused: bool,
) -> None:
    """Show the audit log of this machine; with `-o json`, its lines as they are."""
    directory = Path(target.settings.audit_directory)
    if not target.is_local or target.settings.audit_log != "file":
        raise PaddockError(
            "the audit log is not in files of this machine",
            hint="on a cluster, the replicas of the API write it to standard output",
        )
    if not directory.exists():
        raise PaddockError(
            f"there is no audit log in {directory}",
            hint="`paddock up` creates it at the first call",
        )
    start = parse_since(since, clock.system().now()) if since else ""
    wanted = AuditFilter(team=team, key=key, since=start, refused=refused)
    new: Iterable[tuple[bytes, AuditEvent]] = reader.follow(directory) if follow else ()
    for line, event in chain(reader.read(directory), new):
        if wanted.matches(event):
            sys.stdout.write(line.decode() if output.is_json else f"{row(event)}\n")
            sys.stdout.flush()
