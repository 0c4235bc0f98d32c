"""The contract suite of runtime drivers; a driver subclasses it with a `world` fixture."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from paddock.kit import ids
from paddock.kit.errors import (
    ConflictError,
    DeadlineExceededError,
    NotFoundError,
    UnsupportedError,
)
from paddock.runtime.port import (
    AgentConfig,
    Blueprint,
    Capabilities,
    EgressPolicy,
    Instance,
    InstanceState,
    Limits,
    Runtime,
    RuntimeEvent,
)


class World:
    """A driver under test, with controls that only tests have."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        image: str,
        crash: Callable[[str], Awaitable[None]],
        never_ready: Callable[[str], None] = lambda uid: None,
    ) -> None:
        self.runtime = runtime
        self.image = image
        self.crash = crash
        self.never_ready = never_ready
        self.made: list[str] = []

    def blueprint(self, **changes) -> Blueprint:
        uid = changes.pop("uid", None) or f"t-{ids.name_suffix(8)}"
        self.made.append(uid)
        return Blueprint(uid=uid, image=self.image, **changes)

    async def running(self, **changes) -> Instance:
        return await self.runtime.create(self.blueprint(**changes))

    async def clear(self) -> None:
        for uid in self.made:
            await self.runtime.destroy(uid)
        for stored in await self.runtime.checkpoints():
            await self.runtime.delete_checkpoint(stored.id)


async def first_event_of(uid: str, events: AsyncIterator[RuntimeEvent]) -> RuntimeEvent:
    """Wait for the first event of one sandbox, skipping those of others."""
    async for event in events:
        if event.uid == uid:
            return event
    raise AssertionError("the events ended")


def needs(capability: str):
    """Skip a test if the driver lacks a capability, and check that it gives a reason."""

    def mark(test):
        test.needs = capability
        return test

    return mark


class RuntimeContract:
    """Tests that every driver must pass."""

    @pytest.fixture(autouse=True)
    async def _able(self, request: pytest.FixtureRequest, world: World):
        wanted = getattr(request.function, "needs", None)
        can: Capabilities = await world.runtime.capabilities()
        if wanted and not getattr(can, wanted):
            assert can.reasons.get(wanted), f"{wanted} is missing without a reason"
            pytest.skip(f"{wanted}: {can.reasons[wanted]}")
        yield
        await world.clear()

    async def test_an_image_that_is_there_is_ready_at_once(self, world: World):
        ready = await world.runtime.ensure_image(world.image, team="t")
        assert ready.reference == world.image
        assert ready.pulled_bytes == 0
        assert await world.runtime.image_pulls() == ()

    async def test_a_created_sandbox_runs_and_is_reachable(self, world):
        instance = await world.running()
        assert instance.state is InstanceState.RUNNING
        assert instance.address.envd
        assert instance.started_at is not None
        assert instance.incarnation == 1
        assert await world.runtime.inspect(instance.uid) == instance

    async def test_creating_a_sandbox_again_returns_the_existing_one(self, world):
        blueprint = world.blueprint()
        first = await world.runtime.create(blueprint)
        assert await world.runtime.create(blueprint) == first

    async def test_concurrent_creates_of_one_uid_make_one_sandbox(self, world):
        blueprint = world.blueprint()
        made = await asyncio.gather(*(world.runtime.create(blueprint) for _ in range(5)))
        assert len({one.address.envd for one in made}) == 1
        assert [i.uid for i in await world.runtime.instances()].count(blueprint.uid) == 1

    async def test_instances_lists_all_sandboxes(self, world):
        made = {(await world.running()).uid for _ in range(3)}
        assert made <= {instance.uid for instance in await world.runtime.instances()}

    @pytest.mark.parametrize(
        "ask",
        ["start", "thaw", "restore", "stop", "usage", "logs"],
    )
    async def test_an_unknown_uid_is_not_found(self, world, ask):
        with pytest.raises(NotFoundError):
            await getattr(world.runtime, ask)("nobody")

    async def test_inspecting_an_unknown_uid_returns_none(self, world):
        assert await world.runtime.inspect("nobody") is None

    async def test_destroying_is_final_and_may_be_repeated(self, world):
        instance = await world.running()
        await world.runtime.destroy(instance.uid)
        await world.runtime.destroy(instance.uid)
        assert await world.runtime.inspect(instance.uid) is None

    async def test_concurrent_destroys_are_no_error(self, world):
        instance = await world.running()
        await asyncio.gather(*(world.runtime.destroy(instance.uid) for _ in range(4)))
        assert await world.runtime.inspect(instance.uid) is None

    async def test_a_uid_can_be_used_again_after_destroying(self, world):
        instance = await world.running()
        await world.runtime.destroy(instance.uid)
        again = await world.running(uid=instance.uid, incarnation=4)
        assert (again.state, again.incarnation) == (InstanceState.RUNNING, 4)

    @needs("can_freeze")
    async def test_freezing_and_thawing_may_be_repeated(self, world):
        uid = (await world.running()).uid
        for _ in range(2):
            assert (await world.runtime.freeze(uid)).state is InstanceState.FROZEN
        assert (await world.runtime.inspect(uid)).state is InstanceState.FROZEN
        for _ in range(2):
            assert (await world.runtime.thaw(uid)).state is InstanceState.RUNNING

    @needs("can_freeze")
    async def test_a_frozen_sandbox_can_be_destroyed(self, world):
        uid = (await world.running()).uid
        await world.runtime.freeze(uid)
        await world.runtime.destroy(uid)
        assert await world.runtime.inspect(uid) is None

    @needs("can_freeze")
    async def test_a_frozen_sandbox_is_thawed_not_restored(self, world):
        uid = (await world.running()).uid
        await world.runtime.freeze(uid)
        with pytest.raises(ConflictError):
            await world.runtime.restore(uid)

    async def test_missing_capabilities_are_refused_as_unsupported(self, world):
        can = await world.runtime.capabilities()
        uid = (await world.running()).uid
        if not can.can_freeze:
            with pytest.raises(UnsupportedError):
                await world.runtime.freeze(uid)
        if not can.can_checkpoint:
            with pytest.raises(UnsupportedError):
                await world.runtime.hibernate(uid)
            with pytest.raises(UnsupportedError):
                await world.runtime.snapshot(uid, "cp", memory=True, keep_running=True)
        if not can.can_update_image:
            assert can.reasons["can_update_image"]
            with pytest.raises(UnsupportedError):
                await world.runtime.update_image(uid, "another")
        if not can.can_filter_egress:
            with pytest.raises(UnsupportedError):
                await world.runtime.set_egress(uid, EgressPolicy())
        assert (await world.runtime.inspect(uid)).state is InstanceState.RUNNING

    @needs("can_update_image")
    async def test_updating_the_image_begins_a_new_incarnation_in_place(self, world):
        before = await world.running()
        for _ in range(2):
            after = await world.runtime.update_image(before.uid, "another")
            assert after.state is InstanceState.RUNNING
            assert (after.image, after.incarnation) == ("another", 2)
            assert after.address == before.address
        assert (await world.runtime.inspect(before.uid)).image == "another"
        with pytest.raises(NotFoundError):
            await world.runtime.update_image("nobody", "another")

    @needs("can_checkpoint")
    async def test_hibernate_and_restore_begin_a_new_incarnation(self, world):
        uid = (await world.running()).uid
        for _ in range(2):
            asleep = await world.runtime.hibernate(uid)
            assert asleep.state is InstanceState.HIBERNATED
        assert asleep.address.ip is None or world.runtime.name == "simulated"
        with pytest.raises(ConflictError):
            await world.runtime.freeze(uid)
        awake = await world.runtime.restore(uid)
        assert awake.state is InstanceState.RUNNING
        assert awake.incarnation == 2
        assert (await world.runtime.restore(uid)).incarnation == 2

    @needs("can_checkpoint")
    async def test_a_frozen_sandbox_can_hibernate(self, world):
        uid = (await world.running()).uid
        await world.runtime.freeze(uid)
        assert (await world.runtime.hibernate(uid)).state is InstanceState.HIBERNATED
        assert (await world.runtime.restore(uid)).state is InstanceState.RUNNING

    @needs("can_checkpoint")
    async def test_a_hibernated_sandbox_can_be_destroyed(self, world):
        uid = (await world.running()).uid
        await world.runtime.hibernate(uid)
        await world.runtime.destroy(uid)
        assert await world.runtime.inspect(uid) is None

    @needs("can_stop")
    async def test_a_stopped_sandbox_can_be_restarted(self, world):
        uid = (await world.running()).uid
        for _ in range(2):
            assert (await world.runtime.stop(uid)).state is InstanceState.STOPPED
        with pytest.raises(ConflictError):
            await world.runtime.thaw(uid)
        again = await world.runtime.restore(uid)
        assert again.state is InstanceState.RUNNING
        assert again.incarnation == 2

    @needs("can_snapshot_files")
    async def test_a_checkpoint_is_listed_until_it_is_deleted(self, world):
        uid = (await world.running()).uid
        for _ in range(2):
            stored = await world.runtime.snapshot(uid, "cp-a", memory=False, keep_running=True)
        assert (stored.id, stored.source_uid, stored.has_memory) == ("cp-a", uid, False)
        assert [s.id for s in await world.runtime.checkpoints()] == ["cp-a"]
        assert (await world.runtime.inspect(uid)).state is InstanceState.RUNNING
        for _ in range(2):
            await world.runtime.delete_checkpoint("cp-a")
        assert await world.runtime.checkpoints() == ()

    @needs("can_snapshot_files")
    async def test_sandboxes_start_from_a_checkpoint_after_its_source_is_destroyed(self, world):
        uid = (await world.running()).uid
        await world.runtime.snapshot(uid, "cp-b", memory=False, keep_running=True)
        await world.runtime.destroy(uid)
        child = await world.running(checkpoint_id="cp-b")
        assert child.state is InstanceState.RUNNING

    async def test_an_unknown_checkpoint_is_not_found(self, world):
        with pytest.raises(NotFoundError):
            await world.running(checkpoint_id="cp-nowhere")

    @needs("can_snapshot_files")
    async def test_a_snapshot_may_stop_the_sandbox(self, world):
        uid = (await world.running()).uid
        await world.runtime.snapshot(uid, "cp-c", memory=False, keep_running=False)
        assert (await world.runtime.inspect(uid)).state is InstanceState.STOPPED

    @needs("can_checkpoint")
    async def test_a_snapshot_with_memory_leaves_the_sandbox_running(self, world):
        uid = (await world.running()).uid
        stored = await world.runtime.snapshot(uid, "cp-d", memory=True, keep_running=True)
        assert stored.has_memory
        assert stored.size_bytes > 0
        assert (await world.runtime.inspect(uid)).state is InstanceState.RUNNING
        child = await world.running(checkpoint_id="cp-d")
        assert child.state is InstanceState.RUNNING

    @needs("can_checkpoint")
    async def test_forks_run_beside_their_parent(self, world):
        uid = (await world.running()).uid
        made = await world.runtime.fork(uid, tuple(world.blueprint() for _ in range(3)))
        assert [isinstance(one, Instance) and one.state for one in made] == ["running"] * 3
        assert (await world.runtime.inspect(uid)).state is InstanceState.RUNNING
        assert await world.runtime.checkpoints() == ()

    @needs("can_checkpoint")
    async def test_a_stopped_sandbox_cannot_be_forked(self, world):
        uid = (await world.running()).uid
        await world.runtime.stop(uid)
        with pytest.raises(ConflictError):
            await world.runtime.fork(uid, (world.blueprint(),))

    async def test_a_sandbox_that_exits_by_itself_is_reported(self, world):
        uid = (await world.running()).uid
        events = world.runtime.watch()
        seen = asyncio.ensure_future(first_event_of(uid, events))
        await asyncio.sleep(0)  # the watch is sent before anything that follows
        await world.crash(uid)
        event = await asyncio.wait_for(seen, 30)
        assert event.state is InstanceState.FAILED
        assert event.reason
        now = await world.runtime.inspect(uid)
        assert now.state is InstanceState.FAILED
        assert now.reason == event.reason
        with contextlib.suppress(asyncio.CancelledError):
            await events.aclose()

    async def test_a_failed_sandbox_can_be_destroyed(self, world):
        uid = (await world.running()).uid
        await world.crash(uid)
        await world.runtime.destroy(uid)
        assert await world.runtime.inspect(uid) is None

    async def test_usage_is_measured_against_the_limits(self, world):
        limits = Limits(cpu_millis=500, memory_bytes=128 << 20, disk_bytes=1 << 30)
        uid = (await world.running(limits=limits)).uid
        usage = await world.runtime.usage(uid)
        assert usage.cpu_count == 0.5
        assert usage.memory_total_bytes == 128 << 20
        assert usage.disk_total_bytes == 1 << 30
        assert usage.memory_used_bytes < 128 << 20

    async def test_configuring_and_logs_need_no_running_command(self, world):
        uid = (await world.running()).uid
        await world.runtime.configure(uid, AgentConfig(access_token="secret", env={"A": "1"}))
        assert isinstance(await world.runtime.logs(uid, limit=10), tuple)
        assert await world.runtime.logs(uid, limit=0) == ()

    @needs("can_filter_egress")
    async def test_egress_can_be_replaced_while_the_sandbox_runs(self, world):
        uid = (await world.running()).uid
        await world.runtime.set_egress(uid, EgressPolicy(allow_internet=False))
        with pytest.raises(NotFoundError):
            await world.runtime.set_egress("nobody", EgressPolicy())

    async def test_starting_without_commands_returns_at_once(self, world):
        uid = (await world.running()).uid
        assert (await world.runtime.start(uid)).state is InstanceState.RUNNING

    async def test_start_fails_after_the_ready_timeout(self, world):
        uid = (await world.running(ready_command="false", ready_timeout_seconds=0.5)).uid
        world.never_ready(uid)
        with pytest.raises(DeadlineExceededError):
            await world.runtime.start(uid)
