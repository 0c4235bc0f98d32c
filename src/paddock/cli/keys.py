"""`paddock keys`: API keys."""

import re
from typing import Any

import click

from paddock.cli.click_ext import examples
from paddock.cli.context import with_target
from paddock.cli.output import Output
from paddock.cli.target import CliTarget

_DURATION = re.compile(r"^(\d{1,9})(s|m|h|d)$")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@click.group()
def keys() -> None:
    """List, create, rotate and revoke API keys."""


def _seconds(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    """Parse a duration such as 30d."""
    match = _DURATION.match(text) if text else None
    if text and match is None:
        raise click.BadParameter(f"{text!r} is not a duration such as 30d, 12h, 10m or 90s")
    return int(match[1]) * _UNITS[match[2]] if match else None


def _expiry(key: dict[str, Any]) -> str:
    """Return when a key expires, for people."""
    return "expired" if key["isExpired"] else key["expiresAt"] or "never"


@keys.command("ls")
@with_target
def list_keys(target: CliTarget, output: Output) -> None:
    """List API keys."""
    found = target.e2b.call("GET", "/api-keys")
    output.rows(
        found,
        ("id", "name", "team", "role", "scopes", "key", "last used", "expires"),
        (
            (
                key["id"],
                key["name"],
                key["team"],
                key["role"],
                ", ".join(key["scopes"]) or "-",
                f"e2b_{key['mask']['maskedValuePrefix']}…{key['mask']['maskedValueSuffix']}",
                key["lastUsed"] or "never",
                _expiry(key),
            )
            for key in found
        ),
    )


@keys.command(
    "create",
    epilog=examples(
        "paddock keys create ci --team research --expires 90d",
        "paddock keys create bot --scope create --scope template:base",
    ),
)
@click.argument("name")
@click.option("--team", help="Set the team of the key.  [default: your own]")
@click.option(
    "--role",
    type=click.Choice(["reader", "member", "admin", "operator"]),
    default="member",
    show_default=True,
    help="Set the role: readers read, members use their team's sandboxes, admins manage their "
    "team's keys, templates and pools, operators do all.",
)
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    help="Restrict the key to `create`, `read` or `template:NAME`. With several, all apply.",
)
@click.option(
    "--expires",
    callback=_seconds,
    help="Refuse the key after this time, such as 30d or 12h.  [default: never]",
)
@with_target
def create_key(
    target: CliTarget,
    output: Output,
    name: str,
    team: str | None,
    role: str,
    scopes: tuple[str, ...],
    expires: int | None,
) -> None:
    """Create a key and print it; it cannot be shown again."""
    body: dict[str, Any] = {"name": name, "role": role}
    optional = {"teamName": team, "scopes": scopes, "expiresInSeconds": expires}
    body |= {field: value for field, value in optional.items() if value}
    created = target.e2b.call("POST", "/api-keys", body)
    output.done(created["key"], created)


@keys.command("rotate", epilog=examples("paddock keys rotate ID --grace 1h"))
@click.argument("key_id")
@click.option(
    "--grace",
    callback=_seconds,
    help="Accept the key before for this time, such as 1h.  [default: not at all]",
)
@with_target
def rotate_key(target: CliTarget, output: Output, key_id: str, grace: int | None) -> None:
    """Replace a key by another with the same rights, and print it."""
    body = {"graceSeconds": grace or 0}
    rotated = target.e2b.call("POST", f"/api-keys/{key_id}/rotate", body)
    output.done(rotated["key"], rotated)


@keys.command("revoke")
@click.argument("key_id")
@with_target
def revoke_key(target: CliTarget, output: Output, key_id: str) -> None:
    """Revoke a key immediately."""
    target.e2b.call("DELETE", f"/api-keys/{key_id}")
    output.done(f"revoked {key_id}", {"revoked": key_id})
