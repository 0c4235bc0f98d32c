"""Environments create a pool for each member and correct its drift."""

import asyncio

import pytest
from msgspec import structs

from paddock.app.roles.control_plane import ControlPlane
from paddock.claims.requests import NewSandbox
from paddock.controllers.admission.plugin import AdmissionPlugin, PoolAdmission, PoolRequest
from paddock.kit.clock import LoopClock
from paddock.kit.errors import InvalidError
from paddock.resources.kinds.builtin import Event
from paddock.resources.kinds.env import (
    LABEL_ENV,
    EnvCluster,
    EnvDefaults,
    EnvOverrides,
    MemberMetadata,
    MemberState,
    ObservedCluster,
    ObservedMember,
    SandboxEnv,
    ScalingGroup,
)
from paddock.resources.kinds.pool import SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.sandbox import LABEL_POOL
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec, TemplateRef
from paddock.resources.meta import Key, ObjectMeta, condition, is_true, with_meta
from paddock.runtime.simulated import SimulatedRuntime
from paddock.settings import Settings
from paddock.store.memory import MemoryStore
from tests.controllers.env.make import (
    ENV,
    change_members,
    environment,
    found,
    idle,
    member,
    pool,
    seen,
)
from tests.scenario.paddock import CALLER, SECRETS, World, paddock

pytestmark = pytest.mark.looptime


async def settle(world: World, seconds: float = 15) -> None:
    await asyncio.sleep(seconds)


async def reasons(world: World) -> set[str]:
    return {event.reason for event in (await world.store.list(Event)).items}


async def test_each_member_becomes_a_pool_of_its_size() -> None:
    async with paddock(pool_size=0) as world:
        members = {"small": member(2), "big": member(3, inline_resources=None)}
        await world.provider.write.create(environment(members))
        await idle(world, "agents-small", 2)
        await idle(world, "agents-big", 3)
        await settle(world)
        env = found(world)
        assert env.status.idle == 5
        assert env.status.desired == 5
        assert env.status.member_count == 2
        assert is_true(env.status.conditions, "Ready")
        assert is_true(env.status.conditions, "TemplateConsistent")
        assert [item.total_idle for item in env.status.scaling_groups] == [5]
        assert "PoolCreated" in await reasons(world)


async def test_a_claim_moves_a_sandbox_from_idle_to_running_without_a_pool_write() -> None:
    async with paddock(pool_size=0) as world:
        await world.provider.write.create(environment({"one": member(3)}))
        await idle(world, "agents-one", 3)
        before = pool(world, "agents-one")
        sandbox = await world.manager.claims.create(CALLER, NewSandbox(template="agents"))
        assert sandbox.metadata.labels[LABEL_ENV] == "agents"
        await settle(world)
        after = pool(world, "agents-one")
        assert before
        assert after
        assert after.metadata.generation == before.metadata.generation
        shown = seen(world, "one")
        assert shown is not None
        assert (shown.idle, shown.running, shown.desired) == (2, 1, 3)


async def test_drift_is_corrected_and_foreign_labels_stay() -> None:
    async with paddock(pool_size=0) as world:
        wanted = environment(
            {
                "one": structs.replace(
                    member(1), metadata=MemberMetadata(labels={"tier": "gold", "old": "yes"})
                )
            }
        )
        await world.provider.write.create(wanted)
        await idle(world, "agents-one", 1)
        made = pool(world, "agents-one")
        assert made is not None
        bent = structs.replace(
            with_meta(made, labels={**made.metadata.labels, "tier": "tin", "mine": "stays"}),
            spec=structs.replace(made.spec, capacity=None, replicas=7),
        )
        await world.provider.write.update(bent)
        await settle(world)
        mended = pool(world, "agents-one")
        assert mended is not None
        assert mended.metadata.labels["tier"] == "gold"
        assert mended.metadata.labels["mine"] == "stays"
        assert mended.spec.capacity is not None
        assert mended.spec.capacity.pool_max == 1
        assert "DriftCorrected" in await reasons(world)
        lean = structs.replace(member(1), metadata=MemberMetadata(labels={"tier": "gold"}))
        await change_members(world, {"one": lean})
        await settle(world)
        mended = pool(world, "agents-one")
        assert mended is not None
        assert "old" not in mended.metadata.labels
        assert mended.metadata.labels["mine"] == "stays"


async def test_overrides_instance_types_and_timeouts_reach_the_pool() -> None:
    async with paddock(pool_size=0) as world:
        await world.provider.write.create(
            environment(
                {"one": member(1, multiplier=2, labels={"l": "1"}, annotations={"a": "2"})},
                defaults=EnvDefaults(instance_type="small"),
                overrides=EnvOverrides(
                    image="other",
                    env={"MODE": "fast"},
                    default_startup_timeout_seconds=77,
                    default_idle_timeout_seconds=900,
                ),
            )
        )
        await idle(world, "agents-one", 1)
        made = pool(world, "agents-one")
        assert made is not None
        template = made.spec.template
        assert template is not None
        assert template.image == "other"
        assert template.env["MODE"] == "fast"
        assert template.ready_timeout_seconds == 77
        assert template.resources.cpu == "2000m"
        assert template.resources.memory == str(1 << 30)
        assert made.spec.max_idle_age_seconds == 900
        (sandbox,) = world.plane.pool_members.members(made.key).available.values()
        assert sandbox.metadata.labels["l"] == "1"
        assert sandbox.metadata.annotations["a"] == "2"
        await settle(world)
        shown = seen(world, "one")
        assert shown is not None
        assert shown.effective_resources == template.resources


async def test_removing_a_member_deletes_its_pool_but_not_claimed_sandboxes() -> None:
    async with paddock(pool_size=0) as world:
        await world.provider.write.create(environment({"a": member(1), "b": member(1)}))
        await idle(world, "agents-a", 1)
        await idle(world, "agents-b", 1)
        sandbox = await world.manager.claims.create(CALLER, NewSandbox(template="agents-b"))
        await change_members(world, {"a": member(1)})
        await world.until(lambda: pool(world, "agents-b") is None)
        await settle(world)
        assert world.provider.sandbox(sandbox.key) is not None
        assert pool(world, "agents-a") is not None
        assert "PoolDeleted" in await reasons(world)


async def test_a_changed_template_updates_the_pool() -> None:
    async with paddock(pool_size=0) as world:
        await world.provider.write.create(environment({"one": member(2)}))
        await idle(world, "agents-one", 2)

        def change(template: SandboxTemplate) -> SandboxTemplate:
            return structs.replace(template, spec=structs.replace(template.spec, env={"V": "2"}))

        await world.provider.write.mutate(SandboxTemplate, Key("default", "base"), change)
        await settle(world, 30)
        made = pool(world, "agents-one")
        assert made is not None
        assert made.spec.template is not None
        assert made.spec.template.env == {"V": "2"}
        fresh = world.plane.pool_members.members(made.key).available.values()
        assert [item.spec.template.env for item in fresh if item.spec.template] == [{"V": "2"}] * 2


async def test_segments_of_other_clusters_are_never_written() -> None:
    async with paddock(pool_size=0) as world:
        env = environment({"one": member(1)})
        foreign = EnvCluster(members={"far": member(9, scaling_group="default")})
        clusters = {**env.spec.clusters, "elsewhere": foreign}
        env = structs.replace(env, spec=structs.replace(env.spec, clusters=clusters))
        await world.provider.write.create(env)
        told = ObservedCluster(
            cluster_id="elsewhere",
            observed_members=(ObservedMember(name="far", idle=9, desired=9),),
        )

        def tell(found: SandboxEnv) -> SandboxEnv:
            status = structs.replace(found.status, clusters=(told,))
            return structs.replace(found, status=status)

        await world.provider.write.mutate(SandboxEnv, ENV, tell, is_status=True)
        await idle(world, "agents-one", 1)
        await settle(world)
        assert pool(world, "agents-far") is None
        env = found(world)
        assert env.spec.clusters["elsewhere"] == foreign
        assert told in env.status.clusters
        assert env.status.idle == 10


async def test_a_member_with_a_problem_is_given_no_demand() -> None:
    async with paddock(pool_size=0) as world:
        await world.provider.write.create(
            environment(
                {
                    "first": member(max_replicas=1),
                    "odd": member(4, instance_type="gigantic"),
                    "second": member(priority=1, max_replicas=2),
                },
                group=ScalingGroup(min_replicas=1, max_replicas=3),
            )
        )
        await idle(world, "agents-first", 1)
        made = [
            world.manager.claims.create(CALLER, NewSandbox(template="agents")) for _ in range(3)
        ]
        async with asyncio.timeout(60):
            served = await asyncio.gather(*made)
        homes = sorted(item.metadata.labels[LABEL_POOL] for item in served)
        assert homes == ["agents-first", "agents-second", "agents-second"]


async def test_a_problem_of_one_member_is_reported_and_stops_no_other() -> None:
    async with paddock(pool_size=0) as world:
        stranger = SandboxPool(
            metadata=ObjectMeta(name="agents-taken", namespace="default"),
            spec=SandboxPoolSpec(template=SandboxTemplateSpec(), replicas=0),
        )
        await world.provider.write.create(stranger)
        await world.provider.write.create(
            environment(
                {
                    "good": member(1),
                    "taken": member(4),
                    "odd": member(1, instance_type="gigantic"),
                    "twin": member(1),
                    "agents-twin": member(1),
                    "x" * 60: member(1),
                }
            )
        )
        await idle(world, "agents-good", 1)
        await settle(world)
        states = {}
        for name in ("good", "taken", "odd", "twin", "agents-twin", "x" * 60):
            shown = seen(world, name)
            assert shown is not None
            states[name[:12]] = (shown.state, shown.message)
        assert states["good"][0] is MemberState.ACTIVE
        assert states["taken"][0] is MemberState.INCONSISTENT
        assert "belongs to another owner" in states["taken"][1]
        assert "gigantic" in states["odd"][1]
        assert states["agents-twin"][0] is MemberState.ACTIVE
        assert "same name as that of member agents-twin" in states["twin"][1]
        assert "63" in states["x" * 12][1]
        ready = condition(found(world).status.conditions, "Ready")
        assert ready is not None
        assert ready.reason == "MemberInvalid"
        assert "gigantic" in ready.message
        left = world.provider.get(SandboxPool, stranger.key)
        assert left is not None
        assert left.spec == stranger.spec


async def test_an_instance_type_broken_during_a_reconcile_stops_no_other_member() -> None:
    async with paddock(pool_size=0) as world:

        class Spoils(AdmissionPlugin):
            """Sets an unknown instance type while the first member is being admitted."""

            async def pre_create_pool(self, request: PoolRequest) -> PoolAdmission:
                def change(env: SandboxEnv) -> SandboxEnv:
                    defaults = EnvDefaults(instance_type="gigantic")
                    return structs.replace(env, spec=structs.replace(env.spec, defaults=defaults))

                await world.provider.write.mutate(SandboxEnv, ENV, change)
                return PoolAdmission()

        world.plane.environments.gate._plugins = (Spoils(),)
        await world.provider.write.create(
            environment({"a": member(), "b": member()}, group=ScalingGroup(min_replicas=2))
        )
        await settle(world)
        assert pool(world, "agents-a") is not None
        assert pool(world, "agents-b") is not None
        for name in ("a", "b"):
            assert "gigantic" in seen(world, name).message


async def test_a_missing_template_is_reported_until_it_exists() -> None:
    async with paddock(pool_size=0) as world:
        await world.provider.write.create(environment({"one": member(1)}, template="later"))
        await settle(world)
        told = condition(found(world).status.conditions, "TemplateConsistent")
        assert told is not None
        assert told.reason == "TemplateNotFound"
        assert "later" in told.message
        shown = seen(world, "one")
        assert shown is not None
        assert shown.state is MemberState.INCONSISTENT
        await world.provider.write.create(
            SandboxTemplate(metadata=ObjectMeta(name="later", namespace="default"))
        )
        await idle(world, "agents-one", 1)
        await settle(world)
        assert is_true(found(world).status.conditions, "TemplateConsistent")


async def test_a_frozen_spec_keeps_its_own_template() -> None:
    async with paddock(pool_size=0) as world:
        frozen = SandboxPoolSpec(template=SandboxTemplateSpec(image="frozen"), replicas=2)
        one = structs.replace(member(), spec=frozen)
        await world.provider.write.create(environment({"one": one}, template="nowhere"))
        await idle(world, "agents-one", 2)
        made = pool(world, "agents-one")
        assert made is not None
        assert made.spec.template is not None
        assert made.spec.template.image == "frozen"


async def test_an_idle_environment_writes_no_status() -> None:
    async with paddock(pool_size=0) as world:
        await world.provider.write.create(environment({"one": member(1)}))
        await idle(world, "agents-one", 1)
        await settle(world, 60)
        versions = set()
        for _ in range(20):
            await asyncio.sleep(1)
            versions.add(found(world).metadata.resource_version)
        assert len(versions) <= 2


async def test_a_cluster_without_an_id_is_refused() -> None:
    clock = LoopClock()
    with pytest.raises(InvalidError, match="cluster_id"):
        ControlPlane(
            Settings(cluster_id=""),
            SECRETS,
            store=MemoryStore(clock=clock),
            runtime=SimulatedRuntime(clock=clock),
            clock=clock,
        )


async def test_templates_of_other_namespaces_must_be_public() -> None:
    async with paddock(pool_size=0) as world:
        secret = SandboxTemplate(
            metadata=ObjectMeta(name="secret", namespace="other"),
            spec=SandboxTemplateSpec(public=False),
        )
        await world.plane.keyring._ensure_namespace("other")
        await world.provider.write.create(secret)
        env = environment({"one": member(1)})
        reference = TemplateRef(name="secret", namespace="other")
        env = structs.replace(env, spec=structs.replace(env.spec, template_ref=reference))
        await world.provider.write.create(env)
        await settle(world)
        assert pool(world, "agents-one") is None
        assert not is_true(found(world).status.conditions, "TemplateConsistent")
