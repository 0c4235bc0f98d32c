"""Routes for teams and API keys. Administrators can read and change those of every team."""

from collections.abc import Mapping

from msgspec import UNSET, Struct, UnsetType, field
from starlette.requests import Request
from starlette.responses import Response

from paddock.api.e2b.context import E2bContext, json_response, no_content, read_body, route
from paddock.claims.caller import Caller, Role
from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.kit.errors import ForbiddenError, InvalidError, NotFoundError
from paddock.manager.keys import ApiKey
from paddock.resources.network.internet import Internet


class QuotaLimitBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One limit. Stored quotas may have fields of other versions; those of requests may not."""

    dimension: Dimension
    scope: QuotaScope
    limit: int


class QuotaBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A quota of a request. To remove a limit, leave it out."""

    limits: tuple[QuotaLimitBody, ...]

    def quota(self) -> Quota:
        """Return the quota; `InvalidError` for a negative limit."""
        for number, item in enumerate(self.limits):
            if item.limit < 0:
                raise InvalidError.at(f"quota.limits[{number}].limit", "must be at least 0")
        return Quota(
            tuple(QuotaLimit(item.dimension, item.scope, item.limit) for item in self.limits)
        )


class NewKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /api-keys`."""

    name: str
    team_name: str | None = field(default=None, name="teamName")
    role: Role = Role.MEMBER
    quota: QuotaBody | None = None


class KeyPatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`PATCH /api-keys/{id}`."""

    name: str | None = None
    quota: QuotaBody | None = None


class TeamPatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`PATCH /teams/{name}`."""

    quota: QuotaBody | UnsetType = UNSET
    internet: Internet | UnsetType | None = UNSET
    """Null: as the installation says."""


def _shown(key: ApiKey) -> dict[str, object]:
    prefix, _, suffix = key.mask.partition("…")
    mask: Mapping[str, object] = {
        "prefix": "e2b_",
        "valueLength": 40,
        "maskedValuePrefix": prefix.removeprefix("e2b_"),
        "maskedValueSuffix": suffix,
    }
    return {
        "id": key.id,
        "name": key.name,
        "team": key.team,
        "role": key.role,
        "mask": mask,
        "createdAt": key.created_at,
        "lastUsed": key.last_used,
        "createdBy": None,
        "quota": key.quota,
    }


def _owned(context: E2bContext, caller: Caller, key_id: str) -> ApiKey:
    key = context.keyring.key(key_id)
    if not caller.is_admin and key.team != caller.team:
        raise NotFoundError(f"API key {key_id!r} was not found")
    return key


def _changeable(context: E2bContext, caller: Caller, key_id: str) -> ApiKey:
    key = _owned(context, caller, key_id)
    if key.role is Role.ADMIN and not caller.is_admin:
        raise ForbiddenError("only an administrator can change an administrator's key")
    return key


async def list_keys(context: E2bContext, _request: Request, caller: Caller) -> Response:
    """List the team's keys, or all keys for an administrator."""
    team = None if caller.is_admin else caller.team
    return json_response([_shown(key) for key in context.keyring.listed(team)])


async def create_key(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Create a key; only this response contains its value."""
    caller.require_write_access()
    wanted = await read_body(request, NewKey)
    team = wanted.team_name or caller.team
    privileged = team != caller.team or wanted.quota is not None or wanted.role is Role.ADMIN
    if privileged and not caller.is_admin:
        raise ForbiddenError("only an administrator can create keys for other teams or with quotas")
    maker = context.keyring.key(caller.key_id) if caller.key_id else None
    if not caller.is_admin and maker is not None and maker.quota and maker.quota.limits:
        raise ForbiddenError(
            "a key with a quota cannot create keys: each of them would have a quota of its own",
            hint="ask an administrator for another key",
        )
    quota = wanted.quota.quota() if wanted.quota else None
    key, plain = await context.keyring.create(
        name=wanted.name, team=team, role=wanted.role, quota=quota
    )
    request.state.made = key.id
    return json_response({**_shown(key), "key": plain}, 201)


async def change_key(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Rename a key or change its quota."""
    caller.require_write_access()
    wanted = await read_body(request, KeyPatch)
    key = _changeable(context, caller, request.path_params["id"])
    if wanted.quota is not None and not caller.is_admin:
        raise ForbiddenError("only an administrator can change quotas")
    changed = await context.keyring.update_key(
        key.id, name=wanted.name, quota=wanted.quota.quota() if wanted.quota else None
    )
    return json_response(_shown(changed))


async def revoke_key(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Revoke a key immediately."""
    caller.require_write_access()
    key = _changeable(context, caller, request.path_params["id"])
    await context.keyring.revoke(key.id)
    return no_content()


async def teams(context: E2bContext, request: Request, caller: Caller) -> Response:
    """List the caller's team, or all teams for an administrator."""
    names = [
        team for team in context.keyring.teams() if caller.is_admin or team.name == caller.team
    ]
    return json_response(
        [
            {
                "teamID": team.name,
                "name": team.name,
                "apiKey": request.headers.get("x-api-key", "") if team.name == caller.team else "",
                "isDefault": team.name == caller.team,
                "quota": team.quota,
                "internet": team.internet,
            }
            for team in names
        ]
    )


async def change_team(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Change a team's quota or internet access."""
    if not caller.is_admin:
        raise ForbiddenError("only an administrator can change teams")
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
    route("/api-keys", "GET", list_keys),
    route("/api-keys", "POST", create_key),
    route("/api-keys/{id}", "PATCH", change_key),
    route("/api-keys/{id}", "DELETE", revoke_key),
    route("/teams", "GET", teams),
    route("/teams/{name}", "PATCH", change_team),
)
