"""Routes for teams and API keys. Admins manage keys of their team, operators those of all."""

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field
from starlette.requests import Request
from starlette.responses import Response

from paddock.api.audit.notes import notes_of
from paddock.api.e2b.context import (
    E2bContext,
    RouteAccess,
    json_response,
    no_content,
    read_body,
    route,
)
from paddock.claims.caller import Caller, Role
from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.kit.errors import ForbiddenError, InvalidError, NotFoundError
from paddock.manager.key_records import ApiKey
from paddock.resources.network.internet import Internet
from paddock.resources.rights import MANAGERS

MAX_GRACE_SECONDS = 30 * 24 * 3600
Lifetime = Annotated[int, Meta(ge=1, le=10 * 366 * 24 * 3600)]
"""Seconds from now until a key expires."""


class QuotaLimitBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One limit. Stored quotas may have fields of other versions; those of requests may not."""

    dimension: Dimension
    scope: QuotaScope
    limit: int


class QuotaBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A quota of a request. To remove a limit, leave it out."""

    limits: tuple[QuotaLimitBody, ...]

    def quota(self) -> Quota:
        """Return the quota; `InvalidError` for a limit that means nothing."""
        for number, item in enumerate(self.limits):
            if item.limit < 0:
                raise InvalidError.at(f"quota.limits[{number}].limit", "must be at least 0")
            if item.dimension is Dimension.STORED and item.scope is not QuotaScope.ALL:
                raise InvalidError.at(
                    f"quota.limits[{number}].scope",
                    "must be all for stored.bytes: what is stored does not run",
                )
        return Quota(
            tuple(QuotaLimit(item.dimension, item.scope, item.limit) for item in self.limits)
        )


class NewKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /api-keys`."""

    name: str
    team_name: str | None = field(default=None, name="teamName")
    role: Literal["reader", "member", "admin", "operator"] = "member"
    scopes: tuple[str, ...] = ()
    expires_in_seconds: Lifetime | None = field(default=None, name="expiresInSeconds")
    quota: QuotaBody | None = None


class KeyPatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`PATCH /api-keys/{id}`."""

    name: str | None = None
    quota: QuotaBody | None = None
    expires_in_seconds: Lifetime | UnsetType | None = field(default=UNSET, name="expiresInSeconds")
    """Null: never."""


class KeyRotation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /api-keys/{id}/rotate`."""

    grace_seconds: Annotated[int, Meta(ge=0, le=MAX_GRACE_SECONDS)] = field(
        default=0, name="graceSeconds"
    )
    """How long the key before is still accepted."""


class TeamPatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`PATCH /teams/{name}`."""

    quota: QuotaBody | UnsetType = UNSET
    internet: Internet | UnsetType | None = UNSET
    """Null: as the installation says."""


def _shown(context: E2bContext, key: ApiKey) -> dict[str, object]:
    prefix, _, suffix = key.mask.partition("…")
    mask: Mapping[str, object] = {
        "prefix": "e2b_",
        "valueLength": 40,
        "maskedValuePrefix": prefix.removeprefix("e2b_"),
        "maskedValueSuffix": suffix,
    }
    now = context.keyring.clock.now()
    is_replaced = key.previous_until is not None and now < key.previous_until
    return {
        "id": key.id,
        "name": key.name,
        "team": key.team,
        "role": key.effective_role,
        "scopes": key.scopes,
        "mask": mask,
        "createdAt": key.created_at,
        "lastUsed": key.last_used,
        "expiresAt": key.expires_at,
        "isExpired": key.is_expired(now),
        "previousKeyUntil": key.previous_until if is_replaced else None,
        "createdBy": None,
        "quota": key.quota,
    }


def _owned(context: E2bContext, caller: Caller, key_id: str, verb: str) -> ApiKey:
    """Return a key that the caller may change; one of another team does not exist for it."""
    key = context.keyring.key(key_id)
    if not caller.may(verb, "apikeys", namespace=key.team):
        raise NotFoundError(f"API key {key_id!r} was not found")
    _require_managed(caller, key.effective_role)
    return key


def _require_managed(caller: Caller, role: Role) -> None:
    if role not in MANAGERS.get(caller.role, ()):
        raise ForbiddenError(
            f"a key with the role {caller.role} cannot manage keys with the role {role}",
            hint="use a key with the role operator",
        )


def _require_free(context: E2bContext, caller: Caller, what: str) -> None:
    """Raise for a key with a quota: it could give itself, or another key, more."""
    maker = context.keyring.key(caller.key_id) if caller.key_id else None
    if not caller.is_operator and maker is not None and maker.quota and maker.quota.limits:
        raise ForbiddenError(
            f"a key with a quota cannot {what}: it could exceed its quota",
            hint="ask an operator for another key",
        )


async def list_keys(context: E2bContext, _request: Request, caller: Caller) -> Response:
    """List the team's keys, or all keys for an operator."""
    team = None if caller.may("list", "apikeys", namespace="") else caller.team
    return json_response([_shown(context, key) for key in context.keyring.listed(team)])


async def create_key(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Create a key; only this response contains its value."""
    wanted = await read_body(request, NewKey)
    team, role = wanted.team_name or caller.team, Role(wanted.role)
    caller.require("create", "apikeys", namespace=team)
    _require_managed(caller, role)
    _require_free(context, caller, "create keys")
    if wanted.quota is not None and caller.role is Role.LEGACY_MEMBER:
        raise ForbiddenError("only admins and operators can create keys with quotas")
    key, plain = await context.keyring.create(
        name=wanted.name,
        team=team,
        role=role,
        scopes=wanted.scopes,
        expires_seconds=wanted.expires_in_seconds,
        quota=wanted.quota.quota() if wanted.quota else None,
    )
    notes_of(request.scope).created = (key.id,)
    return json_response({**_shown(context, key), "key": plain}, 201)


async def change_key(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Rename a key, change its quota, or set when it expires."""
    wanted = await read_body(request, KeyPatch)
    key = _owned(context, caller, request.path_params["id"], "update")
    if wanted.quota is not None:
        if caller.role is Role.LEGACY_MEMBER:
            raise ForbiddenError("only admins and operators can change quotas")
        _require_free(context, caller, "change quotas")
    seconds = wanted.expires_in_seconds
    changed = await context.keyring.update_key(
        key.id,
        name=wanted.name,
        quota=wanted.quota.quota() if wanted.quota else None,
        expires_seconds=... if isinstance(seconds, UnsetType) else seconds,
    )
    return json_response(_shown(context, changed))


async def rotate_key(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Replace a key by another with the same rights; only this response contains its value."""
    wanted = await read_body(request, KeyRotation, default=KeyRotation())
    key = _owned(context, caller, request.path_params["id"], "update")
    if key.id != caller.key_id:
        # Who has the new key has what it may do: a quota of another key, for example.
        _require_free(context, caller, "rotate other keys")
    rotated, plain = await context.keyring.rotate(key.id, grace_seconds=wanted.grace_seconds)
    notes_of(request.scope).created = (rotated.id,)
    return json_response({**_shown(context, rotated), "key": plain})


async def revoke_key(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Revoke a key immediately."""
    key = _owned(context, caller, request.path_params["id"], "delete")
    await context.keyring.revoke(key.id)
    return no_content()


async def teams(context: E2bContext, request: Request, caller: Caller) -> Response:
    """List the caller's team, or all teams for an operator."""
    sees_all = caller.may("list", "teams", namespace="")
    names = [team for team in context.keyring.teams() if sees_all or team.name == caller.team]
    return json_response(
        [
            {
                "teamID": team.name,
                "name": team.name,
                "apiKey": request.headers.get("x-api-key", "") if team.name == caller.team else "",
                "isDefault": team.name == caller.team,
                "quota": team.quota,
                "usage": context.manager.usage.of(f"team:{team.name}"),
                "internet": team.internet,
            }
            for team in names
        ]
    )


async def change_team(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Change a team's quota or internet access."""
    wanted = await read_body(request, TeamPatch)
    name = request.path_params["name"]
    if isinstance(wanted.quota, UnsetType) and isinstance(wanted.internet, UnsetType):
        raise InvalidError.at("quota", "pass a quota or internet")
    if isinstance(wanted.internet, Internet):
        context.manager.networks.ceilings.check(wanted.internet, "internet")
    if not isinstance(wanted.quota, UnsetType):
        await context.keyring.set_team_quota(name, wanted.quota.quota())
    if not isinstance(wanted.internet, UnsetType):
        await context.keyring.set_team_internet(name, wanted.internet)
    team = context.keyring.team(name)
    return json_response(
        {"teamID": team.name, "name": name, "quota": team.quota, "internet": team.internet}
    )


ROUTES = (
    route("/api-keys", "GET", list_keys, RouteAccess("list", "apikeys")),
    route("/api-keys", "POST", create_key, RouteAccess("create", "apikeys")),
    route("/api-keys/{id}", "PATCH", change_key, RouteAccess("update", "apikeys")),
    route("/api-keys/{id}/rotate", "POST", rotate_key, RouteAccess("update", "apikeys")),
    route("/api-keys/{id}", "DELETE", revoke_key, RouteAccess("delete", "apikeys")),
    route("/teams", "GET", teams, RouteAccess("list", "teams")),
    route("/teams/{name}", "PATCH", change_team, RouteAccess("update", "teams")),
)
