"""Teams and API keys: authentication and quotas.

A key is random; only its hash is stored, in a Secret of the system namespace, so that the same
code serves the embedded store and a cluster (`key_records`). Revoking a key deletes that Secret;
the informer's event removes it from memory at once. Lookup is one dictionary access by hash.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from types import EllipsisType

from msgspec import structs

from paddock.claims.caller import (
    DEFAULT_TEAM,
    LABEL_KIND,
    LABEL_TEAM,
    SYSTEM_NAMESPACE,
    Caller,
    Role,
)
from paddock.claims.quota.ledger import Quota
from paddock.kit import ids
from paddock.kit.clock import Clock
from paddock.kit.errors import (
    AlreadyExistsError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    PaddockError,
    UnauthenticatedError,
)
from paddock.kit.logs import fields
from paddock.manager.key_records import (
    VERSION,
    ApiKey,
    T,
    Team,
    key_hash,
    masked,
    read_record,
    record_data,
)
from paddock.resources.kinds.builtin import Namespace, Secret
from paddock.resources.meta import Key, ObjectMeta
from paddock.resources.network.internet import Internet
from paddock.resources.rights import parse_scopes
from paddock.store.port import Store

log = logging.getLogger(__name__)

KIND_KEY = "api-key"
KIND_TEAM = "team"
_LAST_USED_SECONDS = 60.0
"""A key's last use is written at most this often."""


class Keyring:
    """All keys and teams, in memory, updated by the Secret informer."""

    def __init__(self, store: Store, clock: Clock, namespace: str = SYSTEM_NAMESPACE) -> None:
        self.namespace = namespace
        """The namespace of their Secrets."""
        self._store = store
        self.clock = clock
        self._keys: dict[str, ApiKey] = {}
        self._by_hash: dict[str, Caller] = {}
        self._teams: dict[str, Team] = {}
        self._used: dict[str, datetime] = {}
        self._revoked: set[str] = set()
        self._team_callbacks: list[Callable[[str], None]] = []

    def on_team_change(self, callback: Callable[[str], None]) -> None:
        """Call back with the name of each team whose network policy changes."""
        self._team_callbacks.append(callback)

    def observe(self, old: Secret | None, new: Secret | None) -> None:
        """Apply one event of the Secret informer."""
        secret = new or old
        if secret is None:
            return
        kind = secret.metadata.labels.get(LABEL_KIND)
        if kind == KIND_KEY:
            self._observe_key(secret, gone=new is None)
        elif kind == KIND_TEAM:
            self._observe_team(secret, gone=new is None)

    def _observe_key(self, secret: Secret, *, gone: bool) -> None:
        known = self._keys.pop(secret.metadata.name, None)
        if known is not None:
            for each in known.hashes:
                self._by_hash.pop(each, None)
        if gone:
            self._revoked.add(secret.metadata.uid)
        if secret.metadata.uid in self._revoked:
            # A late event of a revoked key must not restore it.
            return
        if not gone and not secret.is_deleting:
            key = read_record(secret, ApiKey)
            self._keys[key.id] = key
            caller = key.caller
            self._by_hash.update((each, caller) for each in key.hashes)

    def _observe_team(self, secret: Secret, *, gone: bool) -> None:
        team = read_record(secret, Team)
        before = self.team(team.name)
        if gone or secret.is_deleting:
            self._teams.pop(team.name, None)
        else:
            self._teams[team.name] = team
        if before.internet is not self.team(team.name).internet:
            for callback in self._team_callbacks:
                callback(team.name)

    def authenticate(self, key: str | None) -> Caller:
        """Return the caller; `UnauthenticatedError` for a key that is unknown, revoked, expired or
        replaced."""
        given = key_hash(key) if key else ""
        caller = self._by_hash.get(given)
        if caller is None:
            raise UnauthenticatedError(
                "Invalid API key" if key else "API key is missing",
                hint="send it as X-API-Key; `paddock keys create` creates one",
            )
        now = self.clock.now()
        self._keys[caller.key_id].check(given, now)
        self._used[caller.key_id] = now
        return caller

    def listed(self, team: str | None = None) -> tuple[ApiKey, ...]:
        """Return a team's keys, or all, oldest first."""
        found = (self._shown(key) for key in self._keys.values() if team in (None, key.team))
        return tuple(sorted(found, key=lambda key: (key.created_at, key.id)))

    def _shown(self, key: ApiKey) -> ApiKey:
        """Return the key with its last use as known here, written or not."""
        return structs.replace(key, last_used=self._used.get(key.id, key.last_used))

    def key(self, key_id: str) -> ApiKey:
        """Return a key by id; `NotFoundError` if there is none."""
        if key_id not in self._keys:
            raise NotFoundError(f"API key {key_id!r} was not found")
        return self._keys[key_id]

    def team(self, name: str) -> Team:
        """Return a team; one that was not declared has no quota."""
        return self._teams.get(name) or Team(name)

    def teams(self) -> tuple[Team, ...]:
        """Return all teams: those declared and those that have keys."""
        names = {*self._teams, *(key.team for key in self._keys.values())}
        return tuple(self.team(name) for name in sorted(names))

    def quotas(self, caller: Caller) -> tuple[tuple[str, Quota | None], ...]:
        """Return the quotas that a caller's claims count against, by holder."""
        team = (f"team:{caller.team}", self.team(caller.team).quota)
        if not caller.key_id:
            return (team,)
        key = self._keys.get(caller.key_id)
        return (team, (f"key:{caller.key_id}", key.quota if key else None))

    def quota_of(self, holder: str) -> Quota | None:
        """Return the current quota of one holder."""
        kind, _, name = holder.partition(":")
        if kind == "team":
            return self.team(name).quota
        key = self._keys.get(name)
        return key.quota if key else None

    async def create(
        self,
        *,
        name: str,
        team: str = DEFAULT_TEAM,
        role: Role = Role.MEMBER,
        scopes: Sequence[str] = (),
        expires_seconds: float | None = None,
        quota: Quota | None = None,
        secret: str | None = None,
        key_id: str | None = None,
    ) -> tuple[ApiKey, str]:
        """Create a key; the second value is the key itself, which cannot be read again.

        With `key_id`, only one of several processes that create the same key succeeds.
        """
        if not name.strip():
            raise InvalidError("a key needs a name", hint="for example the person or program")
        if team == self.namespace:
            raise InvalidError.at("team", f"{team!r} is the namespace of Paddock itself")
        plain = secret or ids.api_key()
        now = self.clock.now()
        record = ApiKey(
            id=key_id or ids.uid(),
            name=name,
            team=team,
            role=role,
            scopes=parse_scopes(scopes),
            version=VERSION,
            hash=key_hash(plain),
            mask=masked(plain),
            created_at=now,
            expires_at=_after(now, expires_seconds),
            quota=quota,
        )
        if record.hash in self._by_hash:
            raise AlreadyExistsError("this API key exists already")
        await self._ensure_namespace(team)
        stored = await self._store.create(self._secret(record.id, KIND_KEY, team, record))
        self.observe(None, stored)
        return record, plain

    async def _ensure_namespace(self, team: str) -> None:
        """Create the team's namespace if it is missing and we have the right."""
        with contextlib.suppress(AlreadyExistsError, ForbiddenError):
            await self._store.create(Namespace(metadata=ObjectMeta(name=team)))

    async def revoke(self, key_id: str) -> None:
        """Revoke a key, effective at once."""
        self.key(key_id)
        gone = await self._store.delete(Secret, Key(self.namespace, key_id))
        self.observe(gone, None)

    async def rotate(self, key_id: str, *, grace_seconds: float = 0.0) -> tuple[ApiKey, str]:
        """Replace a key; the one before is accepted until the grace ends.

        The second value is the new key, which cannot be read again.
        """
        self.key(key_id)
        plain = ids.api_key()
        record = await self._write(
            key_id,
            ApiKey,
            lambda record: record.rotated(plain, self.clock.now(), grace_seconds),
        )
        return record, plain

    async def update_key(
        self,
        key_id: str,
        *,
        name: str | None = None,
        quota: Quota | None = None,
        expires_seconds: float | EllipsisType | None = ...,
    ) -> ApiKey:
        """Rename a key, replace its quota, or set when it expires; `None`: never."""
        self.key(key_id)

        def changed(record: ApiKey) -> ApiKey:
            if name is not None:
                record = structs.replace(record, name=name)
            if not isinstance(expires_seconds, EllipsisType):
                end = _after(self.clock.now(), expires_seconds)
                record = structs.replace(record, expires_at=end)
            return structs.replace(record, quota=quota) if quota is not None else record

        return await self._write(key_id, ApiKey, changed)

    async def set_team_quota(self, team: str, quota: Quota) -> Team:
        """Declare a team and replace its quota."""
        return await self._set_team(team, lambda record: structs.replace(record, quota=quota))

    async def set_team_internet(self, team: str, internet: Internet | None) -> Team:
        """Declare a team and replace its internet access; `None`: as the installation says."""
        return await self._set_team(team, lambda record: structs.replace(record, internet=internet))

    async def _set_team(self, team: str, change: Callable[[Team], Team]) -> Team:
        record = change(Team(team))
        try:
            stored = await self._store.create(self._secret(f"team-{team}", KIND_TEAM, team, record))
            self.observe(None, stored)
        except AlreadyExistsError:
            return await self._write(f"team-{team}", Team, change)
        return record

    async def flush_last_used(self) -> None:
        """Write the last use of keys, at most once a minute per key."""
        for key_id, moment in list(self._used.items()):
            known = self._keys.get(key_id)
            if known is None:
                del self._used[key_id]
                continue
            since = (moment - known.last_used).total_seconds() if known.last_used else None
            if since is None or since >= _LAST_USED_SECONDS:
                del self._used[key_id]
                await self._write_last_used(key_id, moment)

    async def _write_last_used(self, key_id: str, moment: datetime) -> None:
        try:
            await self._write(key_id, ApiKey, lambda key: structs.replace(key, last_used=moment))
        except NotFoundError:
            # Revoked meanwhile: its last use no longer matters.
            return
        except PaddockError as error:
            # The store is unavailable: retried with the next flush.
            self._used.setdefault(key_id, moment)
            log.warning("last use of an API key was not written", extra=fields(error=error.message))

    async def _write(self, name: str, kind: type[T], change: Callable[[T], T]) -> T:
        """Change the stored record; concurrent changes of other fields are kept."""
        while True:
            current = await self._store.get(Secret, Key(self.namespace, name))
            record = change(read_record(current, kind))
            try:
                stored = await self._store.update(
                    structs.replace(current, data=record_data(record))
                )
            except ConflictError:
                continue
            self.observe(current, stored)
            return record

    def _secret(self, name: str, kind: str, team: str, record: ApiKey | Team) -> Secret:
        return Secret(
            metadata=ObjectMeta(
                name=name,
                namespace=self.namespace,
                labels={LABEL_KIND: kind, LABEL_TEAM: team},
            ),
            type="paddock.dev/record",
            data=record_data(record),
        )


def _after(now: datetime, seconds: float | None) -> datetime | None:
    return None if seconds is None else now + timedelta(seconds=seconds)
