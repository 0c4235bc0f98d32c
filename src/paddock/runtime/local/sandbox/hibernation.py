"""Sandboxes beyond their processes: hibernated, stopped, stored, forked, made of what was stored.

The order of steps is what makes a kill at any point harmless: the record names the intention first,
the old copy goes only when the new one is whole.
"""

import asyncio
import logging
import os
import shutil
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from paddock.kit import ids
from paddock.kit.errors import (
    ConflictError,
    NotFoundError,
    PaddockError,
    UnavailableError,
)
from paddock.kit.logs import fields
from paddock.runtime.local.checkpoint import Checkpointer, Dump, Ground, Restore, Restored, is_whole
from paddock.runtime.local.kernel import nproc_reserve, pidfds
from paddock.runtime.local.launch.protocol import MakeRoot
from paddock.runtime.local.node import records
from paddock.runtime.local.node.capabilities import Abilities
from paddock.runtime.local.node.node_context import open_workdir
from paddock.runtime.local.node.records import Phase, Record
from paddock.runtime.local.node.slots import group_name
from paddock.runtime.local.sandbox.builder import check, host_name, set_hostname
from paddock.runtime.local.sandbox.freeze import Pausing
from paddock.runtime.local.sandbox.identity import write_identity
from paddock.runtime.local.sandbox.lifecycle import UP, Sandboxes
from paddock.runtime.local.sandbox.sandbox import Sandbox
from paddock.runtime.port import Blueprint, Instance, InstanceState, StoredCheckpoint

log = logging.getLogger(__name__)

_FORKS_AT_ONCE = 4
_KEPT = (*UP, InstanceState.HIBERNATED, InstanceState.STOPPED)


class CheckpointRecord(Struct, frozen=True, kw_only=True):
    """What is known of a stored state besides its files and memory."""

    stored: StoredCheckpoint
    layers: tuple[str, ...]
    blueprint: Blueprint
    is_started: bool


# Made at import, not by the first use: see docs/decisions/0080.
_decoder = msgspec.json.Decoder(CheckpointRecord)


class Keeping:
    """Stores and brings back."""

    def __init__(self, sandboxes: Sandboxes, pausing: Pausing, abilities: Abilities) -> None:
        self._sandboxes = sandboxes
        self._pausing = pausing
        self._abilities = abilities
        self._machine = sandboxes.machine
        self._records = self._machine.settings.state / "checkpoints"

    # Pausing that frees the machine

    async def hibernate(self, uid: str) -> Instance:
        """Store memory and files, free everything else."""
        checkpointer = await self._abilities.checkpointer()
        async with self._sandboxes.turn(uid):
            sandbox = self._sandboxes.get(uid)
            sandbox.expect(*UP, InstanceState.HIBERNATED, doing="hibernated")
            if sandbox.record.state is InstanceState.HIBERNATED:
                return sandbox.instance()
            before = sandbox.record.state
            pid, pidfd = self._pid(sandbox), os.dup(sandbox.pidfd or 0)
            sandbox.save(phase=Phase.HIBERNATING)
            sandbox.go_down(kill=True)
            dump = Dump(
                pid=pid,
                images=self._machine.storage.box_memory(sandbox.home),
                leave_running=False,
                group=self._machine.cgroups.unified(sandbox.group),
            )
            try:
                if before is InstanceState.RUNNING:
                    # CRIU does it, too, but looks only every 100 ms whether all stand.
                    await self._pausing.stand_still(sandbox)
                await asyncio.to_thread(checkpointer.dump, dump)
            except BaseException:
                if before is InstanceState.RUNNING:
                    self._pausing.go_on(sandbox)
                self._sandboxes.come_up(sandbox, pidfd)
                sandbox.save(state=before, phase=Phase.SETTLED)
                raise
            os.close(pidfd)
            await self._sandboxes.end_processes(sandbox, keep_address=True)
            self._settle(sandbox, InstanceState.HIBERNATED)
            log.info("sandbox hibernated", extra=fields(sandbox=uid))
            return sandbox.instance()

    async def stop(self, uid: str) -> Instance:
        """End all processes, keep the files."""
        async with self._sandboxes.turn(uid):
            sandbox = self._sandboxes.get(uid)
            sandbox.expect(*_KEPT, InstanceState.FAILED, doing="stopped")
            if sandbox.record.state is InstanceState.STOPPED:
                return sandbox.instance()
            sandbox.save(phase=Phase.STOPPING)
            if sandbox.record.state in UP:
                await self._sandboxes.end_processes(sandbox)
            await self._machine.work(self._machine.storage.drop_memory, sandbox.home)
            self._settle(sandbox, InstanceState.STOPPED)
            return sandbox.instance()

    async def restore(self, uid: str) -> Instance:
        """Bring a hibernated or stopped sandbox back."""
        async with self._sandboxes.turn(uid):
            sandbox = self._sandboxes.get(uid)
            sandbox.expect(*_KEPT, doing="restored")
            if sandbox.record.state is InstanceState.FROZEN:
                raise ConflictError(f"sandbox {uid} is frozen: thaw it instead of restoring it")
            if sandbox.record.state is InstanceState.RUNNING:
                return sandbox.instance()
            if sandbox.record.state is InstanceState.STOPPED:
                await self._sandboxes.relaunch(sandbox)
            else:
                memory = self._machine.storage.box_memory(sandbox.home)
                await self._bring_back(sandbox, memory, keep_connections=True)
                await self._machine.work(self._machine.storage.drop_memory, sandbox.home)
            log.info("sandbox restored", extra=fields(sandbox=uid))
            return sandbox.instance()

    # Stored states

    async def snapshot(
        self, uid: str, checkpoint_id: str, *, memory: bool, keep_running: bool
    ) -> StoredCheckpoint:
        """Store a state under an id."""
        records.check_uid(checkpoint_id)
        if (known := self._read(checkpoint_id)) is not None:
            return known.stored
        checkpointer = await self._abilities.checkpointer() if memory else None
        async with self._sandboxes.turn(uid):
            sandbox = self._sandboxes.get(uid)
            wanted = _KEPT[:3] if memory else _KEPT
            sandbox.expect(*wanted, doing="stored with its memory" if memory else "stored")
            await self._store(sandbox, checkpoint_id, checkpointer)
            record = await self._write(sandbox, checkpoint_id, has_memory=memory)
            is_up = sandbox.record.state in UP
        if is_up and not keep_running:
            await (self.hibernate(uid) if memory else self.stop(uid))
        return record.stored

    async def fork(self, uid: str, children: tuple[Blueprint, ...]) -> tuple[Instance | str, ...]:
        """Make clones of a running sandbox."""
        checkpoint_id = f"fork-{ids.name_suffix(12)}"
        self._sandboxes.get(uid).expect(*UP, doing="forked")
        await self.snapshot(uid, checkpoint_id, memory=True, keep_running=True)
        some = asyncio.Semaphore(_FORKS_AT_ONCE)

        async def make(child: Blueprint) -> Instance | str:
            async with some:
                try:
                    return await self.create(structs.replace(child, checkpoint_id=checkpoint_id))
                except PaddockError as problem:
                    return problem.message

        try:
            return tuple(await asyncio.gather(*(make(child) for child in children)))
        finally:
            await self.delete_checkpoint(checkpoint_id)

    async def create(self, blueprint: Blueprint) -> Instance:
        """Make a sandbox, of an image or of a stored state."""
        if blueprint.checkpoint_id is None:
            return await self._sandboxes.create(blueprint)
        check(blueprint)
        async with self._sandboxes.turn(blueprint.uid):
            if (there := self._sandboxes.known.get(blueprint.uid)) is not None:
                return there.instance()
            stored = self._read(blueprint.checkpoint_id)
            if stored is None:
                raise NotFoundError(f"no checkpoint {blueprint.checkpoint_id} is stored here")
            sandbox = await self._clone(blueprint, stored)
            log.info(
                "sandbox created from a checkpoint",
                extra=fields(sandbox=blueprint.uid, checkpoint=blueprint.checkpoint_id),
            )
            return sandbox.instance()

    async def checkpoints(self) -> tuple[StoredCheckpoint, ...]:
        """List stored states."""
        names = await self._machine.work(self._machine.storage.checkpoints)
        found = (self._read(name) for name in names)
        return tuple(record.stored for record in found if record is not None)

    async def delete_checkpoint(self, checkpoint_id: str) -> None:
        """Forget a stored state."""
        records.check_uid(checkpoint_id)
        # The record goes first: without it the rest is nobody's.
        self._path(checkpoint_id).unlink(missing_ok=True)
        await self._machine.work(self._machine.storage.delete_checkpoint, checkpoint_id)

    async def forget_all(self) -> None:
        """Forget every stored state."""
        for stored in await self.checkpoints():
            await self.delete_checkpoint(stored.id)

    # Steps

    async def _store(
        self, sandbox: Sandbox, checkpoint_id: str, checkpointer: Checkpointer | None
    ) -> None:
        storage, home = self._machine.storage, sandbox.home
        if sandbox.record.state not in UP:
            await self._machine.work(storage.snapshot, home, checkpoint_id)
            if checkpointer is not None:
                await self._machine.work(
                    _link_tree, storage.box_memory(home), storage.checkpoint_memory(checkpoint_id)
                )
            return
        await self._machine.work(storage.flush, home)
        open_workdir(self._machine, home)
        is_running = sandbox.record.state is InstanceState.RUNNING
        has_groups = self._machine.cgroups.is_usable
        if is_running and has_groups:
            # CRIU does it, too, but looks only every 100 ms whether all stand.
            await self._pausing.stand_still(sandbox)
        try:
            if checkpointer is None:
                await self._machine.work(storage.snapshot, home, checkpoint_id)
                return
            dump = Dump(
                pid=self._pid(sandbox),
                images=storage.checkpoint_memory(checkpoint_id),
                leave_running=True,
                group=self._machine.cgroups.unified(sandbox.group),
                at_rest=lambda: storage.snapshot(home, checkpoint_id),
            )
            await asyncio.to_thread(checkpointer.dump, dump)
        finally:
            if is_running and has_groups:
                self._pausing.go_on(sandbox)

    async def _clone(self, blueprint: Blueprint, stored: CheckpointRecord) -> Sandbox:
        storage = self._machine.storage
        checkpoint_id = stored.stored.id
        blueprint = structs.replace(
            blueprint,
            image=stored.stored.image,
            env={**stored.blueprint.env, **blueprint.env},
            workdir=blueprint.workdir or stored.blueprint.workdir,
        )
        record = Record(
            uid=blueprint.uid,
            blueprint=blueprint,
            state=InstanceState.STOPPED,
            phase=Phase.CREATING,
            slot=-1,
            agent=blueprint.agent,
            egress=blueprint.egress,
            layers=stored.layers,
            is_started=stored.is_started and stored.stored.has_memory,
            incarnation=0,
        )
        sandbox = Sandbox(self._machine, record, self._sandboxes.clock, self._sandboxes.spawn)
        try:
            sandbox.save()
            await self._machine.work(
                storage.clone,
                checkpoint_id,
                blueprint.uid,
                limit_bytes=sandbox.limits.disk_bytes or 0,
            )
            if stored.stored.has_memory:
                memory = storage.checkpoint_memory(checkpoint_id)
                await self._bring_back(sandbox, memory, keep_connections=False)
            else:
                await self._sandboxes.relaunch(sandbox)
        except BaseException:
            await asyncio.shield(self._sandboxes.erase(sandbox))
            raise
        self._sandboxes.known[blueprint.uid] = sandbox
        return sandbox

    async def _bring_back(self, sandbox: Sandbox, memory: Path, *, keep_connections: bool) -> None:
        """Restore processes into a new place, with the files the box has now."""
        checkpointer = await self._abilities.checkpointer()
        if not is_whole(memory):
            raise UnavailableError(
                f"the stored memory of sandbox {sandbox.uid} is not whole",
                hint="stop it, then start it from its files",
            )
        machine, before = self._machine, sandbox.record
        slot = machine.slots.take()
        name = group_name(slot)
        restored: Restored | None = None
        try:
            phase = before.phase if before.phase is Phase.CREATING else Phase.RESTORING
            sandbox.save(slot=slot, phase=phase)
            machine.cgroups.create(name)
            machine.cgroups.limit(name, sandbox.limits)
            restore = self._restore_of(sandbox, memory, keep_connections=keep_connections)
            restored = await asyncio.to_thread(checkpointer.restore, restore)
            # Only now: what is stored names the machine as it was.
            name_now = host_name(sandbox.record.blueprint)
            await asyncio.to_thread(set_hostname, restored.pid, name_now)
            nproc_reserve.keep(restored.pid, sandbox.limits.pids)
            self._sandboxes.come_up(sandbox, restored.pidfd)
            sandbox.save(
                state=InstanceState.RUNNING,
                phase=Phase.SETTLED,
                init=records.identify(restored.pid),
                incarnation=before.incarnation + 1,
                started_at=self._sandboxes.clock.now(),
                reason=None,
            )
        except BaseException:
            if restored is not None and sandbox.pidfd is None:
                pidfds.kill(restored.pidfd)
            if sandbox.record.slot != slot:  # nobody could write down who has it
                machine.slots.free(slot)
            keep = before.state is InstanceState.HIBERNATED
            try:
                await asyncio.shield(self._sandboxes.end_processes(sandbox, keep_address=keep))
            finally:
                sandbox.save_if_possible(state=before.state, phase=before.phase)
            raise
        if sandbox.record.is_started:
            await sandbox.commands()

    def _restore_of(self, sandbox: Sandbox, memory: Path, *, keep_connections: bool) -> Restore:
        machine, making = self._machine, self._sandboxes.making
        loop = asyncio.get_running_loop()

        def ground() -> Ground:
            return asyncio.run_coroutine_threadsafe(self._ground(sandbox), loop).result(30)

        def wire(pid: int) -> None:
            # Runs in the restoring thread while nothing of the sandbox does.
            asyncio.run_coroutine_threadsafe(making.link(sandbox, pid), loop).result(30)

        return Restore(
            images=memory,
            id_base=machine.base(sandbox.record.slot),
            ground=ground,
            groups=(machine.cgroups.unified(sandbox.group), *machine.cgroups.joins(sandbox.group)),
            keep_connections=keep_connections,
            wire=wire,
        )

    async def _ground(self, sandbox: Sandbox) -> Ground:
        """Have a place in the network and a mounted root for what comes back."""
        machine, record = self._machine, sandbox.record
        await machine.ensure_layers(record.layers)
        box = machine.storage.find(sandbox.home)
        if box is None:
            raise UnavailableError(f"the files of sandbox {sandbox.uid} are not there")
        place = await self._sandboxes.making.place(sandbox)
        sandbox.record = structs.replace(sandbox.record, ip=place.ip, place=place.slot)
        hostname = host_name(record.blueprint)
        write_identity(box.upper, hostname=hostname, ip=place.ip, resolv_conf=place.resolv_conf)
        mounts = record.blueprint.mounts
        request = MakeRoot(
            base=machine.base(record.slot),
            layers=record.layers,
            box=str(box.path),
            locked=record.blueprint.privileges == "locked",
            binds=tuple((mount.source, mount.read_only) for mount in mounts),
        )
        root, *binds = await machine.launching.mount_root(None, request)
        return Ground(
            root=root, binds={mount.path: fd for mount, fd in zip(mounts, binds, strict=True)}
        )

    def _settle(self, sandbox: Sandbox, now: InstanceState) -> None:
        is_started = sandbox.record.is_started and now is InstanceState.HIBERNATED
        sandbox.save(
            state=now,
            phase=Phase.SETTLED,
            init=None,
            envd=None,
            ip=None,
            reason=None,
            is_started=is_started,
        )

    def _pid(self, sandbox: Sandbox) -> int:
        if sandbox.record.init is None:
            raise ConflictError(f"sandbox {sandbox.uid} does not run")
        return sandbox.record.init.pid

    # Records of stored states

    def _path(self, checkpoint_id: str) -> Path:
        return self._records / f"{checkpoint_id}.json"

    async def _write(
        self, sandbox: Sandbox, checkpoint_id: str, *, has_memory: bool
    ) -> CheckpointRecord:
        size = await self._machine.work(self._machine.storage.checkpoint_bytes, checkpoint_id)
        record = CheckpointRecord(
            stored=StoredCheckpoint(
                id=checkpoint_id,
                source_uid=sandbox.uid,
                has_memory=has_memory,
                size_bytes=size,
                created_at=self._sandboxes.clock.now(),
                image=sandbox.record.blueprint.image,
            ),
            layers=sandbox.record.layers,
            blueprint=sandbox.record.blueprint,
            is_started=sandbox.record.is_started,
        )
        self._records.mkdir(mode=0o700, exist_ok=True)
        temporary = self._records / f".{checkpoint_id}.tmp"
        temporary.write_bytes(msgspec.json.encode(record))
        temporary.replace(self._path(checkpoint_id))
        return record

    def _read(self, checkpoint_id: str) -> CheckpointRecord | None:
        try:
            data = self._path(checkpoint_id).read_bytes()
        except FileNotFoundError:
            return None
        record = _decoder.decode(data)
        return record if self._machine.storage.has_checkpoint(checkpoint_id) else None


def _link_tree(source: Path, target: Path) -> None:
    """Copy a directory of images, which nobody writes to any more, by links where possible."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=os.link)
