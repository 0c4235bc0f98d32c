"""`paddock teams`: who shares sandboxes, and how much each team may have."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click

from paddock.cli.click_ext import examples
from paddock.cli.context import with_place
from paddock.cli.output import Output
from paddock.cli.target import Place
from paddock.resources import quantity

_KINDS = {
    "sandboxes": ("sandbox.count", "all"),
    "running": ("sandbox.count", "running"),
    "cpu": ("limits.cpu", "running"),
    "memory": ("limits.memory", "running"),
}
"""What each option limits, as the API says it: what is counted, and of which sandboxes."""


@click.group()
def teams() -> None:
    """Teams and their quotas. A key acts for a team; `paddock keys create --team` makes both."""


@teams.command("ls")
@with_place
def list_teams(place: Place, output: Output) -> None:
    """List teams and what each may have."""
    found = place.e2b.call("GET", "/teams")
    for team in found:
        team.pop("apiKey", None)  # the caller's own, which is nobody's to read over a shoulder
    output.rows(
        found,
        ("name", "quota"),
        (
            (team["name"], written(team["quota"]["limits"] if team["quota"] else ()))
            for team in found
        ),
    )


def written(limits: Sequence[Mapping[str, Any]]) -> str:
    """Write limits as people read them; "none" where there are none."""
    names = {kind: name for name, kind in _KINDS.items()}
    parts: list[str] = []
    for item in limits:
        kind = (item["dimension"], item["scope"])
        name, amount = names.get(kind, " ".join(kind)), item["limit"]
        if item["dimension"] == "limits.cpu":
            parts.append(f"{name} {amount / 1000:g}")
        elif item["dimension"] == "limits.memory":
            parts.append(f"{name} {amount}Mi" if amount % 1024 else f"{name} {amount // 1024}Gi")
        else:
            parts.append(f"{name} {amount}")
    return ", ".join(parts) or "none"


@teams.command(
    "quota",
    epilog=examples(
        "paddock teams quota research --sandboxes 500 --running 100 --memory 256Gi",
        "paddock teams quota research --none",
    ),
)
@click.argument("team")
@click.option("--sandboxes", type=click.IntRange(min=0), help="At most so many, paused ones too.")
@click.option("--running", type=click.IntRange(min=0), help="At most so many that run.")
@click.option("--cpu", help="Cores of those that run, such as 64 or 500m.")
@click.option("--memory", help="Memory of those that run, such as 256Gi.")
@click.option("--none", "is_free", is_flag=True, help="As much as there is.")
@with_place
def set_quota(
    place: Place, output: Output, team: str, is_free: bool, **wanted: str | int | None
) -> None:
    """Say all that a team may have; what is left out is not limited. Nothing is taken away."""
    limits = [
        {"dimension": dimension, "scope": scope, "limit": _amount(name, value)}
        for name, (dimension, scope) in _KINDS.items()
        if (value := wanted[name]) is not None
    ]
    if is_free == bool(limits):
        raise click.UsageError("say what the team may have, or --none for as much as there is")
    changed = place.e2b.call("PATCH", f"/teams/{quote(team)}", {"quota": {"limits": limits}})
    output.done(f"quota of {team}: {written(limits)}", changed)


def _amount(name: str, value: str | int) -> int:
    """Read an amount in the API's units: thousandths of a core, MiB, sandboxes."""
    if isinstance(value, int):
        return value
    if name == "cpu":
        return quantity.millis(value)
    return quantity.mebibytes(quantity.whole(value))
