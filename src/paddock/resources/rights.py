"""What a caller may do: roles, scopes of keys, and the one decision about them. Pure.

A right is a verb of Kubernetes on a resource in a namespace; a team's namespace has its name. Use
cases of E2B's API are subresources: pausing a sandbox is `create sandboxes/pause`. Requesting a
sandbox is `create sandboxclaims`. `create sandboxes` means a Sandbox object that no quota counts,
so it is for operators; `update sandboxes` pauses, resumes and extends, as the use cases do. The
declarative API narrows the rights of keys further (`api/kube/key_access.py`), and what they write
(`api/kube/key_writes/`).

A decision is two lookups in sets. A scope restricts the role of a key and never extends it.
"""

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum

from msgspec import Struct

from paddock.kit.errors import ForbiddenError, InvalidError
from paddock.resources.schema import formats

SHARED_NAMESPACE = "default"
"""Pools and public templates of this namespace serve every team."""
READ_VERBS = ("get", "list", "watch")
WRITE_VERBS = ("create", "update", "patch", "delete", "deletecollection")
_DELETE_VERBS = ("delete", "deletecollection")
USES = ("connect", "fork", "network", "pause", "refreshes", "resume", "snapshots", "timeout")
"""Use cases of a sandbox, as subresources."""
OBSERVED = ("logs", "metrics", "network")
"""What can be read about a sandbox, as subresources."""


class Role(StrEnum):
    """The role of an API key."""

    READER = "reader"
    """Reads what its team has."""
    MEMBER = "member"
    """Requests, uses and ends sandboxes of its team."""
    LEGACY_MEMBER = "legacy-member"
    """A member's key that was created before teams had admins: it also manages keys and templates
    of its team, as it always could. It cannot be given to new keys."""
    ADMIN = "admin"
    """Also manages the keys, templates and pools of its team."""
    OPERATOR = "operator"
    """Does everything, in every team."""


class Scope(StrEnum):
    """Restrictions of a key beyond its role; `template:NAME` is the third."""

    CREATE = "create"
    """Requests sandboxes, and uses those that this key requested."""
    READ = "read"
    """Reads."""


TEMPLATE_SCOPE = "template:"
"""Followed by a name: only this template, pool or snapshot, and sandboxes made from it."""


class Subject(Struct, frozen=True):
    """Who asks: a team, a key of it, and what the key may do."""

    team: str
    key_id: str = ""
    role: Role = Role.MEMBER
    scopes: tuple[str, ...] = ()


class AccessRequest(Struct, frozen=True, kw_only=True):
    """What is asked. A field that is `None` is not known: the answer is about some object."""

    verb: str
    resource: str
    """The plural, with a subresource: `sandboxes/pause`."""
    namespace: str | None = None
    """The owning team. Empty: the whole installation. `None`: the subject's own."""
    name: str | None = None
    template: str | None = None
    """The reference from which a sandbox is, or is to be, made."""
    key_id: str | None = None
    """The key that requested the sandbox."""


class AccessDecision(Struct, frozen=True):
    """Whether something is allowed, and why not."""

    is_allowed: bool
    reason: str = ""


_ALLOWED = AccessDecision(True)
_KINDS = (
    *("sandboxes", "sandboxclaims", "sandboxtemplates", "sandboxpools"),
    *("sandboxenvs", "batchsandboxes", "checkpoints", "templatebuilds"),
)
_NAMED_BY_TEMPLATE = frozenset(("sandboxtemplates", "sandboxpools", "sandboxenvs", "checkpoints"))
"""Kinds whose own name is what a sandbox can be made from."""
_SHARED_WRITES = frozenset(("sandboxtemplates", "sandboxpools"))


def _rights(resources: Iterable[str], verbs: Iterable[str]) -> frozenset[tuple[str, str]]:
    return frozenset((resource, verb) for resource in resources for verb in verbs)


_READER = (
    _rights(_KINDS, READ_VERBS)
    | _rights((f"{kind}/status" for kind in _KINDS), ("get",))
    | _rights((f"sandboxes/{part}" for part in OBSERVED), ("get",))
    | _rights(("sandboxpools/scale", "batchsandboxes/scale"), ("get",))
    | _rights(("events", "apikeys"), READ_VERBS)
    | _rights(("teams",), ("get", "list"))
    | _rights(("namespaces",), ("get",))
)
_MEMBER = (
    _READER
    | _rights(("sandboxclaims",), ("create", "update", "patch"))
    | _rights(("batchsandboxes",), ("create", "update", "patch"))
    | _rights(("batchsandboxes/scale",), ("update", "patch"))
    | _rights(("sandboxclaims", "batchsandboxes", "sandboxes", "checkpoints"), _DELETE_VERBS)
    | _rights(("checkpoints",), ("create", "update", "patch"))
    | _rights(("sandboxes",), ("update", "patch"))
    | _rights(("templatebuilds",), ("create", *_DELETE_VERBS))
    | _rights((f"sandboxes/{use}" for use in USES), ("create", "update"))
)
_ADMIN = (
    _MEMBER
    | _rights(("sandboxtemplates", "sandboxpools"), WRITE_VERBS)
    | _rights(("sandboxpools/scale",), ("update", "patch"))
    | _rights(("apikeys",), WRITE_VERBS)
)
_LEGACY_MEMBER = (
    _MEMBER
    | _rights(("apikeys",), ("create", "update", "patch", "delete"))
    | _rights(("templates",), ("patch", "delete"))
)
ROLES: Mapping[Role, frozenset[tuple[str, str]]] = {
    Role.READER: _READER,
    Role.MEMBER: _MEMBER,
    Role.LEGACY_MEMBER: _LEGACY_MEMBER,
    Role.ADMIN: _ADMIN | _rights(("templates",), ("patch", "delete")),
}
"""The rights of each role in its team's namespace. Operators have all.

`templates` are changes of a template by E2B's API: publishing one, and deleting or building one
that was declared. `create templatebuilds` builds a template and assigns its tags, `delete
templatebuilds` deletes a template that was built, and its tags.
"""
_CREATE_SCOPE = (
    _rights(("sandboxclaims", "sandboxes"), (*READ_VERBS, *_DELETE_VERBS))
    | _rights(("sandboxclaims",), ("create",))
    | _rights((f"sandboxes/{part}" for part in OBSERVED), ("get",))
    | _rights((f"sandboxes/{use}" for use in USES if use != "snapshots"), ("create", "update"))
)
_TEMPLATE_SCOPE = frozenset(
    (*_KINDS, "templates", "sandboxpools/scale", *(f"{kind}/status" for kind in _KINDS))
) | {f"sandboxes/{part}" for part in (*USES, *OBSERVED) if part not in ("fork", "snapshots")}
"""Forks and snapshots are missing: they are made from, or make, something of another name."""
MANAGERS: Mapping[Role, frozenset[Role]] = {
    Role.LEGACY_MEMBER: frozenset((Role.READER, Role.MEMBER, Role.LEGACY_MEMBER)),
    Role.ADMIN: frozenset((Role.READER, Role.MEMBER, Role.LEGACY_MEMBER, Role.ADMIN)),
    Role.OPERATOR: frozenset(Role),
}
"""Whose keys a role can create, change and revoke."""


def decide(subject: Subject, access: AccessRequest) -> AccessDecision:
    """Return whether the subject may do this."""
    role = subject.role
    if role is not Role.OPERATOR:
        if (access.resource, access.verb) not in ROLES[role]:
            return _refused(access, f"the role {role} does not allow it")
        home = access.name if access.resource == "namespaces" else access.namespace
        if home is not None and home != subject.team:
            where = f"namespace {home!r} belongs to another team" if home else "other teams exist"
            return _refused(access, f"{where}; the key is of team {subject.team!r}")
        if _is_shared_write(subject, access):
            return _refused(access, f"namespace {SHARED_NAMESPACE!r} serves every team")
    for scope in subject.scopes:
        if problem := _scope_problem(scope, subject, access):
            return _refused(access, problem)
    return _ALLOWED


def require(subject: Subject, access: AccessRequest) -> None:
    """Raise `ForbiddenError` if the subject may not do this."""
    decision = decide(subject, access)
    if not decision.is_allowed:
        raise ForbiddenError(decision.reason, hint="use a key with another role or scope")


def _refused(access: AccessRequest, reason: str) -> AccessDecision:
    return AccessDecision(False, f"this key may not {access.verb} {access.resource}: {reason}")


def _is_shared_write(subject: Subject, access: AccessRequest) -> bool:
    resource = access.resource.partition("/")[0]
    home = subject.team if access.namespace is None else access.namespace
    return home == SHARED_NAMESPACE and resource in _SHARED_WRITES and access.verb not in READ_VERBS


def _scope_problem(scope: str, subject: Subject, access: AccessRequest) -> str:
    """Return why a scope does not allow this, or an empty string."""
    if scope == Scope.READ:
        is_allowed = access.verb in READ_VERBS
    elif scope == Scope.CREATE:
        is_foreign = access.key_id is not None and access.key_id != (subject.key_id or None)
        is_allowed = (access.resource, access.verb) in _CREATE_SCOPE and not is_foreign
        if is_foreign:
            return f"the scope {scope} allows only sandboxes that this key requested"
    elif scope.startswith(TEMPLATE_SCOPE):
        is_allowed = access.resource in _TEMPLATE_SCOPE and _is_of_template(
            scope.removeprefix(TEMPLATE_SCOPE), subject, access
        )
    else:
        # A scope of a later version: what it allows is not known, so it allows nothing.
        is_allowed = False
    return "" if is_allowed else f"its scope is {scope}"


def _is_of_template(wanted: str, subject: Subject, access: AccessRequest) -> bool:
    if access.template is not None:
        space, _, name = access.template.lower().rpartition("/")
        spaces = ("", subject.team, SHARED_NAMESPACE)
        return name.removesuffix(":default") == wanted and space in spaces
    if access.name is not None and access.resource.partition("/")[0] in _NAMED_BY_TEMPLATE:
        return access.name == wanted
    return True


def parse_scopes(texts: Collection[str]) -> tuple[str, ...]:
    """Return the scopes, sorted and without duplicates; `InvalidError` for an unknown one."""
    scopes = tuple(sorted(set(texts)))
    for number, scope in enumerate(texts):
        name = scope.removeprefix(TEMPLATE_SCOPE)
        is_template = scope.startswith(TEMPLATE_SCOPE) and not formats.dns_label(name)
        if not is_template and scope not in tuple(Scope):
            raise InvalidError.at(f"scopes[{number}]", f"{scope!r} is not a scope", hint=_KNOWN)
    if sum(scope.startswith(TEMPLATE_SCOPE) for scope in scopes) > 1:
        raise InvalidError.at(
            "scopes", "two templates: a key needs all of its scopes, so it could use neither"
        )
    return scopes


_KNOWN = "scopes are create, read and template:NAME"
