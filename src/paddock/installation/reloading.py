"""Follows the file of the keyring: a rotation applies to running processes.

Each process of one machine looks at the file once a second. The keys of the store apply at once. A
new seed is accepted at once and used some seconds later, when every other process accepts it, too.
The bearer token applies at the next start: its clients have it from files of their own.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from paddock.installation.secrets import Secrets, fingerprint
from paddock.kit.encryption import DataCipher
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.resources.tokens import TokenSeed

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
ADOPT_SECONDS = 5.0
"""Time from accepting a new seed to using it: other processes accept it within POLL_SECONDS."""


class KeyringFollower:
    """Applies changes of the keyring to the seed and the cipher of a process."""

    def __init__(
        self,
        path: Path,
        load: Callable[[], Secrets],
        current: Secrets,
        seed: TokenSeed,
        cipher: DataCipher | None = None,
    ) -> None:
        """`current` is what seed and cipher were made from; `load` reads it again."""
        self._path = path
        self._load = load
        self._current = current
        self._seed = seed
        self._cipher = cipher
        self._seen: object = None

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            if (seen := _stamp(self._path)) != self._seen:
                self._seen = seen
                await self._reload()
            await asyncio.sleep(POLL_SECONDS)

    async def _reload(self) -> None:
        try:
            found = self._load()
        except PaddockError as error:
            log.warning("keyring not reloaded", extra=fields(error=error.message))
            return
        before, self._current = self._current, found
        if self._cipher is not None and found.encryption_keys != before.encryption_keys:
            self._cipher.use(found.encryption_keys)
            log.info("encryption key in use changed", extra=fields(key=self._cipher.key_id))
        seeds = (found.seed, *found.previous_seeds)
        if seeds == (before.seed, *before.previous_seeds):
            return
        if before.seed != found.seed:
            # The seed in use stays in use, even where a restored keyring lacks it.
            self._seed.use(*_encoded(dict.fromkeys((before.seed, *seeds))))
            await asyncio.sleep(ADOPT_SECONDS)
        self._seed.use(*_encoded(seeds))
        log.info("seed of tokens in use changed", extra=fields(seed=fingerprint(found.seed)))


def _encoded(seeds: dict[str, None] | tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(seed.encode() for seed in seeds)


def _stamp(path: Path) -> object:
    """Return what changes with every replacement of the file; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
