"""`paddock keys`: who may call."""

import click

from paddock.cli.click_ext import examples
from paddock.cli.context import with_place
from paddock.cli.output import Output
from paddock.cli.target import Place


@click.group()
def keys() -> None:
    """API keys: list, create, revoke."""


@keys.command("ls")
@with_place
def list_keys(place: Place, output: Output) -> None:
    """List keys."""
    found = place.e2b.call("GET", "/api-keys")
    output.rows(
        found,
        ("id", "name", "team", "role", "key", "last used"),
        (
            (
                key["id"],
                key["name"],
                key["team"],
                key["role"],
                f"e2b_{key['mask']['maskedValuePrefix']}…{key['mask']['maskedValueSuffix']}",
                key["lastUsed"] or "never",
            )
            for key in found
        ),
    )


@keys.command("create", epilog=examples("paddock keys create ci --team research"))
@click.argument("name")
@click.option("--team", help="The team it acts for.  [default: your own]")
@click.option(
    "--role",
    type=click.Choice(["member", "reader", "admin"]),
    default="member",
    show_default=True,
    help="Readers look, members use their team's sandboxes, admins everything.",
)
@with_place
def create_key(place: Place, output: Output, name: str, team: str | None, role: str) -> None:
    """Make a key; it is shown this once."""
    body = {"name": name, "role": role} | ({"teamName": team} if team else {})
    made = place.e2b.call("POST", "/api-keys", body)
    output.done(made["key"], made)


@keys.command("revoke")
@click.argument("key_id")
@with_place
def revoke_key(place: Place, output: Output, key_id: str) -> None:
    """Make a key worthless, at once."""
    place.e2b.call("DELETE", f"/api-keys/{key_id}")
    output.done(f"revoked {key_id}", {"revoked": key_id})
