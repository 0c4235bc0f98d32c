"""Records of teams and API keys, as stored in Secrets of the system namespace. Pure.

A record holds hashes of a key, never the key. Records that were written before roles were roles of
a team (`version` 0) keep the rights that they had.
"""

import base64
import hashlib
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TypeVar

import msgspec
from msgspec import Struct, structs

from paddock.claims.caller import Caller, Role
from paddock.claims.quota.ledger import Quota
from paddock.kit.errors import UnauthenticatedError
from paddock.resources.kinds.builtin import Secret
from paddock.resources.network.internet import Internet

VERSION = 1
"""Of records written now. In version 0, an admin was what an operator is."""
_RIGHTS_BEFORE = {Role.ADMIN: Role.OPERATOR, Role.MEMBER: Role.LEGACY_MEMBER}
"""The role now that allows what a role of version 0 allowed."""
T = TypeVar("T", "ApiKey", "Team")


class Team(Struct, frozen=True):
    """An owner of sandboxes; its namespace has the same name."""

    name: str
    quota: Quota | None = None
    internet: Internet | None = None
    """Internet access of its sandboxes at most; `None`: as the installation says."""


class ApiKey(Struct, frozen=True, kw_only=True):
    """The record of a key; it does not contain the key."""

    id: str
    name: str
    team: str
    role: Role = Role.MEMBER
    """As stored; see `effective_role`."""
    hash: str
    mask: str
    created_at: datetime
    last_used: datetime | None = None
    quota: Quota | None = None
    scopes: tuple[str, ...] = ()
    version: int = 0
    expires_at: datetime | None = None
    previous_hash: str = ""
    """Of the key before the last rotation, which is accepted until `previous_until`."""
    previous_until: datetime | None = None

    @property
    def effective_role(self) -> Role:
        """The role that the key has."""
        return self.role if self.version else _RIGHTS_BEFORE.get(self.role, self.role)

    @property
    def caller(self) -> Caller:
        """The caller that the key authenticates."""
        return Caller(self.team, self.id, self.effective_role, self.scopes)

    @property
    def hashes(self) -> tuple[str, ...]:
        """The hashes by which it is found."""
        return (self.hash, self.previous_hash) if self.previous_hash else (self.hash,)

    def is_expired(self, now: datetime) -> bool:
        """Whether it is no longer accepted."""
        return self.expires_at is not None and now >= self.expires_at

    def check(self, given: str, now: datetime) -> None:
        """Raise `UnauthenticatedError` if the key with this hash is no longer accepted."""
        if self.expires_at is not None and now >= self.expires_at:
            raise UnauthenticatedError(
                f"the API key expired at {shown_time(self.expires_at)}",
                hint="ask an admin of your team for another: `paddock keys create`",
            )
        until = self.previous_until
        if given != self.hash and (until is None or now >= until):
            raise UnauthenticatedError(
                "the API key was replaced by `paddock keys rotate`",
                hint="use the key that the rotation printed",
            )

    def rotated(self, plain: str, now: datetime, grace_seconds: float) -> "ApiKey":
        """Return the record with another key; the one before is accepted during the grace."""
        has_grace = grace_seconds > 0
        return structs.replace(
            self,
            hash=key_hash(plain),
            mask=masked(plain),
            previous_hash=self.hash if has_grace else "",
            previous_until=now + timedelta(seconds=grace_seconds) if has_grace else None,
        )


def key_hash(key: str) -> str:
    """Return the stored hash of a key. Keys are long and random, so a plain hash is enough."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def masked(key: str) -> str:
    """Return the masked form of a key, for display."""
    return f"{key[:6]}…{key[-4:]}"


def shown_time(moment: datetime) -> str:
    """Return a time for people, to the second."""
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def read_record(secret: Secret, kind: type[T]) -> T:
    """Return the record in a Secret."""
    return msgspec.json.decode(base64.b64decode(secret.data["record"]), type=kind)


def record_data(record: ApiKey | Team) -> Mapping[str, str]:
    """Return the data of a record's Secret."""
    return {"record": base64.b64encode(msgspec.json.encode(record)).decode()}
