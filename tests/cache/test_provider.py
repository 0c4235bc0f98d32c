"""Lookups by index, read-your-writes, start and failures."""

import asyncio
from typing import Any

import pytest
from msgspec import structs

from paddock.cache import indexes
from paddock.cache.provider import KINDS, Provider
from paddock.engine.informer import Filter
from paddock.kit.clock import LoopClock
from paddock.kit.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from paddock.resources.kinds.batch import BatchSandbox, BatchSandboxSpec
from paddock.resources.kinds.builtin import Secret
from paddock.resources.kinds.checkpoint import Checkpoint, CheckpointSpec, CheckpointStatus
from paddock.resources.kinds.claim import SandboxClaim, SandboxClaimSpec
from paddock.resources.kinds.env import SandboxEnv, SandboxEnvSpec
from paddock.resources.kinds.pool import SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.sandbox import (
    LABEL_BATCH,
    LABEL_CLAIM,
    Phase,
    Sandbox,
    WakeOnTraffic,
)
from paddock.resources.kinds.template import (
    NetworkPolicy,
    SandboxTemplate,
    SandboxTemplateSpec,
    TemplateRef,
)
from paddock.resources.meta import Key, ObjectMeta, owner_reference, with_meta
from paddock.resources.selectors import parse_labels
from tests.cache.make import identity, in_phase, sandbox, with_spec
from tests.engine.faults import FaultyStore
from tests.resources.mutation import accepted_changes, mappings

pytestmark = pytest.mark.looptime


def meta(name: str, namespace: str = "default", **more: Any) -> ObjectMeta:
    return ObjectMeta(name=name, namespace=namespace, **more)


def names(found: Any) -> list[str]:
    return [obj.metadata.name for obj in found]


# ---- lookups -----------------------------------------------------------------------------


async def test_cached_objects_are_immutable(cache: Provider):
    pod = {"spec": {"tolerations": [{"key": "x"}]}}
    spec = SandboxTemplateSpec(env={"A": "1"}, pod_template=pod)
    claim = identity("i1", metadata={"user": "u"}, env_vars={"B": "2"})
    made = sandbox("one", pool="p", claim=claim)
    await cache.write.create(SandboxTemplate(metadata=meta("t"), spec=spec))
    await cache.write.create(structs.replace(made, spec=structs.replace(made.spec, template=spec)))

    for found in (cache.template("t"), cache.claimed_sandbox("i1")):
        assert mappings(found) >= 4
        assert list(accepted_changes(found)) == []


async def test_only_claimed_sandboxes_are_found_by_id(
    cache: Provider,
) -> None:
    await cache.write.create(sandbox("warm", pool="p"))
    mine = await cache.write.create(sandbox("mine", pool="p", claim=identity("iabc")))
    assert cache.claimed_sandbox("iabc") is mine
    assert cache.claimed_sandbox("inone") is None


async def test_two_sandboxes_with_one_id_are_a_conflict(cache: Provider) -> None:
    await cache.write.create(sandbox("a", claim=identity("iabc")))
    await cache.write.create(sandbox("b", claim=identity("iabc")))
    with pytest.raises(ConflictError, match=r"ambiguous: default/a, default/b"):
        cache.claimed_sandbox("iabc")


async def test_a_claimed_sandbox_is_listed_for_its_team_and_not_for_its_pool(
    cache: Provider,
) -> None:
    pool = Key("default", "p")
    warm = await cache.write.create(sandbox("warm", pool="p"))
    await cache.write.create(sandbox("elsewhere", namespace="other", pool="p"))
    assert names(cache.sandboxes_in_pool(pool)) == ["warm"]
    await cache.write.update(with_spec(warm, claim=identity("iabc", owner="blue")))
    assert cache.sandboxes_in_pool(pool) == ()
    assert names(cache.sandboxes("blue")) == ["warm"]
    assert cache.sandboxes("red") == ()


async def test_sandboxes_are_found_by_batch_claim_and_idempotency_key(
    cache: Provider,
) -> None:
    labels = {LABEL_BATCH: "b", LABEL_CLAIM: "c"}
    who = identity("i1", owner="blue", idempotency_key="once")
    box = await cache.write.create(sandbox(labels=labels, claim=who))
    assert cache.sandboxes_of_batch(Key("default", "b")) == (box,)
    assert cache.sandboxes_of_claim(Key("default", "c")) == (box,)
    assert cache.by_index(Sandbox, indexes.IDEMPOTENCY_KEY, ("blue", "once")) == (box,)
    assert cache.by_index(Sandbox, indexes.IDEMPOTENCY_KEY, ("red", "once")) == ()


async def test_own_templates_have_priority_over_public_ones_and_private_ones_are_hidden(
    cache: Provider,
) -> None:
    def template(name: str, namespace: str, **spec: Any) -> SandboxTemplate:
        return SandboxTemplate(metadata=meta(name, namespace), spec=SandboxTemplateSpec(**spec))

    await cache.write.create(template("python", "public"))
    await cache.write.create(template("secret", "red", public=False))
    await cache.write.create(template("py", "blue", aliases=("python",)))

    def found(name: str, namespace: str | None) -> str | None:
        template = cache.template(name, namespace=namespace)
        return template and str(template.key)

    assert found("python", "red") == "public/python"
    assert found("python", "blue") == "blue/py"
    assert found("secret", "red") == "red/secret"
    assert found("secret", "blue") is None
    assert found("nothing", "blue") is None
    assert found("secret", None) == "red/secret"
    assert sorted(names(cache.templates(namespace="blue"))) == ["py", "python"]


async def test_a_pool_name_in_two_namespaces_must_be_qualified(
    cache: Provider,
) -> None:
    spec = SandboxPoolSpec(template_ref=TemplateRef(name="t"), replicas=1)
    one = await cache.write.create(SandboxPool(metadata=meta("p"), spec=spec))
    assert cache.pool("p") is one
    assert cache.pool("p", namespace="default") is one
    assert cache.pool("p", namespace="other") is None
    two = await cache.write.create(SandboxPool(metadata=meta("p", "other"), spec=spec))
    with pytest.raises(ConflictError, match="ambiguous"):
        cache.pool("p")
    assert cache.pool("p", namespace="other") is two
    assert cache.pools() == (one, two)
    assert cache.pools(namespace="other") == (two,)
    assert len(cache.pools_of_template("t")) == 2


async def test_checkpoints_are_found_by_id_name_owner_and_sandbox(cache: Provider) -> None:
    spec = CheckpointSpec(sandbox_name="box", owner="blue", names=("blue/base:1",))
    stored = await cache.write.create(Checkpoint(metadata=meta("cp"), spec=spec))
    status = CheckpointStatus(checkpoint_id="snap1")
    stored = await cache.write.update_status(structs.replace(stored, status=status))
    assert cache.checkpoint("snap1") is stored
    assert cache.checkpoint("blue/base:1") is stored
    assert cache.checkpoint("snap2") is None
    assert cache.checkpoints("blue") == (stored,)
    assert cache.checkpoints_of_sandbox(Key("default", "box")) == (stored,)


async def test_envs_claims_and_batches_are_found_by_name(cache: Provider) -> None:
    env = await cache.write.create(
        SandboxEnv(metadata=meta("e"), spec=SandboxEnvSpec(template_ref=TemplateRef(name="t")))
    )
    claim = await cache.write.create(
        SandboxClaim(metadata=meta("c"), spec=SandboxClaimSpec(template_name="p"))
    )
    batch = await cache.write.create(
        BatchSandbox(metadata=meta("b"), spec=BatchSandboxSpec(pool_ref="p"))
    )
    assert cache.env("e") is env
    assert cache.envs() == (env,)
    assert cache.claim("c", namespace="default") is claim
    assert cache.batch("b") is batch
    assert cache.batches_of_pool(Key("default", "p")) == (batch,)


async def test_children_are_found_by_their_controllers_uid(cache: Provider) -> None:
    spec = SandboxPoolSpec(template_ref=TemplateRef(name="t"), replicas=1)
    pool = await cache.write.create(SandboxPool(metadata=meta("p"), spec=spec))
    child = with_meta(sandbox("child", pool="p"), owner_references=(owner_reference(pool),))
    child = await cache.write.create(child)
    await cache.write.create(sandbox("orphan", pool="p"))
    assert cache.children(Sandbox, pool) == (child,)


async def test_a_kind_that_is_not_cached_is_an_error(store: FaultyStore) -> None:
    async with Provider.for_gateway(store, clock=LoopClock()).run() as cache:
        with pytest.raises(InvalidError, match="does not hold SandboxPool; it holds Sandbox"):
            cache.pool("p")


async def test_other_kinds_can_be_cached(store: FaultyStore) -> None:
    filters = {Secret: Filter(namespace="paddock-system")}
    provider = Provider(store, kinds=(*KINDS, Secret), filters=filters, clock=LoopClock())
    async with provider.run() as cache:
        key = await cache.write.create(Secret(metadata=meta("key", "paddock-system")))
        await cache.write.create(Secret(metadata=meta("other")))
        assert cache.all(Secret) == (key,)


def test_every_cached_kind_has_its_indexes() -> None:
    assert set(indexes.definitions()) == set(KINDS)
    for kind, functions in indexes.definitions().items():
        for name, function in functions.items():
            assert isinstance(function(kind()), tuple), f"{kind.KIND}.{name} takes an empty object"


# ---- reading and writing -----------------------------------------------------------------


async def test_reads_are_never_older_than_own_writes(cache: Provider, store: FaultyStore) -> None:
    store.delay = lambda: 7.0
    box = await cache.write.create(sandbox(claim=identity("i1")))
    assert cache.claimed_sandbox("i1") is box
    box = await cache.write.update(with_spec(box, paused=True))
    assert cache.claimed_sandbox("i1") is box
    box = await cache.write.update_status(in_phase(box, Phase.PAUSED))
    for _ in range(30):
        assert cache.claimed_sandbox("i1") is box
        await asyncio.sleep(1)
    await cache.write.delete(box)
    for _ in range(30):
        assert cache.claimed_sandbox("i1") is None
        await asyncio.sleep(1)


async def test_delete_does_not_delete_a_recreated_object(cache: Provider) -> None:
    first = await cache.write.create(sandbox())
    await cache.write.delete(first)
    second = await cache.write.create(sandbox())
    with pytest.raises((ConflictError, NotFoundError)):
        await cache.write.delete(first)
    assert cache.sandbox(second.key) is second


async def test_delete_of_a_version_fails_after_another_write(cache: Provider) -> None:
    box = await cache.write.create(sandbox(pool="p"))
    await cache.write.update(with_spec(box, claim=identity()))
    with pytest.raises(ConflictError):
        await cache.write.delete(box, resource_version=box.metadata.resource_version)
    assert cache.sandbox(box.key) is not None


async def test_an_object_with_finalizers_is_cached_as_deleting(cache: Provider) -> None:
    box = await cache.write.create(with_meta(sandbox(), finalizers=("paddock.dev/sandbox",)))
    dying = await cache.write.delete(box)
    assert cache.sandbox(box.key) is dying
    assert dying.is_deleting
    await cache.write.update(with_meta(dying, finalizers=()))
    assert cache.sandbox(box.key) is None
    await asyncio.sleep(10)
    assert cache.sandbox(box.key) is None


async def test_live_reads_bypass_the_cache(cache: Provider, store: FaultyStore) -> None:
    store.delay = lambda: 60.0
    box = await store.create(sandbox())
    assert cache.sandbox(box.key) is None
    assert await cache.live.get(Sandbox, box.key) == box


async def test_mutate_retries_a_conflict_with_the_newest_object(
    cache: Provider, store: FaultyStore
) -> None:
    store.delay = lambda: 60.0
    box = await cache.write.create(sandbox())
    await store.update(with_meta(box, labels={"by": "another"}))
    done = await cache.write.mutate(Sandbox, box.key, lambda obj: with_spec(obj, paused=True))
    assert done.spec.paused
    assert dict(done.metadata.labels) == {"by": "another"}
    assert cache.sandbox(box.key) is done


async def test_fifty_concurrent_mutates_of_one_object_all_succeed(cache: Provider) -> None:
    box = await cache.write.create(sandbox())

    def count(obj: Sandbox) -> Sandbox:
        seen = int(obj.metadata.labels.get("n", "0"))
        return with_meta(obj, labels={"n": str(seen + 1)})

    await asyncio.gather(
        *(cache.write.mutate(Sandbox, box.key, count, attempts=60) for _ in range(50))
    )
    found = cache.sandbox(box.key)
    assert found is not None
    assert found.metadata.labels["n"] == "50"


async def test_mutate_without_changes_writes_nothing(cache: Provider) -> None:
    box = await cache.write.create(sandbox())
    assert await cache.write.mutate(Sandbox, box.key, lambda obj: None) is box
    assert await cache.write.mutate(Sandbox, box.key, lambda obj: obj) is box


async def test_mutate_raises_the_conflict_after_the_last_attempt(
    cache: Provider, store: FaultyStore
) -> None:
    box = await cache.write.create(sandbox())

    async def always_late(obj: Sandbox, **kwargs: Any) -> Sandbox:
        raise ConflictError("somebody wrote first")

    store.update = always_late  # type: ignore[attr-defined]
    with pytest.raises(ConflictError, match="somebody wrote first"):
        await cache.write.mutate(
            Sandbox, box.key, lambda obj: with_spec(obj, paused=True), attempts=3
        )


async def test_mutate_with_a_uid_rejects_a_recreated_object(cache: Provider) -> None:
    first = await cache.write.create(sandbox())
    await cache.write.delete(first)
    await cache.write.create(sandbox())
    with pytest.raises(NotFoundError, match="was deleted and recreated"):
        await cache.write.mutate(
            Sandbox, first.key, lambda obj: with_spec(obj, paused=True), uid=first.metadata.uid
        )


# ---- starting, filtering, failing --------------------------------------------------------


async def test_run_starts_the_body_after_the_first_sync(store: FaultyStore) -> None:
    for number in range(2500):
        await store.create(sandbox(f"s{number}", pool="p"))
    async with Provider(store, clock=LoopClock()).run() as cache:
        assert cache.is_synced
        assert len(cache.sandboxes_in_pool(Key("default", "p"))) == 2500
        assert cache.problems() == {}


async def test_run_raises_a_fatal_error(store: FaultyStore) -> None:
    store.list_errors = [ForbiddenError("may not list sandboxtemplates")]
    with pytest.raises(ForbiddenError, match="may not list sandboxtemplates"):
        async with Provider(store, clock=LoopClock()).run():
            pytest.fail("the body must not run")


async def test_run_raises_why_the_sync_timed_out(store: FaultyStore, looptime: Any) -> None:
    store.list_errors = [UnavailableError("disk is full") for _ in range(1000)]
    with pytest.raises(UnavailableError, match=r"did not sync within 20 s: .*disk is full"):
        async with Provider(store, clock=LoopClock()).run(timeout_seconds=20):
            pytest.fail("the body must not run")
    assert looptime == 20


async def test_lookups_before_the_first_sync_are_unavailable(store: FaultyStore) -> None:
    cache = Provider(store, clock=LoopClock())
    with pytest.raises(UnavailableError, match="cache of Sandbox has not synced"):
        cache.claimed_sandbox("i1")
    assert cache.problems()["cache"] == "is not running"


async def test_leaving_the_context_stops_all_informers(store: FaultyStore) -> None:
    before = asyncio.all_tasks()
    async with Provider(store, clock=LoopClock()).run():
        assert len(asyncio.all_tasks()) > len(before)
    assert asyncio.all_tasks() == before


async def test_unhealthy_kinds_are_reported(cache: Provider, store: FaultyStore) -> None:
    await asyncio.sleep(1)
    store.break_watches(ConnectionResetError("cut"))
    await asyncio.sleep(0.01)
    assert "cut" in cache.problems()["Sandbox"]
    await asyncio.sleep(60)
    assert cache.problems() == {}


async def test_each_kind_has_its_own_filter(store: FaultyStore) -> None:
    await store.create(sandbox("mine", labels={"shard": "a"}))
    await store.create(sandbox("other", labels={"shard": "b"}))
    spec = SandboxPoolSpec(template_ref=TemplateRef(name="t"), replicas=1)
    await store.create(SandboxPool(metadata=meta("here"), spec=spec))
    await store.create(SandboxPool(metadata=meta("there", "other"), spec=spec))
    filters = {
        Sandbox: Filter(labels=parse_labels("shard=a")),
        SandboxPool: Filter(namespace="default"),
    }
    async with Provider(store, filters=filters, clock=LoopClock()).run() as cache:
        assert names(cache.all(Sandbox)) == ["mine"]
        assert names(cache.pools()) == ["here"]


# ---- route views --------------------------------------------------------------------------------


async def test_a_gateway_caches_only_what_routing_needs(store: FaultyStore) -> None:
    way_in = NetworkPolicy(allow_public_traffic=False, mask_request_host="x:${PORT}")
    template = SandboxTemplateSpec(env={"BIG": "x" * 1000}, network=way_in)
    who = identity("i1", metadata={"m": "x" * 500}, env_vars={"E": "y"}, traffic_token_hash="h")
    box = sandbox(claim=who, pool="p", wake_on_traffic=WakeOnTraffic(enabled=True))
    box = with_meta(with_spec(box, template=template), annotations={"a": "b" * 500})
    box = await store.create(box)
    box = await store.update_status(in_phase(box, Phase.RUNNING))
    async with Provider.for_gateway(store, clock=LoopClock()).run() as cache:
        kept = cache.claimed_sandbox("i1")
        assert kept is not None
        assert kept.spec.template is None
        assert kept.spec.claim is not None
        assert not kept.spec.claim.metadata
        assert not kept.spec.claim.env_vars
        assert not kept.metadata.annotations
        assert kept.spec.claim.traffic_token_hash == "h"
        assert kept.spec.network == way_in
        assert kept.spec.wake_on_traffic == WakeOnTraffic(enabled=True)
        assert kept.metadata.uid == box.metadata.uid
        assert kept.metadata.resource_version == box.metadata.resource_version
        assert kept.status.phase is Phase.RUNNING
        from paddock.cache import states

        now = cache.clock.now()
        assert states.report(kept, now) == states.report(box, now)
        with pytest.raises(InvalidError, match="read-only: it holds route views"):
            _ = cache.write
