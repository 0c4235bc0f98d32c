"""`paddock teams`: teams, their quotas and their internet access."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click

from paddock.cli.click_ext import examples
from paddock.cli.context import with_target
from paddock.cli.output import Output
from paddock.cli.target import CliTarget
from paddock.kit.errors import NotFoundError
from paddock.resources import quantity
from paddock.resources.network.internet import Internet

_KINDS = {
    "sandboxes": ("sandbox.count", "all"),
    "running": ("sandbox.count", "running"),
    "cpu": ("limits.cpu", "running"),
    "memory": ("limits.memory", "running"),
    "stored": ("stored.bytes", "all"),
}
"""The dimension and scope of the API that each option limits."""
_SIZES = (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10))


@click.group()
def teams() -> None:
    """List teams; set quotas and internet access. `paddock keys create --team` creates a team."""


@teams.command("ls")
@with_target
def list_teams(target: CliTarget, output: Output) -> None:
    """List teams with what they use of their quotas, and their internet access."""
    found = _teams(target)
    output.rows(
        found,
        ("name", "used", "quota", "internet"),
        (
            (
                team["name"],
                formatted(
                    [
                        {**item, "limit": item["used"]}
                        for item in team["usage"]
                        if item["limit"] is not None
                    ]
                ),
                formatted(team["quota"]["limits"] if team["quota"] else ()),
                team["internet"] or "default",
            )
            for team in found
        ),
    )


@teams.command("show", epilog=examples("paddock teams show research"))
@click.argument("team")
@with_target
def show_team(target: CliTarget, output: Output, team: str) -> None:
    """Show what a team uses, with its limits."""
    found = _team(target, team)["usage"]
    names = {kind: name for name, kind in _KINDS.items()}
    output.rows(
        found,
        ("what", "used", "limit"),
        (
            (
                names.get(kind, " ".join(kind)),
                amount(item["dimension"], item["used"]),
                "none" if item["limit"] is None else amount(item["dimension"], item["limit"]),
            )
            for item in found
            for kind in [(item["dimension"], item["scope"])]
        ),
    )


def _teams(target: CliTarget) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = target.e2b.call("GET", "/teams")
    for team in found:
        team.pop("apiKey", None)  # never print the caller's key
    return found


def _team(target: CliTarget, name: str) -> dict[str, Any]:
    for team in _teams(target):
        if team["name"] == name:
            return team
    raise NotFoundError(f"team {name!r} was not found", hint="`paddock teams ls` lists the teams")


def formatted(limits: Sequence[Mapping[str, Any]]) -> str:
    """Return limits as text, or "none"."""
    names = {kind: name for name, kind in _KINDS.items()}
    parts: list[str] = []
    for item in limits:
        kind = (item["dimension"], item["scope"])
        parts.append(
            f"{names.get(kind, ' '.join(kind))} {amount(item['dimension'], item['limit'])}"
        )
    return ", ".join(parts) or "none"


def amount(dimension: str, value: int) -> str:
    """Return an amount in units of the API as text: cores, sizes such as `20Gi`, or a number."""
    if dimension == "limits.cpu":
        return f"{value / 1000:g}"
    if dimension == "limits.memory":
        return f"{value}Mi" if value % 1024 else f"{value // 1024}Gi"
    if dimension != "stored.bytes" or not value:
        return str(value)
    unit, factor = next(
        ((unit, factor) for unit, factor in _SIZES if value % factor == 0 or value >= 10 * factor),
        ("", 1),
    )
    return f"{value // factor}{unit}"


@teams.command(
    "set",
    epilog=examples(
        "paddock teams set research --internet registries",
        "paddock teams set research --stored 20Gi",
    ),
)
@click.argument("team")
@click.option(
    "--internet",
    type=click.Choice([*(item.value for item in Internet), "default"]),
    help="Limit what sandboxes reach: nothing, package registries, or what templates allow. "
    "`default` is the setting sandbox_internet.",
)
@click.option(
    "--stored",
    help="Limit the bytes of snapshots and hibernated memory, such as 20Gi; `none`: no limit. "
    "Other limits of the team stay.",
)
@with_target
def set_team(
    target: CliTarget, output: Output, team: str, internet: str | None, stored: str | None
) -> None:
    """Set the internet access of a team's sandboxes, running ones included, or stored bytes."""
    if internet is None and stored is None:
        raise click.UsageError("pass --internet or --stored")
    body: dict[str, Any] = {}
    if internet is not None:
        body["internet"] = None if internet == "default" else internet
    if stored is not None:
        body["quota"] = {"limits": _with_stored(target, team, stored)}
    changed = target.e2b.call("PATCH", f"/teams/{quote(team)}", body)
    quota = changed["quota"]["limits"] if changed["quota"] else ()
    parts = [
        *([f"internet of {team}: {internet}"] if internet is not None else []),
        *([f"quota of {team}: {formatted(quota)}"] if stored is not None else []),
    ]
    output.done("; ".join(parts), changed)


def _with_stored(target: CliTarget, team: str, stored: str) -> list[Mapping[str, Any]]:
    """Return the limits of a team with another one for stored bytes."""
    quotas = [item["quota"] for item in _teams(target) if item["name"] == team]
    limits = [
        item
        for quota in quotas
        for item in (quota["limits"] if quota else ())
        if item["dimension"] != "stored.bytes"
    ]
    if stored == "none":
        return limits
    return [
        *limits,
        {"dimension": "stored.bytes", "scope": "all", "limit": _amount("stored", stored)},
    ]


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
@click.option("--stored", help="Limit the bytes of snapshots and hibernated memory, such as 20Gi.")
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
    """Parse an amount to the units of the API: thousandths of a core, MiB, bytes, sandboxes."""
    if isinstance(value, int):
        return value
    if name == "cpu":
        return quantity.millis(value)
    size = quantity.whole(value)
    return size if name == "stored" else quantity.mebibytes(size)
