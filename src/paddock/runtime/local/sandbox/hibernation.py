"""Hibernate, stop, restore, snapshot and fork sandboxes, and create them from checkpoints.

The order of steps makes a kill at any point harmless: the record states the intention first, and
the old copy is removed only when the new one is complete.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from paddock.kit import ids
from paddock.kit.errors import (
    ConflictError,
    NotFoundError,
    PaddockError,
    UnavailableError,
)
from paddock.kit.logs import fields
from paddock.runtime.local.checkpoint import (
    Checkpointer,
    Dump,
    Restore,
    Restored,
    RestoreMounts,
    StoredMemory,
    is_complete,
    require_untraced,
)
from paddock.runtime.local.identity import clone_hooks
from paddock.runtime.local.identity.files import write_identity, write_new_identity
from paddock.runtime.local.kernel import nproc_reserve, pidfds
from paddock.runtime.local.node import records
from paddock.runtime.local.node.capabilities import NodeCapabilities
from paddock.runtime.local.node.heavy_work import HeavyKind, team_of
from paddock.runtime.local.node.node_context import unlock_workdir
from paddock.runtime.local.node.records import RecordPhase, SandboxRecord
from paddock.runtime.local.node.slots import cgroup_name
from paddock.runtime.local.sandbox.builder import host_name, set_hostname
from paddock.runtime.local.sandbox.checkpoint_records import CheckpointRecord, CheckpointRecords
from paddock.runtime.local.sandbox.freeze import SandboxFreezer
from paddock.runtime.local.sandbox.lifecycle import UP, SandboxLifecycle
from paddock.runtime.local.sandbox.sandbox import NodeSandbox
from paddock.runtime.local.views.views import new_boot_id
from paddock.runtime.port import Blueprint, Instance, InstanceState, StoredCheckpoint

log = logging.getLogger(__name__)

_KEPT = (*UP, InstanceState.HIBERNATED, InstanceState.STOPPED)


class Hibernation:
    """Hibernates, stops and restores the sandboxes of one node, and stores, forks and creates them
    by checkpoints."""

    def __init__(
        self, lifecycle: SandboxLifecycle, freezer: SandboxFreezer, capabilities: NodeCapabilities
    ) -> None:
        self._lifecycle = lifecycle
        self._freezer = freezer
        self._capabilities = capabilities
        self._context = lifecycle.context
        self._heavy = lifecycle.context.heavy_work
        self.records = CheckpointRecords(self._context)

    # Pauses without processes

    async def hibernate(self, uid: str) -> Instance:
        """Store memory and files, release everything else.

        If a running sandbox would have to wait for its turn, it is frozen and returned so: it must
        not run meanwhile. The next call waits, and a thaw before its turn ends the attempt.
        """
        checkpointer = await self._capabilities.checkpointer()
        async with self._lifecycle.lock(uid):
            sandbox = self._lifecycle.get(uid)
            if sandbox.record.state is InstanceState.HIBERNATED:
                return sandbox.instance()
            waiting = sandbox.record.state
            if waiting is InstanceState.RUNNING and self._must_wait(sandbox):
                self._ensure_room("hibernate", sandbox)
                log.info("sandbox is frozen until it can be stored", extra=fields(sandbox=uid))
                return await self._freezer.freeze_locked(sandbox)
        async with self._turn(HeavyKind.DUMP, sandbox), self._lifecycle.lock(uid):
            sandbox = self._lifecycle.get(uid)
            sandbox.expect(*UP, InstanceState.HIBERNATED, doing="hibernated")
            if sandbox.record.state is InstanceState.HIBERNATED:
                return sandbox.instance()
            if waiting is InstanceState.FROZEN and sandbox.record.state is not waiting:
                raise ConflictError(f"sandbox {uid} was thawed before it could be hibernated")
            self._ensure_room("hibernate", sandbox)
            before = sandbox.record.state
            pid, pidfd = self._init_pid(sandbox), os.dup(sandbox.pidfd or 0)
            sandbox.save(phase=RecordPhase.HIBERNATING)
            dump = Dump(
                pid=pid,
                images=self._context.storage.sandbox_memory(sandbox.resource_name),
                leave_running=False,
                group=self._context.cgroups.unified(sandbox.cgroup),
                run_in=self._context.cgroups.dump_groups(sandbox.cgroup, sandbox.limits),
            )
            try:
                if before is InstanceState.RUNNING:
                    # CRIU would freeze, too, but polls only every 100 ms.
                    await self._freezer.freeze_processes(sandbox)
                await self._require_untraced(sandbox)
                sandbox.detach_init(kill=True)
                await self._heavy.run(checkpointer.dump, dump)
            except BaseException:
                if before is InstanceState.RUNNING:
                    self._freezer.unfreeze_processes(sandbox)
                if sandbox.pidfd is None:
                    self._lifecycle.attach_init(sandbox, pidfd)
                else:
                    os.close(pidfd)
                sandbox.save(state=before, phase=RecordPhase.SETTLED)
                raise
            os.close(pidfd)
            await self._lifecycle.kill_processes(sandbox, keep_address=True)
            self._mark_settled(sandbox, InstanceState.HIBERNATED)
            log.info("sandbox hibernated", extra=fields(sandbox=uid))
            return sandbox.instance()

    async def _hibernate_in_turn(self, uid: str) -> None:
        """Hibernate a sandbox, frozen while it waits for its turn."""
        if (await self.hibernate(uid)).state is not InstanceState.FROZEN:
            return
        try:
            await self.hibernate(uid)
        except BaseException:
            with contextlib.suppress(NotFoundError, ConflictError):  # it ended meanwhile
                await self._freezer.thaw(uid)
            raise

    def _must_wait(self, sandbox: NodeSandbox) -> bool:
        """Whether a dump would wait for its turn, and the sandbox can be frozen until then."""
        return self._context.cgroups.is_usable and self._heavy.is_busy(self._team(sandbox))

    async def stop(self, uid: str) -> Instance:
        """Kill all processes, keep the files."""
        async with self._lifecycle.lock(uid):
            sandbox = self._lifecycle.get(uid)
            sandbox.expect(*_KEPT, InstanceState.FAILED, doing="stopped")
            if sandbox.record.state is InstanceState.STOPPED:
                return sandbox.instance()
            sandbox.save(phase=RecordPhase.STOPPING)
            if sandbox.record.state in UP:
                await self._lifecycle.kill_processes(sandbox)
            await self._context.run_in_thread(
                self._context.storage.drop_memory, sandbox.resource_name
            )
            self._mark_settled(sandbox, InstanceState.STOPPED)
            return sandbox.instance()

    async def restore(self, uid: str) -> Instance:
        """Restore a hibernated sandbox, or restart a stopped one."""
        async with self._lifecycle.lock(uid):
            if (sandbox := self._lifecycle.get(uid)).record.state is not InstanceState.HIBERNATED:
                return await self._restore(uid)
        async with self._turn(HeavyKind.RESTORE, sandbox), self._lifecycle.lock(uid):
            return await self._restore(uid)

    async def _restore(self, uid: str) -> Instance:
        sandbox = self._lifecycle.get(uid)
        sandbox.expect(*_KEPT, doing="restored")
        if sandbox.record.state is InstanceState.FROZEN:
            raise ConflictError(f"sandbox {uid} is frozen: thaw it instead of restoring it")
        if sandbox.record.state is InstanceState.RUNNING:
            return sandbox.instance()
        if sandbox.record.state is InstanceState.STOPPED:
            await self._lifecycle.relaunch(sandbox)
        else:
            memory = self._context.storage.sandbox_memory(sandbox.resource_name)
            await self._restore_memory(sandbox, memory, keep_connections=True)
            await self._context.run_in_thread(
                self._context.storage.drop_memory, sandbox.resource_name
            )
        log.info("sandbox restored", extra=fields(sandbox=uid))
        return sandbox.instance()

    # Checkpoints

    async def snapshot(
        self, uid: str, checkpoint_id: str, *, memory: bool, keep_running: bool
    ) -> StoredCheckpoint:
        """Store files, and memory if wanted, as a checkpoint; an existing id is returned."""
        records.check_uid(checkpoint_id)
        if (known := self.records.read(checkpoint_id)) is not None:
            return known.stored
        checkpointer = await self._capabilities.checkpointer() if memory else None
        turn = self._turn(HeavyKind.DUMP, self._lifecycle.get(uid))
        async with turn, self._lifecycle.lock(uid):
            if (known := self.records.read(checkpoint_id)) is not None:
                return known.stored
            sandbox = self._lifecycle.get(uid)
            wanted = _KEPT[:3] if memory else _KEPT
            sandbox.expect(*wanted, doing="stored with its memory" if memory else "stored")
            if memory and sandbox.record.state in UP:
                self._ensure_room("store the memory of", sandbox)
            await self.records.discard_incomplete(checkpoint_id)
            await self._store(sandbox, checkpoint_id, checkpointer)
            record = await self.records.write(
                sandbox, checkpoint_id, has_memory=memory, created_at=self._lifecycle.clock.now()
            )
            is_up = sandbox.record.state in UP
        if is_up and not keep_running:
            await (self._hibernate_in_turn(uid) if memory else self.stop(uid))
        return record.stored

    async def fork(self, uid: str, children: tuple[Blueprint, ...]) -> tuple[Instance | str, ...]:
        """Create clones of a running sandbox; return each one's instance or error message."""
        checkpoint_id = f"fork-{ids.name_suffix(12)}"
        self._lifecycle.get(uid).expect(*UP, doing="forked")
        await self.snapshot(uid, checkpoint_id, memory=True, keep_running=True)

        async def make(child: Blueprint) -> Instance | str:
            try:
                return await self.create(structs.replace(child, checkpoint_id=checkpoint_id))
            except PaddockError as problem:
                return problem.message

        try:
            return tuple(await asyncio.gather(*(make(child) for child in children)))
        finally:
            await self.delete_checkpoint(checkpoint_id)

    async def create(self, blueprint: Blueprint) -> Instance:
        """Create a sandbox from an image or a checkpoint."""
        if blueprint.checkpoint_id is None:
            return await self._lifecycle.create(blueprint)
        self._lifecycle.builder.validate(blueprint)
        async with self._lifecycle.lock(blueprint.uid):
            if (there := self._lifecycle.by_uid.get(blueprint.uid)) is not None:
                return there.instance()
        team = team_of(blueprint.agent, blueprint.namespace)
        turn = self._heavy.turn(HeavyKind.FORK, team, blueprint.uid)
        async with turn, self._lifecycle.lock(blueprint.uid):
            if (there := self._lifecycle.by_uid.get(blueprint.uid)) is not None:
                return there.instance()
            stored = self.records.read(blueprint.checkpoint_id)
            if stored is None:
                raise NotFoundError(f"checkpoint {blueprint.checkpoint_id} is not on this node")
            sandbox = await self._create_from_checkpoint(blueprint, stored)
            log.info(
                "sandbox created from a checkpoint",
                extra=fields(sandbox=blueprint.uid, checkpoint=blueprint.checkpoint_id),
            )
            return sandbox.instance()

    async def checkpoints(self) -> tuple[StoredCheckpoint, ...]:
        """List the checkpoints of this node."""
        return tuple(record.stored for record in await self.records.all())

    async def delete_checkpoint(self, checkpoint_id: str) -> None:
        """Delete a checkpoint; an unknown id is no error."""
        records.check_uid(checkpoint_id)
        # The record first: without it the checkpoint does not exist.
        self.records.remove(checkpoint_id)
        await self._context.run_in_thread(self._context.storage.delete_checkpoint, checkpoint_id)

    async def delete_all_checkpoints(self) -> None:
        """Delete every checkpoint."""
        for stored in await self.checkpoints():
            await self.delete_checkpoint(stored.id)

    # Steps

    def _turn(
        self, kind: HeavyKind, sandbox: NodeSandbox
    ) -> contextlib.AbstractAsyncContextManager[None]:
        return self._heavy.turn(kind, self._team(sandbox), sandbox.uid)

    @staticmethod
    def _team(sandbox: NodeSandbox) -> str:
        return team_of(sandbox.record.agent, sandbox.record.blueprint.namespace)

    async def _store(
        self, sandbox: NodeSandbox, checkpoint_id: str, checkpointer: Checkpointer | None
    ) -> None:
        storage, name = self._context.storage, sandbox.resource_name
        if sandbox.record.state not in UP:
            await self._context.run_in_thread(storage.snapshot, name, checkpoint_id)
            if checkpointer is not None:
                await self._context.run_in_thread(storage.copy_memory, name, checkpoint_id)
            return
        await self._context.run_in_thread(storage.flush, name)
        unlock_workdir(self._context, name)
        is_running = sandbox.record.state is InstanceState.RUNNING
        has_groups = self._context.cgroups.is_usable
        if is_running and has_groups:
            # CRIU would freeze, too, but polls only every 100 ms.
            await self._freezer.freeze_processes(sandbox)
        try:
            if checkpointer is None:
                await self._context.run_in_thread(storage.snapshot, name, checkpoint_id)
                return
            await self._require_untraced(sandbox)
            dump = Dump(
                pid=self._init_pid(sandbox),
                images=storage.checkpoint_memory(checkpoint_id),
                leave_running=True,
                group=self._context.cgroups.unified(sandbox.cgroup),
                run_in=self._context.cgroups.dump_groups(sandbox.cgroup, sandbox.limits),
                while_frozen=lambda: storage.snapshot(name, checkpoint_id),
            )
            await self._heavy.run(checkpointer.dump, dump)
        finally:
            if is_running and has_groups:
                self._freezer.unfreeze_processes(sandbox)

    async def _require_untraced(self, sandbox: NodeSandbox) -> None:
        """Raise if CRIU cannot attach to a thread. All are frozen, so it stays as it is."""
        threads = self._context.cgroups.threads(sandbox.cgroup)
        await asyncio.to_thread(require_untraced, sandbox.uid, threads)

    async def _create_from_checkpoint(
        self, blueprint: Blueprint, stored: CheckpointRecord
    ) -> NodeSandbox:
        storage = self._context.storage
        checkpoint_id = stored.stored.id
        has_memory = stored.stored.has_memory and blueprint.restore_memory
        blueprint = structs.replace(
            blueprint,
            image=stored.stored.image,
            env={**stored.blueprint.env, **blueprint.env},
            workdir=blueprint.workdir or stored.blueprint.workdir,
        )
        record = SandboxRecord(
            uid=blueprint.uid,
            blueprint=blueprint,
            state=InstanceState.STOPPED,
            phase=RecordPhase.CREATING,
            slot=-1,
            agent=blueprint.agent,
            egress=blueprint.egress,
            layers=stored.layers,
            # What runs in the memory was started before it was stored.
            is_started=has_memory,
            incarnation=blueprint.incarnation - 1,
        )
        sandbox = NodeSandbox(self._context, record, self._lifecycle.clock, self._lifecycle.spawn)
        try:
            sandbox.save()
            await self._context.run_in_thread(
                storage.clone,
                checkpoint_id,
                blueprint.uid,
                limit_bytes=sandbox.limits.disk_bytes or 0,
            )
            if has_memory:
                memory = storage.checkpoint_memory(checkpoint_id)
                await self._restore_memory(sandbox, memory, keep_connections=False)
            else:
                await self._lifecycle.relaunch(sandbox)
            await clone_hooks.run(sandbox, self._context.settings.clone_hook_seconds)
            sandbox.save(phase=RecordPhase.SETTLED)
        except BaseException:
            await asyncio.shield(self._lifecycle.erase(sandbox))
            raise
        self._lifecycle.by_uid[blueprint.uid] = sandbox
        return sandbox

    async def _restore_memory(
        self, sandbox: NodeSandbox, memory: Path, *, keep_connections: bool
    ) -> None:
        """Restore processes from `memory` into a new slot, on the current files of the disk."""
        checkpointer = await self._capabilities.checkpointer()
        if not is_complete(memory):
            raise UnavailableError(
                f"cannot restore sandbox {sandbox.uid}: its stored memory is incomplete",
                hint="stop the sandbox, then start it from its files",
            )
        context, before = self._context, sandbox.record
        slot = context.slots.acquire()
        name = cgroup_name(slot)
        restored: Restored | None = None
        try:
            phase = before.phase if before.phase is RecordPhase.CREATING else RecordPhase.RESTORING
            boot_id = before.boot_id or new_boot_id()
            sandbox.save(slot=slot, phase=phase, oom_kills=0, boot_id=boot_id)
            context.cgroups.create(name)
            context.cgroups.limit(name, sandbox.limits)
            restore = self._restore_request(sandbox, memory, keep_connections=keep_connections)
            restored = await self._heavy.run(checkpointer.restore, restore)
            # Not before: CRIU runs in the same group, and as few restores as there are cores.
            context.cgroups.limit_io(name, sandbox.limits)
            # After the restore, which sets the stored host name.
            name_now = host_name(sandbox.record.blueprint)
            await asyncio.to_thread(set_hostname, restored.pid, name_now)
            nproc_reserve.apply(restored.pid, sandbox.limits.pids)
            self._lifecycle.attach_init(sandbox, restored.pidfd)
            sandbox.save(
                state=InstanceState.RUNNING,
                # The creation of a clone ends with its hooks.
                phase=RecordPhase.CREATING if sandbox.is_new_clone else RecordPhase.SETTLED,
                init=records.identify(restored.pid),
                incarnation=before.incarnation + 1,
                started_at=self._lifecycle.clock.now(),
                reason=None,
            )
        except BaseException:
            if restored is not None and sandbox.pidfd is None:
                pidfds.kill(restored.pidfd)
            if sandbox.record.slot != slot:  # the record does not hold the slot
                context.slots.release(slot)
            keep = before.state is InstanceState.HIBERNATED
            try:
                await asyncio.shield(self._lifecycle.kill_processes(sandbox, keep_address=keep))
            finally:
                sandbox.save_if_possible(state=before.state, phase=before.phase)
            raise
        if sandbox.record.is_started:
            await sandbox.commands()

    def _restore_request(
        self, sandbox: NodeSandbox, memory: Path, *, keep_connections: bool
    ) -> Restore:
        context, builder = self._context, self._lifecycle.builder
        loop = asyncio.get_running_loop()

        def mount_root(stored: StoredMemory) -> RestoreMounts:
            prepared = self._prepare_root(sandbox, stored.sizes)
            return asyncio.run_coroutine_threadsafe(prepared, loop).result(30)

        def connect_network(pid: int) -> None:
            # Runs in the restoring thread, before any process of the sandbox runs.
            asyncio.run_coroutine_threadsafe(builder.attach_network(sandbox, pid), loop).result(30)

        return Restore(
            images=memory,
            id_base=context.slots.first_id(sandbox.record.slot),
            mount_root=mount_root,
            groups=(
                context.cgroups.unified(sandbox.cgroup),
                *context.cgroups.joins(sandbox.cgroup),
            ),
            cpus=context.views.cpus(sandbox.cgroup, sandbox.limits),
            keep_connections=keep_connections,
            connect_network=connect_network,
        )

    async def _prepare_root(self, sandbox: NodeSandbox, sizes: Mapping[str, int]) -> RestoreMounts:
        """Reserve the network and mount the root for a restore."""
        context, record = self._context, sandbox.record
        await context.ensure_layers(record.layers)
        disk = context.storage.find(sandbox.resource_name)
        if disk is None:
            raise UnavailableError(f"cannot restore sandbox {sandbox.uid}: its files are missing")
        network = await self._lifecycle.builder.reserve_network(sandbox)
        sandbox.record = structs.replace(sandbox.record, ip=network.ip, place=network.slot)
        hostname = host_name(record.blueprint)
        write_identity(
            disk.upper, hostname=hostname, ip=network.ip, resolv_conf=network.resolv_conf
        )
        if sandbox.is_new_clone:
            sandbox.generation = write_new_identity(disk.upper, record.layers)
        views = context.views.restore_binds(sandbox.cgroup, sandbox.limits, record.boot_id, sizes)
        devices = context.devices.create(sandbox.cgroup)
        request = structs.replace(
            self._lifecycle.builder.root_request(sandbox, str(disk.path), views),
            devices=tuple(path for path, _ in devices),
        )
        root, *binds = await context.launcher.mount_root(None, request)
        points = (
            *(mount.path for mount in record.blueprint.mounts),
            *(one for _, one in (*views, *devices)),
        )
        return RestoreMounts(root=root, binds=dict(zip(points, binds, strict=True)))

    def _mark_settled(self, sandbox: NodeSandbox, now: InstanceState) -> None:
        is_started = sandbox.record.is_started and now is InstanceState.HIBERNATED
        sandbox.save(
            state=now,
            phase=RecordPhase.SETTLED,
            init=None,
            envd=None,
            ip=None,
            reason=None,
            is_started=is_started,
        )

    def _ensure_room(self, doing: str, sandbox: NodeSandbox) -> None:
        """Raise `DiskFullError` if the memory of a sandbox does not fit beside the reserve."""
        usage = self._context.cgroups.usage(sandbox.cgroup)
        # Shared memory is part of the cache, and memory of a frozen sandbox may be in swap: an
        # upper bound, because a dump that fills the disk may damage the image of all sandboxes.
        needed = usage.memory_bytes + usage.cache_bytes
        if sandbox.record.state is InstanceState.FROZEN:
            needed = max(needed, sandbox.limits.memory_bytes or 0)
        self._context.storage.reserve.ensure_room(f"{doing} sandbox {sandbox.uid}", needed)

    def _init_pid(self, sandbox: NodeSandbox) -> int:
        if sandbox.record.init is None:
            raise ConflictError(f"sandbox {sandbox.uid} is not running")
        return sandbox.record.init.pid
