"""The decision about rights: a table, and that a scope never extends a role."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.kit.errors import InvalidError
from paddock.resources.rights import (
    READ_VERBS,
    ROLES,
    USES,
    WRITE_VERBS,
    AccessRequest,
    Role,
    Scope,
    Subject,
    decide,
    parse_scopes,
)

READER, MEMBER, LEGACY, ADMIN, OPERATOR = (
    Role.READER,
    Role.MEMBER,
    Role.LEGACY_MEMBER,
    Role.ADMIN,
    Role.OPERATOR,
)
EVERYBODY = {READER, MEMBER, LEGACY, ADMIN, OPERATOR}
USERS = EVERYBODY - {READER}
TABLE = [
    ("get", "sandboxes", EVERYBODY),
    ("watch", "sandboxes", EVERYBODY),
    ("list", "events", EVERYBODY),
    ("list", "apikeys", EVERYBODY),
    ("list", "teams", EVERYBODY),
    ("get", "sandboxes/logs", EVERYBODY),
    ("create", "sandboxclaims", USERS),
    ("delete", "sandboxes", USERS),
    ("deletecollection", "sandboxes", USERS),
    *(("create", f"sandboxes/{use}", USERS) for use in USES),
    ("update", "sandboxes/network", USERS),
    ("create", "checkpoints", USERS),
    ("patch", "templates", {LEGACY, ADMIN, OPERATOR}),
    ("delete", "templates", {LEGACY, ADMIN, OPERATOR}),
    ("create", "apikeys", {LEGACY, ADMIN, OPERATOR}),
    ("delete", "apikeys", {LEGACY, ADMIN, OPERATOR}),
    ("create", "sandboxtemplates", {ADMIN, OPERATOR}),
    ("update", "sandboxpools", {ADMIN, OPERATOR}),
    ("update", "sandboxpools/scale", {ADMIN, OPERATOR}),
    ("create", "sandboxes", {OPERATOR}),
    ("update", "sandboxes", USERS),
    ("patch", "sandboxes", USERS),
    ("patch", "sandboxes/status", {OPERATOR}),
    ("update", "checkpoints", USERS),
    ("create", "batchsandboxes", USERS),
    ("update", "batchsandboxes/scale", USERS),
    ("create", "sandboxenvs", {OPERATOR}),
    ("update", "teams", {OPERATOR}),
    ("get", "secrets", {OPERATOR}),
    ("list", "leases", {OPERATOR}),
    ("list", "namespaces", {OPERATOR}),
    ("get", "something-new", {OPERATOR}),
]


def may(subject: Subject, verb: str, resource: str, **facts: str | None) -> bool:
    return decide(subject, AccessRequest(verb=verb, resource=resource, **facts)).is_allowed


@pytest.mark.parametrize(("verb", "resource", "allowed"), TABLE)
def test_each_role_has_its_rights_in_its_own_team_only(
    verb: str, resource: str, allowed: set[Role]
) -> None:
    for role in Role:
        subject = Subject("red", "k", role)
        assert may(subject, verb, resource, namespace="red") is (role in allowed), role
        assert may(subject, verb, resource) is (role in allowed), role
        for elsewhere in ("blue", ""):
            assert may(subject, verb, resource, namespace=elsewhere) is (role is OPERATOR)


def test_a_team_reads_its_own_namespace_object() -> None:
    for role in set(Role) - {OPERATOR}:
        assert may(Subject("red", "k", role), "get", "namespaces", name="red")
        assert not may(Subject("red", "k", role), "get", "namespaces", name="blue")
        assert not may(Subject("red", "k", role), "list", "namespaces", namespace="")


@pytest.mark.parametrize("resource", ["sandboxtemplates", "sandboxpools", "sandboxpools/scale"])
def test_admins_of_the_shared_namespace_do_not_change_what_serves_every_team(resource: str) -> None:
    admin = Subject("default", "k", ADMIN)
    for verb in ("update", "patch"):
        assert not may(admin, verb, resource)
        assert not may(admin, verb, resource, namespace="default")
    assert may(Subject("default", "k", OPERATOR), "update", resource, namespace="default")


@pytest.mark.parametrize(
    ("verb", "resource", "facts", "is_allowed"),
    [
        ("create", "sandboxclaims", {}, True),
        ("create", "sandboxes/pause", {}, True),
        ("create", "sandboxes/pause", {"key_id": "k"}, True),
        ("create", "sandboxes/pause", {"key_id": "other"}, False),
        ("get", "sandboxes", {"key_id": "k"}, True),
        ("delete", "sandboxes", {"key_id": "k"}, True),
        ("get", "sandboxes", {"key_id": "other"}, False),
        ("get", "sandboxes", {"key_id": ""}, False),
        ("create", "sandboxes/fork", {}, True),
        ("create", "sandboxes/snapshots", {}, False),
        ("list", "sandboxtemplates", {}, False),
        ("list", "apikeys", {}, False),
        ("create", "apikeys", {}, False),
        ("get", "secrets", {}, False),
    ],
)
def test_the_scope_create_allows_what_the_key_requested(
    verb: str, resource: str, facts: dict[str, str], is_allowed: bool
) -> None:
    for role in (MEMBER, ADMIN, OPERATOR):
        assert may(Subject("red", "k", role, ("create",)), verb, resource, **facts) is is_allowed


@pytest.mark.parametrize(
    ("verb", "resource", "facts", "is_allowed"),
    [
        ("create", "sandboxclaims", {"template": "base"}, True),
        ("create", "sandboxclaims", {"template": "red/base:default"}, True),
        ("create", "sandboxclaims", {"template": "default/BASE"}, True),
        ("create", "sandboxclaims", {"template": "blue/base"}, False),
        ("create", "sandboxclaims", {"template": "base:two"}, False),
        ("create", "sandboxclaims", {"template": "other"}, False),
        ("get", "sandboxes", {"template": "other"}, False),
        ("get", "sandboxtemplates", {"name": "base"}, True),
        ("get", "sandboxtemplates", {"name": "other"}, False),
        ("update", "sandboxpools", {"name": "other"}, False),
        ("create", "sandboxes/fork", {}, False),
        ("create", "sandboxes/snapshots", {}, False),
        ("create", "apikeys", {}, False),
        ("list", "events", {}, False),
    ],
)
def test_the_scope_of_a_template_allows_only_its_name(
    verb: str, resource: str, facts: dict[str, str], is_allowed: bool
) -> None:
    subject = Subject("red", "k", ADMIN, ("template:base",))
    assert may(subject, verb, resource, **facts) is is_allowed


def test_the_scope_read_allows_reading() -> None:
    for role in Role:
        for verb in (*READ_VERBS, *WRITE_VERBS):
            wanted = verb in READ_VERBS and may(Subject("red", "k", role), verb, "sandboxes")
            assert may(Subject("red", "k", role, ("read",)), verb, "sandboxes") is wanted


RESOURCES = sorted({resource for rights in ROLES.values() for resource, _ in rights} | {"secrets"})
TEXTS = st.sampled_from([None, "", "red", "blue", "default", "base", "k"])


@given(
    st.sampled_from(list(Role)),
    st.lists(st.sampled_from([*Scope, "template:base", "template:other", "later"]), max_size=3),
    st.sampled_from((*READ_VERBS, *WRITE_VERBS)),
    st.sampled_from(RESOURCES),
    st.fixed_dictionaries(dict.fromkeys(("namespace", "name", "template", "key_id"), TEXTS)),
)
def test_a_scope_never_extends_a_role_and_scopes_intersect(
    role: Role, scopes: list[str], verb: str, resource: str, facts: dict[str, str | None]
) -> None:
    subjects = [Subject("red", "k", role)]
    subjects += [Subject("red", "k", role, (scope,)) for scope in scopes]
    wanted = all(may(subject, verb, resource, **facts) for subject in subjects)
    assert may(Subject("red", "k", role, tuple(scopes)), verb, resource, **facts) is wanted


@pytest.mark.parametrize(
    "scopes", [["reed"], ["template:"], ["template:a b"], ["template:A"], [""], ["template:a/b"]]
)
def test_a_misspelt_scope_is_refused(scopes: list[str]) -> None:
    with pytest.raises(InvalidError, match=r"scopes\[0\]"):
        parse_scopes(scopes)


def test_two_templates_in_the_scopes_of_a_key_are_refused() -> None:
    with pytest.raises(InvalidError, match="two templates"):
        parse_scopes(["template:a", "template:b"])
    assert parse_scopes(["template:a", "create", "create"]) == ("create", "template:a")
