"""Which earlier secrets of a keyring something still needs. Pure."""

from collections.abc import Collection, Iterable

from msgspec import Struct, structs

from paddock.installation.secrets import Secrets, fingerprint
from paddock.kit.encryption import EncryptionKey
from paddock.resources.kinds.sandbox import ClaimIdentity
from paddock.resources.tokens import TokenSeed, matches


class Kept(Struct, frozen=True):
    """An earlier secret that stays, and what needs it."""

    name: str
    reason: str


class Pruned(Struct, frozen=True, kw_only=True):
    """A keyring without the earlier secrets that nothing needs."""

    secrets: Secrets
    dropped: tuple[str, ...] = ()
    """The names of the secrets that are gone, as `paddock keyring show` shows them."""
    kept: tuple[Kept, ...] = ()


def pruned(current: Secrets, claims: Iterable[ClaimIdentity], used_keys: Collection[str]) -> Pruned:
    """Return the keyring without earlier seeds of no claim and without unused encryption keys."""
    uses = _uses(current.previous_seeds, claims)
    earlier = current.encryption_keys[1:]
    needed_keys = [key for key in earlier if key.id in used_keys]
    kept = [Kept(_seed(seed), f"{count} sandboxes use it") for seed, count in uses.items() if count]
    kept += [Kept(_key(key), "the store may have rows of it until a start") for key in needed_keys]
    dropped = [_seed(seed) for seed, count in uses.items() if not count]
    dropped += [_key(key) for key in earlier if key not in needed_keys]
    return Pruned(
        secrets=structs.replace(
            current,
            previous_seeds=tuple(seed for seed, count in uses.items() if count),
            encryption_keys=(*current.encryption_keys[:1], *needed_keys),
        ),
        dropped=tuple(dropped),
        kept=tuple(kept),
    )


def _seed(seed: str) -> str:
    return f"seed {fingerprint(seed)}"


def _key(key: EncryptionKey) -> str:
    return f"encryption {key.id}"


def _uses(seeds: Collection[str], claims: Iterable[ClaimIdentity]) -> dict[str, int]:
    """Return the number of claims with a token of each seed."""
    made = {seed: TokenSeed(seed.encode()) for seed in seeds}
    uses = dict.fromkeys(seeds, 0)
    for claim in claims:
        for seed, tokens in made.items():
            uses[seed] += _is_of(tokens, claim)
    return uses


def _is_of(tokens: TokenSeed, claim: ClaimIdentity) -> bool:
    pairs = (
        (tokens.access_token, claim.access_token_hash),
        (tokens.traffic_token, claim.traffic_token_hash),
    )
    return any(known and matches(token(claim.sandbox_id), known) for token, known in pairs)
