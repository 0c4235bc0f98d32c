"""The sandboxes of batches without a pool."""

from datetime import UTC, datetime

import pytest
from msgspec import structs

from paddock.controllers.batch import template_shards
from paddock.kit.errors import InvalidError
from paddock.resources.kinds.sandbox import FINALIZER_SANDBOX, LABEL_TEMPLATE
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.tokens import TokenSeed
from tests.controllers.batch.make import batch

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SEED = TokenSeed(b"s" * 32)
TEMPLATE = SandboxTemplateSpec(image="base", env={"A": "1"})


@pytest.mark.parametrize(
    ("shard", "image", "env"),
    [
        pytest.param(0, "base", {"A": "1"}, id="empty patch"),
        pytest.param(1, "other", {"A": "1", "B": "2"}, id="patched"),
        pytest.param(2, "base", {"A": "1"}, id="beyond the patches"),
    ],
)
def test_the_template_of_a_shard_includes_its_patch(
    shard: int, image: str, env: dict[str, str]
) -> None:
    patches = ({}, {"image": "other", "env": {"B": "2"}})
    found = template_shards.template_of(
        batch("b", 3, template=TEMPLATE, shard_patches=patches), shard
    )
    assert (found.image, found.env) == (image, env)


def test_a_patch_that_cannot_be_merged_is_invalid() -> None:
    with pytest.raises(InvalidError, match=r"shardPatches\[1\]"):
        template_shards.check(batch("b", 2, template=TEMPLATE, shard_patches=({}, {"image": 7})))


def test_a_child_is_owned_and_claimed_from_its_creation() -> None:
    made = batch("b", 2, template=TEMPLATE)
    made = structs.replace(made, metadata=structs.replace(made.metadata, uid="u"))
    child = template_shards.child(made, 1, SEED, now=NOW)
    assert (child.key.namespace, child.key.name) == ("default", "b-1")
    assert child.metadata.finalizers == (FINALIZER_SANDBOX,)
    assert child.metadata.labels[LABEL_TEMPLATE] == "b"
    assert [owner.uid for owner in child.metadata.owner_references] == ["u"]
    claim = child.spec.claim
    assert claim is not None
    assert claim.claim_time == NOW
    assert claim.sandbox_id


def test_adopted_children_become_the_allocations_of_their_shards() -> None:
    made = batch("b", 3, template=TEMPLATE)
    children = {i: template_shards.child(made, i, SEED, now=NOW) for i in (2, 0)}
    after = template_shards.adopted(made, children).status.allocations
    assert [(item.shard, item.sandbox) for item in after] == [(0, "b-0"), (2, "b-2")]
    claims = [children[i].spec.claim for i in (0, 2)]
    assert [item.sandbox_id for item in after] == [c.sandbox_id if c else "" for c in claims]
