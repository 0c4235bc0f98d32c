"""`paddock keyring`: shows and rotates the secrets of the installation on this machine."""

from collections.abc import Callable

import click

from paddock.cli.click_ext import examples
from paddock.cli.context import with_target
from paddock.cli.output import Output
from paddock.cli.target import CliTarget
from paddock.installation import secrets, secrets_file
from paddock.installation.secrets import Secrets
from paddock.kit import pidfile
from paddock.kit.errors import InvalidError, UnsupportedError

_CHANGES: dict[str, Callable[[Secrets], Secrets]] = {
    "seed": secrets.with_new_seed,
    "encryption": secrets.with_new_encryption_key,
    "token": secrets.with_new_token,
}


@click.group()
def keyring() -> None:
    """Show and rotate the secrets of this machine's installation."""


@keyring.command()
@with_target
def show(target: CliTarget, output: Output) -> None:
    """Show the names of the secrets, never the secrets: the one in use first."""
    _check(target)
    found = secrets_file.read(target.settings.keyring)
    if found is None:
        raise InvalidError(
            f"{target.settings.keyring} does not exist",
            hint="`paddock up` creates it at the first start",
        )
    names = {
        "seed": [secrets.fingerprint(seed) for seed in (found.seed, *found.previous_seeds)],
        "encryption": [key.id for key in found.encryption_keys],
        "token": [secrets.fingerprint(found.token)],
    }
    text = "\n".join(f"{what:<12}{', '.join(named)}" for what, named in names.items())
    output.done(text, names)


@keyring.command(epilog=examples("paddock keyring rotate seed", "paddock down && paddock up -d"))
@click.argument("what", type=click.Choice(list(_CHANGES)))
@with_target
def rotate(target: CliTarget, output: Output, what: str) -> None:
    """Replace a secret; it applies at the next start, and sandboxes keep running.

    seed: new sandboxes derive their tokens from the new one; existing ones keep theirs.
    encryption: the store is rewritten with the new key after the start.
    token: the old bearer token is refused after the start; write a new kubeconfig.
    """
    _check(target)
    settings = target.settings
    if what in ("seed", "token") and getattr(settings, what):
        raise InvalidError(
            f"the {what} is set by PADDOCK_{what.upper()} or the settings file",
            hint="change it there",
        )
    secrets_file.update(settings.keyring, _CHANGES[what])
    text = f"new {what} in {settings.keyring}"
    if is_running := pidfile.holder(settings.run / "paddock.pid") is not None:
        text += "\nto use it: paddock down && paddock up --detach (sandboxes keep running)"
    output.done(text, {"rotated": what, "needs_restart": is_running})


def _check(target: CliTarget) -> None:
    if not target.is_local or target.settings.store == "kubernetes":
        raise UnsupportedError(
            "the keyring of another machine or of a cluster is not here",
            hint="run this on the machine itself; on a cluster, secrets are in the Secret "
            "that `paddock kube install` creates",
        )
