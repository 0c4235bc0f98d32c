"""Validation of objects and updates, and the paths in its errors."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from paddock.kit.errors import InvalidError
from paddock.resources import codec
from paddock.resources.kinds.builtin import Namespace, Secret
from paddock.resources.kinds.claim import SandboxClaim, SandboxClaimSpec
from paddock.resources.kinds.pool import Capacity, SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.sandbox import Sandbox, SandboxSpec
from paddock.resources.kinds.template import TemplateRef
from paddock.resources.meta import ObjectMeta, OwnerReference, with_meta
from paddock.resources.schema import formats
from paddock.resources.schema.validation import problems_of, validate_create, validate_update
from tests.resources.bad_objects import BAD, BAD_CHANGES, Bad, BadChange

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def paths_of(error: InvalidError) -> list[str]:
    return [problem.path for problem in error.problems]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad.kind}: {bad.why}")
def test_an_invalid_object_is_rejected_with_the_path_of_the_field(bad: Bad):
    with pytest.raises(InvalidError) as caught:
        validate_create(codec.decode_any(bad.document))
    assert bad.path in paths_of(caught.value)
    assert bad.path in str(caught.value)


@pytest.mark.parametrize("bad", BAD_CHANGES, ids=lambda bad: f"{bad.kind}: {bad.why}")
def test_immutable_fields_cannot_be_changed(bad: BadChange):
    before, after = (
        codec.decode_any({"kind": bad.kind, "metadata": {"name": "x"}, "spec": spec})
        for spec in (bad.before, bad.after)
    )
    validate_create(before)
    validate_create(after)
    with pytest.raises(InvalidError) as caught:
        validate_update(before, after)
    assert paths_of(caught.value) == [bad.path]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid(path: Path):
    documents = list(yaml.safe_load_all(path.read_text()))
    assert documents
    for document in documents:
        validate_create(codec.decode_any(document))


def test_there_is_an_example_of_every_kind():
    shown = {
        document["kind"] for path in EXAMPLES for document in yaml.safe_load_all(path.read_text())
    }
    assert shown == {
        "BatchSandbox", "Checkpoint", "Sandbox", "SandboxClaim", "SandboxEnv", "SandboxPool",
        "SandboxTemplate", "TemplateBuild",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"kind": "Sandbox", "metadata": {"labels": {"a": "x", "b": 1}}}, "metadata.labels.b"),
        (
            {
                "kind": "SandboxEnv",
                "spec": {
                    "templateRef": {"name": "t"},
                    "clusters": {
                        "good": {"members": {"m": {}}},
                        "bad": {"members": {"fine": {}, "odd": {"config": {"priority": "x"}}}},
                    },
                },
            },
            "spec.clusters.bad.members.odd.config.priority",
        ),
        (
            {"kind": "SandboxTemplate", "spec": {"ports": [{"port": 1}, {"port": "x"}]}},
            "spec.ports[1].port",
        ),
        ({"kind": "Sandbox", "spec": {"template": {"env": {"A": []}}}}, "spec.template.env.A"),
        ({"kind": "SandboxTemplate", "spec": {"ports": [{}]}}, "spec.ports[0].port"),
    ],
)
def test_type_errors_have_the_full_path(document: dict[str, object], path: str):
    with pytest.raises(InvalidError) as caught:
        codec.decode_any(document)
    assert paths_of(caught.value) == [path]


def test_all_problems_are_reported_at_once():
    pool = SandboxPool(
        metadata=ObjectMeta(name="Pool"),
        spec=SandboxPoolSpec(replicas=1, capacity=Capacity(buffer_min=3, buffer_max=2, pool_max=1)),
    )
    with pytest.raises(InvalidError) as caught:
        validate_create(pool)
    assert set(paths_of(caught.value)) == {
        "metadata.name",
        "spec.capacity.bufferMin",
        "spec.capacity.bufferMax",
        "spec.replicas",
        "spec.template",
    }


def test_the_finalizer_of_an_invalid_stored_object_can_be_removed():
    stored = SandboxClaim(
        metadata=ObjectMeta(name="old", finalizers=("paddock.dev/claim",)),
        spec=SandboxClaimSpec(template_name=""),
    )
    assert problems_of(stored)
    validate_update(stored, with_meta(stored, finalizers=()))


def test_no_finalizer_can_be_added_during_deletion():
    deleting = codec.decode_any(
        {
            "kind": "Sandbox",
            "metadata": {"name": "a", "deletionTimestamp": "2030-01-01T00:00:00Z"},
            "spec": {"restoreFrom": "cp"},
        }
    )
    with pytest.raises(InvalidError, match=r"metadata\.finalizers"):
        validate_update(deleting, with_meta(deleting, finalizers=("example.com/late",)))


def test_a_claim_can_be_removed_and_set_again():
    claim = {"sandboxId": "a", "owner": "t", "lock": "l", "claimTime": "2030-01-01T00:00:00Z"}
    held = codec.decode_any(
        {"kind": "Sandbox", "metadata": {"name": "a"}, "spec": {"restoreFrom": "c", "claim": claim}}
    )
    assert isinstance(held, Sandbox)
    free = structs.replace(held, spec=structs.replace(held.spec, claim=None))
    validate_update(held, free)
    validate_update(free, held)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("SandboxClaim", "spec.templateName"),
        ("Checkpoint", "spec.sandboxName"),
        ("SandboxEnv", "spec.templateRef.name"),
        ("Sandbox", "spec.template"),
        ("SandboxPool", "spec.template"),
        ("BatchSandbox", "spec.template"),
    ],
)
def test_a_missing_spec_is_rejected(kind: str, path: str):
    with pytest.raises(InvalidError) as caught:
        validate_create(codec.decode_any({"kind": kind, "metadata": {"name": "a"}}))
    assert path in paths_of(caught.value)


def test_generate_name_is_validated():
    spec = SandboxSpec(template_ref=TemplateRef(name="t"))
    validate_create(Sandbox(metadata=ObjectMeta(generate_name="pool-"), spec=spec))
    with pytest.raises(InvalidError, match=r"metadata\.generateName"):
        validate_create(Sandbox(metadata=ObjectMeta(generate_name="Pool-"), spec=spec))
    with pytest.raises(InvalidError, match="name or generateName is required"):
        validate_create(Sandbox(spec=spec))


@pytest.mark.parametrize(
    ("meta", "path"),
    [
        (ObjectMeta(name="a", labels={"-x": ""}), "metadata.labels"),
        (ObjectMeta(name="a", labels={"x": "y z"}), "metadata.labels"),
        (ObjectMeta(name="a", annotations={"a/b/c": ""}), "metadata.annotations"),
        (ObjectMeta(name="a", annotations={"a": "x" * 300_000}), "metadata.annotations"),
        (ObjectMeta(name="a", finalizers=("not ok",)), "metadata.finalizers"),
        (
            ObjectMeta(
                name="a",
                owner_references=(OwnerReference(api_version="v1", kind="X", name="x", uid=""),),
            ),
            "metadata.ownerReferences[0].uid",
        ),
        (ObjectMeta(name="a" * 64), "metadata.name"),
    ],
)
def test_metadata_is_validated_as_in_kubernetes(meta: ObjectMeta, path: str):
    assert [problem.path for problem in problems_of(Namespace(metadata=meta))] == [path]


def test_secret_values_must_be_base64():
    secret = Secret(metadata=ObjectMeta(name="s"), data={"good": "YQ==", "bad": "a"})
    assert [problem.path for problem in problems_of(secret)] == ["data.bad"]


@given(st.text(max_size=300))
def test_format_checks_never_raise(text: str):
    for check in (
        formats.dns_subdomain, formats.dns_label, formats.qualified_name, formats.label_value,
        formats.env_name, formats.network, formats.network_or_domain, formats.address, formats.cron,
        formats.base64_text, formats.secret_key,
    ):  # fmt: skip
        assert check(text) is None or isinstance(check(text), str)


@given(
    low=st.integers(0, 9), high=st.integers(0, 9), least=st.integers(0, 9), most=st.integers(0, 9)
)
def test_capacity_is_valid_exactly_if_its_limits_are_ordered(
    low: int, high: int, least: int, most: int
):
    pool = SandboxPool(
        metadata=ObjectMeta(name="p"),
        spec=SandboxPoolSpec(
            template_ref=TemplateRef(name="t"),
            capacity=Capacity(buffer_min=low, buffer_max=high, pool_min=least, pool_max=most),
        ),
    )
    assert (problems_of(pool) == []) is (low <= high <= most and least <= most)
