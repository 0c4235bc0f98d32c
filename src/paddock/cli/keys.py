"""`paddock keys`: API keys."""

import click

from paddock.cli.click_ext import examples
from paddock.cli.context import with_target
from paddock.cli.output import Output
from paddock.cli.target import CliTarget


@click.group()
def keys() -> None:
    """List, create and revoke API keys."""


@keys.command("ls")
@with_target
def list_keys(target: CliTarget, output: Output) -> None:
    """List API keys."""
    found = target.e2b.call("GET", "/api-keys")
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
@click.option("--team", help="Set the team of the key.  [default: your own]")
@click.option(
    "--role",
    type=click.Choice(["member", "reader", "admin"]),
    default="member",
    show_default=True,
    help="Set the role: readers read, members use their team's sandboxes, admins do all.",
)
@with_target
def create_key(target: CliTarget, output: Output, name: str, team: str | None, role: str) -> None:
    """Create a key and print it; it cannot be shown again."""
    body = {"name": name, "role": role} | ({"teamName": team} if team else {})
    created = target.e2b.call("POST", "/api-keys", body)
    output.done(created["key"], created)


@keys.command("revoke")
@click.argument("key_id")
@with_target
def revoke_key(target: CliTarget, output: Output, key_id: str) -> None:
    """Revoke a key immediately."""
    target.e2b.call("DELETE", f"/api-keys/{key_id}")
    output.done(f"revoked {key_id}", {"revoked": key_id})
