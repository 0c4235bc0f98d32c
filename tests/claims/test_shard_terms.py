"""The claim of a batch's sandbox follows from the batch's status."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs

from paddock.claims.terms import batch_owner, claimed_for_shard, shard_terms
from paddock.resources.kinds.batch import (
    Allocation,
    BatchSandbox,
    BatchSandboxSpec,
    BatchSandboxStatus,
)
from paddock.resources.kinds.sandbox import (
    LABEL_BATCH,
    LABEL_POOL,
    LABEL_SHARD,
    Sandbox,
    SandboxSpec,
)
from paddock.resources.kinds.template import NetworkPolicy, SandboxTemplateSpec
from paddock.resources.meta import ObjectMeta, OwnerReference
from paddock.resources.tokens import TokenSeed, hashed

NOW = datetime(2030, 1, 1, tzinfo=UTC)
END = NOW + timedelta(seconds=60)
SEED = TokenSeed(b"0" * 32)
POOL = OwnerReference(api_version="v", kind="SandboxPool", name="p", uid="u", controller=True)
SHARD = Allocation(shard=3, sandbox="box", sandbox_id="public")


def batch(*, owner: str = "", pool: str = "") -> BatchSandbox:
    return BatchSandbox(
        metadata=ObjectMeta(name="b", namespace="default", uid="u1"),
        spec=BatchSandboxSpec(owner=owner, expire_time=END),
        status=BatchSandboxStatus(pool=pool),
    )


def pool_sandbox(*, paused: bool) -> Sandbox:
    return Sandbox(
        metadata=ObjectMeta(
            name="box",
            namespace="default",
            labels={LABEL_POOL: "p"},
            owner_references=(POOL,),
        ),
        spec=SandboxSpec(paused=paused),
    )


@pytest.mark.parametrize(("owner", "expected"), [("team", "team"), ("", "default")])
def test_a_shard_belongs_to_the_team_of_its_batch(owner: str, expected: str):
    assert batch_owner(batch(owner=owner)) == expected


@pytest.mark.parametrize(("pool", "template"), [("p", "p"), ("", "b")])
def test_the_terms_of_a_shard(pool: str, template: str):
    found = shard_terms(batch(pool=pool), SHARD, SEED, now=NOW)
    identity = found.identity
    assert (identity.sandbox_id, identity.owner) == ("public", "default")
    assert identity.template_id == template
    assert identity.lock == "u1-3-public"
    assert identity.idempotency_key == "batch:u1:3:public"
    assert identity.access_token_hash == hashed(SEED.access_token("public"))
    assert identity.metadata == {"batch": "b", "shard": "3"}
    assert identity.timeout_seconds is None
    assert found.shutdown_time == END
    assert found.labels == {LABEL_BATCH: "b", LABEL_SHARD: "3"}


@pytest.mark.parametrize("paused", [True, False])
def test_becoming_addressable_does_not_resume_a_sandbox(paused: bool):
    found = claimed_for_shard(pool_sandbox(paused=paused), batch(), SHARD, SEED, now=NOW)
    assert found.spec.paused is paused
    assert found.spec.shutdown_time == END
    assert found.spec.claim is not None
    assert found.metadata.owner_references == ()


@pytest.mark.parametrize("is_private", [True, False])
def test_requests_to_a_shard_need_a_token_if_its_template_is_private(is_private: bool):
    template = SandboxTemplateSpec(network=NetworkPolicy(allow_public_traffic=not is_private))
    sandbox = pool_sandbox(paused=False)
    sandbox = structs.replace(sandbox, spec=structs.replace(sandbox.spec, template=template))
    claim = claimed_for_shard(sandbox, batch(), SHARD, SEED, now=NOW).spec.claim
    assert claim is not None
    assert claim.traffic_token_hash == (hashed(SEED.traffic_token("public")) if is_private else "")
