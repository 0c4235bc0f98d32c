"""The secrets of this installation: from its keyring, or from settings, which take precedence."""

from paddock.installation import secrets_file
from paddock.installation.secrets import Secrets, with_encryption_key
from paddock.kit.errors import InvalidError
from paddock.resources.tokens import TokenSeed
from paddock.settings import Settings

__all__ = ["Secrets", "load_or_create", "token_seed"]


def load_or_create(settings: Settings) -> Secrets:
    """Read the keyring, or create it; settings take precedence.

    On a cluster settings are the only source: processes on several machines must agree.
    """
    if settings.store == "kubernetes":
        return _from_settings(settings)
    stored = _stored(settings)
    seeds = dict.fromkeys(filter(None, (settings.seed, stored.seed, *stored.previous_seeds)))
    seed, *previous = seeds
    return Secrets(
        seed=seed,
        previous_seeds=tuple(previous),
        token=settings.token or stored.token,
        api_key=stored.api_key,
        encryption_keys=stored.encryption_keys,
    )


def token_seed(secrets: Secrets) -> TokenSeed:
    """Return the seed of tokens, with those that sandboxes from before a rotation use."""
    return TokenSeed(secrets.seed.encode(), *(seed.encode() for seed in secrets.previous_seeds))


def _stored(settings: Settings) -> Secrets:
    path = settings.keyring
    stored = secrets_file.read(path)
    if stored is None:
        store = settings.state / "store.db"
        if store.exists():
            # New keys could not decrypt it, and no sandbox would accept its token.
            raise InvalidError(
                f"the keyring {path} is missing, but the store {store} exists",
                hint="restore the keyring from its backup, or mount its disk; nothing was changed",
            )
        stored = secrets_file.create(path)
    if not stored.encryption_keys:
        stored = secrets_file.update(path, with_encryption_key)
    return stored


def _from_settings(settings: Settings) -> Secrets:
    missing = [name for name in ("seed", "token") if not getattr(settings, name)]
    if missing:
        names = " and ".join(f"PADDOCK_{name.upper()}" for name in missing)
        raise InvalidError(
            f"on a cluster {names} must be set to the same value for every process",
            hint="`paddock kube install` creates a Secret with them",
        )
    accepted = dict.fromkeys(seed.strip() for seed in settings.accepted_seeds.split(","))
    return Secrets(
        seed=settings.seed,
        previous_seeds=tuple(seed for seed in accepted if seed not in ("", settings.seed)),
        token=settings.token,
        api_key=settings.api_key,
    )
