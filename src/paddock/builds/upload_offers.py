"""Permissions to upload files: tokens in URLs, each for one archive of one team, for a while.

Each team has a table of its own: however many a team requests, it displaces only its own.
"""

import secrets

from msgspec import Struct

from paddock.kit.clock import Clock

TOKEN_SECONDS = 30 * 60.0
TOKENS_PER_TEAM = 1000
"""The oldest one makes room for a new one."""


class UploadOffer(Struct, kw_only=True):
    """Permission to upload one archive, once."""

    team: str
    digest: str
    key_id: str
    """Id of the API key that requested it."""
    expires: float
    """Monotonic time."""
    is_used: bool = False
    """Whether a request uploads by it now."""


class UploadOffers:
    """The tokens that were given out and not used up. In memory only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._teams: dict[str, dict[str, UploadOffer]] = {}
        """By token, the oldest first."""
        self._team_of: dict[str, str] = {}

    def add(self, team: str, digest: str, key_id: str) -> str:
        """Return a new token, valid for `TOKEN_SECONDS`."""
        now = self._clock.monotonic()
        self._remove_expired(now)
        own = self._teams.setdefault(team, {})
        while len(own) >= TOKENS_PER_TEAM:
            self.remove(next(iter(own)))
        token = secrets.token_urlsafe(32)
        self._team_of[token] = team
        own[token] = UploadOffer(
            team=team, digest=digest, key_id=key_id, expires=now + TOKEN_SECONDS
        )
        self._teams[team] = own
        return token

    def get(self, token: str) -> UploadOffer | None:
        """Return what a token allows, or None if it is unknown or has expired."""
        # The token is random and used up soon; the lookup reveals nothing of other tokens.
        offer = self._teams.get(self._team_of.get(token, ""), {}).get(token)
        return offer if offer is not None and offer.expires > self._clock.monotonic() else None

    def remove(self, token: str) -> None:
        """Forget a token; it may be unknown."""
        team = self._team_of.pop(token, "")
        own = self._teams.get(team, {})
        own.pop(token, None)
        if not own:
            self._teams.pop(team, None)

    def _remove_expired(self, now: float) -> None:
        for own in tuple(self._teams.values()):
            # Those of a team are in the order of their ends.
            while own and (token := next(iter(own))) and own[token].expires <= now:
                self.remove(token)
