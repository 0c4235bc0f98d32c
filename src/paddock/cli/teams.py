"""`paddock teams`: teams, their quotas and their internet access."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click

from paddock.cli.click_ext import examples
from paddock.cli.context import with_target
from paddock.cli.output import Output
from paddock.cli.target import CliTarget
from paddock.resources import quantity
from paddock.resources.network.internet import Internet

_KINDS = {
    "sandboxes": ("sandbox.count", "all"),
    "running": ("sandbox.count", "running"),
    "cpu": ("limits.cpu", "running"),
    "memory": ("limits.memory", "running"),
}
"""The dimension and scope of the API that each option limits."""


@click.group()
def teams() -> None:
    """List teams; set quotas and internet access. `paddock keys create --team` creates a team."""


@teams.command("ls")
@with_target
def list_teams(target: CliTarget, output: Output) -> None:
    """List teams with their quotas and internet access."""
    found = target.e2b.call("GET", "/teams")
    for team in found:
        team.pop("apiKey", None)  # never print the caller's key
    output.rows(
        found,
        ("name", "quota", "internet"),
        (
            (
                team["name"],
                formatted(team["quota"]["limits"] if team["quota"] else ()),
                team["internet"] or "default",
            )
            for team in found
        ),
    )


def formatted(limits: Sequence[Mapping[str, Any]]) -> str:
    """Return limits as text, or "none"."""
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


@teams.command("set", epilog=examples("paddock teams set research --internet registries"))
@click.argument("team")
@click.option(
    "--internet",
    type=click.Choice([*(item.value for item in Internet), "default"]),
    required=True,
    help="Limit what sandboxes reach: nothing, package registries, or what templates allow. "
    "`default` is the setting sandbox_internet.",
)
@with_target
def set_team(target: CliTarget, output: Output, team: str, internet: str) -> None:
    """Set the internet access of a team's sandboxes, running ones included."""
    body = {"internet": None if internet == "default" else internet}
    changed = target.e2b.call("PATCH", f"/teams/{quote(team)}", body)
    output.done(f"internet of {team}: {internet}", changed)


@teams.command(
    "quota",
    epilog=examples(
        "paddock teams quota research --sandboxes 500 --running 100 --memory 256Gi",
        "paddock teams quota research --none",
    ),
)
@click.argument("team")
@click.option(
    "--sandboxes",
    type=click.IntRange(min=0),
    help="Limit the number of sandboxes, including paused ones.",
)
@click.option(
    "--running", type=click.IntRange(min=0), help="Limit the number of running sandboxes."
)
@click.option("--cpu", help="Limit the cores of running sandboxes, such as 64 or 500m.")
@click.option("--memory", help="Limit the memory of running sandboxes, such as 256Gi.")
@click.option("--none", "is_unlimited", is_flag=True, help="No limit.")
@with_target
def set_quota(
    target: CliTarget, output: Output, team: str, is_unlimited: bool, **wanted: str | int | None
) -> None:
    """Set the quota of a team. An omitted option means no limit. Running sandboxes stay."""
    limits = [
        {"dimension": dimension, "scope": scope, "limit": _amount(name, value)}
        for name, (dimension, scope) in _KINDS.items()
        if (value := wanted[name]) is not None
    ]
    if is_unlimited == bool(limits):
        raise click.UsageError("pass at least one limit, or --none for no limit")
    changed = target.e2b.call("PATCH", f"/teams/{quote(team)}", {"quota": {"limits": limits}})
    output.done(f"quota of {team}: {formatted(limits)}", changed)


def _amount(name: str, value: str | int) -> int:
    """Parse an amount to the units of the API: thousandths of a core, MiB, sandboxes."""
    if isinstance(value, int):
        return value
    if name == "cpu":
        return quantity.millis(value)
    return quantity.mebibytes(quantity.whole(value))
