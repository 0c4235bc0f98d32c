"""What API keys may write: each rule by itself, and that no write changes protected fields."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from paddock.api.kube.key_writes import rules, templates
from paddock.api.kube.key_writes.request import KeyLimits, KeyWrite
from paddock.claims.caller import Caller, Role
from paddock.resources import codec
from paddock.resources.kinds.batch import BatchSandbox, BatchSandboxSpec
from paddock.resources.kinds.checkpoint import Checkpoint, CheckpointSpec
from paddock.resources.kinds.claim import SandboxClaim, SandboxClaimSpec
from paddock.resources.kinds.env import SandboxEnv, SandboxEnvSpec
from paddock.resources.kinds.pool import SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.sandbox import ClaimIdentity, PauseDeadlines, Sandbox, SandboxSpec
from paddock.resources.kinds.template import (
    NetworkPolicy,
    Resources,
    SandboxTemplate,
    SandboxTemplateSpec,
    TemplateRef,
)
from paddock.resources.meta import ANNOTATION_KEY, ObjectMeta, OwnerReference, Resource, with_meta

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOUR = 3600
KEY = Caller("red", "k1", Role.ADMIN)
CLOSED = NetworkPolicy(allow_internet_access=False, allow_out=("pypi.org",))
SANDBOX = Sandbox(
    metadata=ObjectMeta(
        namespace="red",
        name="box",
        uid="u1",
        labels={"paddock.dev/claimed": "true", "mine": "1"},
        finalizers=("paddock.dev/sandbox",),
    ),
    spec=SandboxSpec(
        template=SandboxTemplateSpec(),
        shutdown_time=NOW + timedelta(minutes=5),
        claim=ClaimIdentity(
            sandbox_id="abc",
            owner="red",
            lock="lock",
            claim_time=NOW,
            key_id="k1",
            timeout_seconds=300,
        ),
    ),
)


def write(**options: Any) -> KeyWrite:
    given = {"max_timeout_seconds": HOUR} | options.pop("limits", {})
    return KeyWrite(
        caller=options.pop("caller", KEY), limits=KeyLimits(**given), now=NOW, **options
    )


def meta(**fields: Any) -> ObjectMeta:
    return ObjectMeta(**({"namespace": "red", "name": "x"} | fields))


def a_claim(**spec: Any) -> SandboxClaim:
    given = {"template_name": "base", "shutdown_time": NOW + timedelta(seconds=HOUR)} | spec
    return SandboxClaim(metadata=meta(), spec=SandboxClaimSpec(**given))


def a_template(**spec: Any) -> SandboxTemplate:
    return SandboxTemplate(metadata=meta(), spec=SandboxTemplateSpec(**({"public": False} | spec)))


def a_pool(template: dict[str, Any] | None = None, **spec: Any) -> SandboxPool:
    given = {"template": SandboxTemplateSpec(**(template or {})), "replicas": 1} | spec
    return SandboxPool(metadata=meta(), spec=SandboxPoolSpec(**given))


def a_batch(**spec: Any) -> BatchSandbox:
    given = {"template": SandboxTemplateSpec(), "expire_time": NOW + timedelta(seconds=HOUR)}
    return BatchSandbox(metadata=meta(), spec=BatchSandboxSpec(**(given | spec)))


def a_checkpoint(**spec: Any) -> Checkpoint:
    return Checkpoint(metadata=meta(), spec=CheckpointSpec(**({"sandbox_name": "box"} | spec)))


def refused(old: Resource | None, new: Resource, **options: Any) -> list[str]:
    """Return the paths of the fields that are refused."""
    options = {"source": SANDBOX} | options
    return [item.path for item in rules.check(write(**options), old, new).problems]


def decoded(cls: type[Resource], spec: dict[str, Any], name: str = "x") -> Any:
    plain = {"metadata": {"namespace": "red", "name": name}, "spec": spec}
    return codec.from_builtins(cls, plain)


@pytest.mark.parametrize("new", [a_claim(), a_template(), a_pool(), a_checkpoint()])
def test_plain_objects_are_allowed_and_carry_the_key(new: Resource) -> None:
    checked = rules.check(write(source=SANDBOX), None, new)
    assert checked.problems == ()
    assert checked.object.metadata.annotations[ANNOTATION_KEY] == "k1"
    assert refused(checked.object, checked.object) == []


TEMPLATE = [
    ("volumes", [{"name": "v", "mountPath": "/v", "hostPath": "/srv"}], "volumes"),
    ("outbound", {"httpProxy": "http://proxy"}, "outbound"),
    ("podTemplate", {"spec": {"hostNetwork": True}}, "podTemplate"),
    ("volumeClaimTemplates", [{"metadata": {"name": "v"}}], "volumeClaimTemplates"),
    ("network", {"allowPrivateNetworks": True}, "network.allowPrivateNetworks"),
    ("network", {"allowOut": ["10.1.2.3"]}, "network.allowOut[0]"),
    ("network", {"allowOut": ["169.254.169.254"]}, "network.allowOut[0]"),
    ("network", {"dnsServers": ["10.0.0.53"]}, "network.dnsServers[0]"),
    ("restoreFrom", "snap1", "restoreFrom"),
    ("image", "other", "image"),
    ("resources", {"cpu": "2001m"}, "resources.cpu"),
    ("resources", {"memory": "3Gi"}, "resources.memory"),
    ("resources", {"disk": "11Gi"}, "resources.disk"),
    ("resources", {"pids": 4097}, "resources.pids"),
]


@pytest.mark.parametrize(("field", "value", "path"), TEMPLATE)
def test_templates_and_pools_set_nothing_that_operators_decide(
    field: str, value: Any, path: str
) -> None:
    template = decoded(SandboxTemplate, {"public": False, field: value})
    assert refused(None, template) == [f"spec.{path}"]
    pool = decoded(SandboxPool, {"replicas": 1, "template": {field: value}})
    assert refused(None, pool) == [f"spec.template.{path}"]
    before = rules.check(write(), None, a_template()).object
    assert f"spec.{path}" in refused(before, with_meta(template, annotations={}))


def test_a_template_that_was_built_can_be_updated_but_not_given_another_checkpoint() -> None:
    """A build has its own limits for images and sizes, and sets the checkpoint."""
    result = {"image": "python:3.13", "restore_from": "c1", "resources": Resources(cpu="64")}
    built = keyed(a_template(**result))
    assert refused(built, keyed(a_template(**result, description="mine"))) == []
    for field, other in (
        ("restore_from", "c2"),
        ("image", "other:1"),
        ("resources", Resources(cpu="65")),
    ):
        assert refused(built, keyed(a_template(**result | {field: other})))[0].startswith("spec.")
    assert refused(None, keyed(a_template(**result))) != []


def keyed(one: Resource) -> Resource:
    return with_meta(one, annotations={ANNOTATION_KEY: "k1"})


def test_a_new_field_of_templates_is_closed_until_it_is_listed() -> None:
    """Who adds a field to templates decides here whether tenants may set it."""
    closed = {"volumes", "outbound", "pod_template", "volume_claim_templates", "restore_from"}
    assert set(SandboxTemplateSpec.__struct_fields__) == set(templates.WRITABLE) | closed


def test_a_template_stays_below_the_network_policy_of_its_team() -> None:
    limits = {"ceiling": CLOSED}
    inside = a_template(network=NetworkPolicy(allow_out=("pypi.org",)))
    assert refused(None, inside, limits=limits) == []
    outside = a_template(network=NetworkPolicy(allow_out=("example.com",)))
    assert refused(None, outside, limits=limits) == ["spec.network.allowOut[0]"]


def test_templates_of_keys_are_private_and_may_name_listed_images() -> None:
    assert refused(None, a_template(public=True)) == ["spec.public"]
    assert refused(None, a_template(image="team/x"), limits={"images": ("team/*",)}) == []


def test_keys_do_not_change_templates_and_pools_of_operators() -> None:
    assert refused(a_template(), a_template(description="x")) == ["metadata"]
    assert refused(a_pool(), a_pool(replicas=2)) == ["metadata"]


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"templateRef": {"name": "big"}, "replicas": 1}, "spec.template"),
        ({"template": {}, "replicas": 1, "maxIdleAgeSeconds": 1}, "spec.maxIdleAgeSeconds"),
        (
            {"template": {}, "replicas": 1, "labels": {"paddock.dev/pool": "base"}},
            "spec.labels[paddock.dev/pool]",
        ),
        (
            {"template": {}, "replicas": 1, "annotations": {"paddock.dev/after-failures": "0"}},
            "spec.annotations[paddock.dev/after-failures]",
        ),
    ],
)
def test_pools_contain_their_template_and_label_nothing_of_the_system(
    spec: dict[str, Any], path: str
) -> None:
    assert path in refused(None, decoded(SandboxPool, spec))


def test_a_pool_needs_a_name_because_its_quota_is_reserved_by_name() -> None:
    pool = with_meta(a_pool(), name="", generate_name="x-")
    assert refused(None, pool) == ["metadata.name"]


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"shutdown_time": NOW + timedelta(seconds=HOUR + 1)}, "spec.shutdownTime"),
        ({"shutdown_time": None}, "spec.shutdownTime"),
        ({"labels": {"paddock.dev/pool": "base"}}, "spec.labels[paddock.dev/pool]"),
        ({"annotations": {"x.paddock.dev/y": "1"}}, "spec.annotations[x.paddock.dev/y]"),
    ],
)
def test_claims_stay_within_the_longest_timeout_and_label_nothing_of_the_system(
    spec: dict[str, Any], path: str
) -> None:
    assert refused(None, a_claim(**spec)) == [path]
    assert refused(a_claim(), a_claim(**spec)) == [path]


def test_a_claim_needs_no_end_where_sandboxes_need_no_timeout() -> None:
    assert (
        refused(None, a_claim(shutdown_time=None), limits={"max_timeout_seconds": 30 * 86400}) == []
    )


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"pool_ref": "p"}, "spec.poolRef"),
        ({"pool_ref": "*"}, "spec.poolRef"),
        ({"template": SandboxTemplateSpec(image="other")}, "spec.template.image"),
        ({"shard_patches": ({"volumes": []},)}, "spec.shardPatches"),
        ({"owner": "blue"}, "spec.owner"),
        ({"expire_time": None}, "spec.expireTime"),
        ({"expire_time": NOW + timedelta(days=1)}, "spec.expireTime"),
    ],
)
def test_batches_have_one_plain_template_and_an_end(spec: dict[str, Any], path: str) -> None:
    assert refused(None, a_batch()) == []
    assert refused(None, a_batch(**spec)) == [path]
    live = rules.check(write(), None, a_batch()).object
    assert refused(live, with_meta(a_batch(**spec), annotations={})) == [path]
    assert refused(a_batch(), a_batch(replicas=2)) == ["metadata"]


def test_a_claim_in_the_shared_namespace_does_not_overtake_other_teams() -> None:
    shared = with_meta(a_claim(priority=1), namespace="default")
    assert refused(None, shared, caller=Caller("default", "k", Role.MEMBER)) == ["spec.priority"]
    assert refused(None, a_claim(priority=1)) == []


CHECKPOINT = [
    ({"sandbox_name": "other"}, {"source": None}, "spec.sandboxName"),
    ({"sandbox_uid": "u2"}, {}, "spec.sandboxUid"),
    ({"sandbox_id": "xyz"}, {}, "spec.sandboxId"),
    ({"owner": "blue"}, {}, "spec.owner"),
    ({"key_id": "k2"}, {}, "spec.keyId"),
    ({"checkpoint_id": "snap1"}, {}, "spec.checkpointId"),
    ({"names": ("blue/x:default",)}, {}, "spec.names[0]"),
    ({"names": ("fine", f"snapi{'a' * 20}:v1")}, {}, "spec.names[1]"),
    ({"ttl_seconds_after_finished": 60}, {}, "spec.ttlSecondsAfterFinished"),
]


@pytest.mark.parametrize(("spec", "options", "path"), CHECKPOINT)
def test_the_server_names_sandbox_owner_and_key_of_a_checkpoint(
    spec: dict[str, Any], options: dict[str, Any], path: str
) -> None:
    assert refused(None, a_checkpoint(**spec), **options) == [path]
    stored: Any = rules.check(write(source=SANDBOX), None, a_checkpoint()).object
    assert (stored.spec.owner, stored.spec.key_id) == ("red", "k1")
    assert (stored.spec.sandbox_uid, stored.spec.sandbox_id) == ("u1", "abc")
    changed = structs.replace(stored, spec=structs.replace(stored.spec, **spec))
    assert refused(stored, changed) == [path.partition("[")[0]]


@pytest.mark.parametrize("owner", ["blue", None])
def test_a_checkpoint_of_another_teams_sandbox_is_refused(owner: str | None) -> None:
    claim = SANDBOX.spec.claim
    assert claim is not None
    foreign = structs.replace(claim, owner=owner) if owner else None
    source = structs.replace(SANDBOX, spec=structs.replace(SANDBOX.spec, claim=foreign))
    assert refused(None, a_checkpoint(), source=source) == ["spec.sandboxName"]


# ---- sandboxes ---------------------------------------------------------------------------


def box(old: Sandbox = SANDBOX, **spec: Any) -> Sandbox:
    return structs.replace(old, spec=structs.replace(old.spec, **spec))


def stored(old: Sandbox, **spec: Any) -> SandboxSpec:
    checked = rules.check(write(), old, box(old, **spec))
    assert checked.problems == ()
    assert isinstance(checked.object, Sandbox)
    return checked.object.spec


def test_a_pause_keeps_the_deadlines_and_a_resume_grants_a_timeout() -> None:
    paused = stored(SANDBOX, paused=True)
    assert paused.before_pause is not None
    assert paused.before_pause.shutdown_time == SANDBOX.spec.shutdown_time
    resumed = stored(box(**{name: getattr(paused, name) for name in ("paused", "shutdown_time")}),
                     paused=False)  # fmt: skip
    assert resumed.shutdown_time == NOW + timedelta(seconds=300)
    early = NOW + timedelta(seconds=10)
    assert stored(box(paused=True), paused=False, shutdown_time=early).shutdown_time == early


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"shutdown_time": NOW + timedelta(seconds=HOUR + 1)}, "spec.shutdownTime"),
        ({"shutdown_time": None}, "spec.shutdownTime"),
        ({"pause_time": NOW + timedelta(days=2)}, "spec.pauseTime"),
        ({"claim": None}, "spec.claim"),
        ({"network": CLOSED}, "spec.network"),
        ({"image": "other"}, "spec.image"),
        ({"recycle": True}, "spec.recycle"),
        ({"restore_from": "snap1"}, "spec.restoreFrom"),
        ({"paused_retention_seconds": 1}, "spec.pausedRetentionSeconds"),
        ({"template": SandboxTemplateSpec(image="other")}, "spec.template"),
    ],
)
def test_a_key_changes_only_pauses_and_ends_of_a_sandbox(
    changes: dict[str, Any], path: str
) -> None:
    assert refused(SANDBOX, box(**changes)) == [path]


@pytest.mark.parametrize("field", ["owner", "lock", "key_id", "network_opened", "env_vars"])
def test_no_field_of_a_claim_changes(field: str) -> None:
    claim = SANDBOX.spec.claim
    assert claim is not None
    value = {"network_opened": True, "env_vars": {"A": "1"}}.get(field, "other")
    assert refused(SANDBOX, box(claim=structs.replace(claim, **{field: value}))) == ["spec.claim"]


def test_what_a_document_leaves_out_is_kept() -> None:
    """A client that reads, changes and writes a sandbox sends no empty objects."""
    paused = box(paused=True, before_pause=PauseDeadlines(), template=SandboxTemplateSpec())
    sent = box(paused, before_pause=None, template=None, pause_time=NOW)
    checked = rules.check(write(), paused, sent)
    assert checked.problems == ()
    assert checked.object == box(paused, pause_time=NOW)


def test_a_paused_sandbox_keeps_the_end_of_its_retention() -> None:
    paused = box(paused=True, retained_until=NOW, shutdown_time=NOW)
    assert refused(paused, box(paused, shutdown_time=None, pause_time=NOW)) == ["spec.shutdownTime"]


def test_sandboxes_of_nobody_and_of_others_are_refused() -> None:
    blue = Caller("blue", "k", Role.ADMIN)
    assert refused(SANDBOX, box(paused=True), caller=blue) == ["spec.claim"]
    idle = box(claim=None)
    assert refused(idle, box(idle, paused=True)) == ["spec.claim"]
    assert refused(None, SANDBOX)[-1] == "spec"


def test_other_kinds_are_refused() -> None:
    env = SandboxEnv(metadata=meta(), spec=SandboxEnvSpec(template_ref=TemplateRef(name="t")))
    assert refused(None, env) == ["kind"]


def test_large_objects_are_refused() -> None:
    assert refused(None, a_template(env={"A": "x" * 300_000})) == [""]


# ---- every kind --------------------------------------------------------------------------

EVERY = [a_claim(), a_template(), a_pool(), a_batch(), a_checkpoint()]


@pytest.mark.parametrize("new", EVERY)
@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"finalizers": ("paddock.dev/pool",)}, "metadata.finalizers"),
        (
            {"owner_references": (OwnerReference(api_version="v1", kind="X", name="y", uid="z"),)},
            "metadata.ownerReferences",
        ),
        ({"labels": {"paddock.dev/pool": "p"}}, "metadata.labels[paddock.dev/pool]"),
        ({"annotations": {ANNOTATION_KEY: "k2"}}, f"metadata.annotations[{ANNOTATION_KEY}]"),
        (
            {"annotations": {"paddock.dev/field-managers": "{}"}},
            "metadata.annotations[paddock.dev/field-managers]",
        ),
    ],
)
def test_metadata_of_the_system_is_refused_at_create_and_at_update(
    new: Resource, fields: dict[str, Any], path: str
) -> None:
    assert path in refused(None, with_meta(new, **fields))
    live = rules.check(write(source=SANDBOX), None, new).object
    assert path in refused(live, with_meta(live, **fields))


labels = st.dictionaries(
    st.sampled_from(
        ("a", "app/x", "paddock.dev/pool", "paddock.dev/key-id", "x.paddock.dev/y", "paddock.dev")
    ),
    st.sampled_from(("1", "2")),
)
ends = st.one_of(st.none(), st.integers(-10, 3 * HOUR).map(lambda s: NOW + timedelta(seconds=s)))


@given(
    old_labels=labels,
    new_labels=labels,
    annotations=labels,
    finalizers=st.lists(st.sampled_from(("a", "paddock.dev/sandbox")), unique=True),
    paused=st.booleans(),
    was_paused=st.booleans(),
    pause_time=ends,
    shutdown_time=ends,
    owner=st.sampled_from(("red", "blue")),
)
def test_no_write_of_a_key_changes_protected_fields(
    old_labels: dict[str, str],
    new_labels: dict[str, str],
    annotations: dict[str, str],
    finalizers: list[str],
    paused: bool,
    was_paused: bool,
    pause_time: datetime | None,
    shutdown_time: datetime | None,
    owner: str,
) -> None:
    """What is stored without a problem differs from the old object only where keys may write."""
    old = with_meta(box(paused=was_paused), labels=old_labels)
    claim = old.spec.claim
    assert claim is not None
    new = with_meta(
        box(
            old,
            paused=paused,
            pause_time=pause_time,
            shutdown_time=shutdown_time,
            claim=structs.replace(claim, owner=owner),
        ),
        labels=new_labels,
        annotations=annotations,
        finalizers=tuple(finalizers),
    )
    checked = rules.check(write(), old, new)
    if checked.problems:
        return
    after = checked.object
    assert isinstance(after, Sandbox)
    assert after.spec.claim == old.spec.claim
    assert after.metadata.finalizers == old.metadata.finalizers
    for name in ("labels", "annotations"):
        was, now = getattr(old.metadata, name), getattr(after.metadata, name)
        ours = {
            key for key in (*was, *now) if key.split("/")[0].endswith("paddock.dev") and "/" in key
        }
        assert {key: was.get(key) for key in ours} == {key: now.get(key) for key in ours}
    longest = NOW + timedelta(seconds=HOUR)
    spec = after.spec
    assert all(end is None or end <= longest for end in (spec.pause_time, spec.shutdown_time))
    if not spec.paused:
        assert spec.pause_time is not None or spec.shutdown_time is not None
