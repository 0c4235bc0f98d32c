"""`paddock keyring`: shows, rotates, prunes and backs up the secrets of this machine."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import click

from paddock.cli.click_ext import examples
from paddock.cli.context import with_target
from paddock.cli.output import Output
from paddock.cli.target import CliTarget
from paddock.installation import secrets, secrets_file
from paddock.installation.pruning import Pruned, pruned
from paddock.installation.secrets import Secrets
from paddock.kit import pidfile
from paddock.kit.encryption import DataCipher
from paddock.kit.errors import ConflictError, InvalidError, UnsupportedError
from paddock.resources.kinds.sandbox import ClaimIdentity, Sandbox
from paddock.settings import Settings
from paddock.store.sqlite import SqliteStore

_CHANGES: dict[str, Callable[[Secrets], Secrets]] = {
    "seed": secrets.with_new_seed,
    "encryption": secrets.with_new_encryption_key,
    "token": secrets.with_new_token,
}


@click.group()
def keyring() -> None:
    """Show, rotate, prune and back up the secrets of this machine's installation."""


@keyring.command()
@with_target
def show(target: CliTarget, output: Output) -> None:
    """Show the names of the secrets, never the secrets: the one in use first."""
    _check(target)
    found = secrets_file.existing(target.settings.keyring)
    names = {
        "seed": [secrets.fingerprint(seed) for seed in (found.seed, *found.previous_seeds)],
        "encryption": [key.id for key in found.encryption_keys],
        "token": [secrets.fingerprint(found.token)],
    }
    text = "\n".join(f"{what:<12}{', '.join(named)}" for what, named in names.items())
    output.done(text, names)


@keyring.command(epilog=examples("paddock keyring rotate seed", "paddock keyring show"))
@click.argument("what", type=click.Choice(list(_CHANGES)))
@with_target
def rotate(target: CliTarget, output: Output, what: str) -> None:
    """Replace a secret; sandboxes keep running and keep their tokens.

    seed: new sandboxes derive their tokens from the new one. Processes that run use it within 10 s.
    encryption: the store is rewritten with the new key, at once if Paddock runs.
    token: the old bearer token is refused after the next start; write a new kubeconfig.
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
    if needs_restart := what == "token" and _is_running(settings):
        text += "\nto use it: paddock down && paddock up --detach (sandboxes keep running)"
    output.done(text, {"rotated": what, "needs_restart": needs_restart})


@keyring.command(epilog=examples("paddock down", "paddock keyring prune", "paddock up -d"))
@with_target
def prune(target: CliTarget, output: Output) -> None:
    """Delete earlier seeds and encryption keys that nothing on this machine needs.

    Paddock must be stopped; sandboxes keep running. Backups of the store from before need the
    keyring of their time: keep it with them.
    """
    _check(target)
    settings = target.settings
    _require_stopped(settings)
    done = asyncio.run(_pruned(settings))
    if done.kept and not done.dropped:
        reasons = "; ".join(f"{item.name}: {item.reason}" for item in done.kept)
        raise ConflictError(f"nothing was deleted: {reasons}")
    lines = [f"deleted {name}" for name in done.dropped]
    lines += [f"kept {item.name}: {item.reason}" for item in done.kept]
    output.done(
        "\n".join(lines) or "there are no earlier secrets",
        {"deleted": list(done.dropped), "kept": [item.name for item in done.kept]},
    )


async def _pruned(settings: Settings) -> Pruned:
    """Write the keyring without what nothing needs, while no other process opens the store."""
    secrets_now = secrets_file.existing(settings.keyring)
    path = settings.state / "store.db"
    if not path.exists():
        return _drop(settings, (), ())
    async with await SqliteStore.open(
        path, cipher=DataCipher(secrets_now.encryption_keys)
    ) as store:
        sandboxes = (await store.list(Sandbox)).items
        claims = [item.spec.claim for item in sandboxes if item.spec.claim is not None]
        return _drop(settings, claims, store.keys)


def _drop(
    settings: Settings, claims: Sequence[ClaimIdentity], used_keys: Collection[str]
) -> Pruned:
    done: list[Pruned] = []

    def change(current: Secrets) -> Secrets:
        done.append(pruned(current, claims, used_keys))
        return done[-1].secrets

    secrets_file.update(settings.keyring, change)
    return done[-1]


@keyring.command(epilog=examples("paddock keyring backup /mnt/safe/keyring.json"))
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@with_target
def backup(target: CliTarget, output: Output, file: Path) -> None:
    """Copy the keyring to FILE, which only you can read. Keep it apart from copies of the store."""
    _check(target)
    secrets_file.back_up(target.settings.keyring, file.absolute())
    output.done(f"wrote {file.absolute()}", {"file": str(file.absolute())})


@keyring.command(epilog=examples("paddock keyring restore /mnt/safe/keyring.json"))
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace a keyring that has other secrets.")
@with_target
def restore(target: CliTarget, output: Output, file: Path, force: bool) -> None:
    """Put the keyring back that `backup` wrote to FILE. Paddock must be stopped."""
    _check(target)
    settings = target.settings
    _require_stopped(settings)
    is_new = secrets_file.restore(settings.keyring, file.absolute(), force=force)
    text = f"restored {settings.keyring}" if is_new else f"{settings.keyring} is the same already"
    output.done(text, {"file": str(settings.keyring), "changed": is_new})


def _is_running(settings: Settings) -> bool:
    return pidfile.holder(settings.run / "paddock.pid") is not None


def _require_stopped(settings: Settings) -> None:
    if _is_running(settings):
        raise ConflictError(
            "Paddock runs and uses the keyring",
            hint="run `paddock down` first; sandboxes keep running",
        )


def _check(target: CliTarget) -> None:
    if not target.is_local or target.settings.store == "kubernetes":
        raise UnsupportedError(
            "the keyring of another machine or of a cluster is not here",
            hint="run this on the machine itself; on a cluster, secrets are in the Secret "
            "that `paddock kube install` creates",
        )
