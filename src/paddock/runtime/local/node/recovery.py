"""Recovery after a restart: adopt running sandboxes, finish or undo interrupted steps, sweep.

Decisions are based on the records on disk and on the kernel's state only. `sweep` runs at the start
and periodically.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.runtime.local.checkpoint import is_complete
from paddock.runtime.local.node import records
from paddock.runtime.local.node.records import RecordPhase, SandboxRecord
from paddock.runtime.local.node.slots import cgroup_name
from paddock.runtime.local.sandbox.builder import remove_cgroups
from paddock.runtime.local.sandbox.checkpoint_records import CheckpointRecords
from paddock.runtime.local.sandbox.lifecycle import UP, SandboxLifecycle
from paddock.runtime.local.sandbox.sandbox import NodeSandbox
from paddock.runtime.port import InstanceState

log = logging.getLogger(__name__)

_POLLS, _POLL_SECONDS = 500, 0.02
"""Number and interval (seconds) of checks whether CRIU still traces a process: 10 s in all."""
_WITHOUT_PROCESSES = (InstanceState.HIBERNATED, InstanceState.STOPPED, InstanceState.FAILED)


async def recover(lifecycle: SandboxLifecycle) -> None:
    """Adopt every sandbox of the state directory."""
    context = lifecycle.context
    found = list(context.directories.read_all())
    for _, record in found:
        if record is not None and record.state not in _WITHOUT_PROCESSES:
            context.slots.reserve(record.slot)
    running_envds = await context.run_in_thread(_running_envds)
    for name, record in found:
        if record is None or record.uid != name:
            # Created, but without a record yet: its resources are swept.
            context.directories.discard(context.directories.path_of(name))
            continue
        try:
            await _recover_one(lifecycle, record, running_envds)
        except (PaddockError, OSError) as problem:
            log.warning("sandbox not adopted", extra=fields(sandbox=name, reason=str(problem)))
            _mark_failed(lifecycle, record, f"the node could not adopt it: {problem}")
    await context.run_in_thread(context.storage.sweep)
    await context.run_in_thread(_sweep_checkpoints, CheckpointRecords(context))
    await sweep(lifecycle)


def _sweep_checkpoints(checkpoints: CheckpointRecords) -> None:
    """Remove files of checkpoints that were not stored completely, or not deleted completely."""
    for name in checkpoints.incomplete():
        checkpoints.discard(name)
        log.info("incomplete checkpoint removed", extra=fields(checkpoint=name))


def _running_envds() -> dict[str, int]:
    """Return the pids of all envds of this machine by the network namespace they joined.

    An envd serves its first callers before the node has recorded it, so a node killed at that
    moment leaves an envd that is in no record. A second envd beside it would share its channel to
    init, and each would miss messages.
    """
    found: dict[str, int] = {}
    ours = os.readlink("/proc/self/ns/pid")
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has exited, or belongs to another user
            # A process inside a sandbox can choose its name, but has another pid namespace.
            if (path / "comm").read_bytes() == b"envd\n" and os.readlink(path / "ns/pid") == ours:
                found[os.readlink(path / "ns/net")] = int(path.name)
    return found


def _envd_of(
    record: SandboxRecord, running_envds: Mapping[str, int]
) -> records.RecordedProcess | None:
    """Return the envd in the record if it is alive, or a running one that is not recorded."""
    if (pidfd := records.open_process(record.envd)) is not None:
        os.close(pidfd)
        return record.envd
    try:
        network = os.readlink(f"/proc/{record.init.pid if record.init else 0}/ns/net")
    except OSError:
        return None
    pid = running_envds.get(network)
    return None if pid is None else records.identify(pid)


async def _recover_one(
    lifecycle: SandboxLifecycle, record: SandboxRecord, running_envds: Mapping[str, int]
) -> None:
    context = lifecycle.context
    sandbox = NodeSandbox(context, record, lifecycle.clock, lifecycle.spawn)
    if record.phase in (RecordPhase.DESTROYING, RecordPhase.CREATING):
        # No caller got a reply to this creation: undo it; the caller retries.
        await lifecycle.erase(sandbox)
        log.info("unfinished sandbox removed", extra=fields(sandbox=record.uid))
        return
    lifecycle.by_uid[record.uid] = sandbox
    if record.phase in (RecordPhase.HIBERNATING, RecordPhase.RESTORING, RecordPhase.STOPPING):
        await _finish_pause(lifecycle, sandbox)
        return
    if record.state in _WITHOUT_PROCESSES:
        return
    pidfd = records.open_process(record.init)
    if pidfd is None:
        _mark_failed(lifecycle, record, "its init exited while no node was running")
        await lifecycle.kill_processes(lifecycle.by_uid[record.uid])
        return
    if record.init is not None:
        context.views.adopt(sandbox.cgroup, sandbox.limits, record.init.pid)
    envd = _envd_of(record, running_envds)
    lifecycle.attach_init(sandbox, pidfd, envd=envd)
    if (
        envd != record.envd
        and sandbox.envd_listener is not None
        and sandbox.envd_listener.is_serving
    ):
        sandbox.save(envd=envd)
    if context.cgroups.is_usable:
        is_frozen = context.cgroups.is_frozen(cgroup_name(record.slot))
        now = InstanceState.FROZEN if is_frozen else InstanceState.RUNNING
        if now is not record.state:
            sandbox.save(state=now)
    if sandbox.record.state is InstanceState.RUNNING and record.is_started:
        await sandbox.commands()
    log.info("sandbox adopted", extra=fields(sandbox=record.uid, state=sandbox.record.state))


async def _finish_pause(lifecycle: SandboxLifecycle, sandbox: NodeSandbox) -> None:
    """Finish an interrupted pause or restore; what is complete on disk decides."""
    record = sandbox.record
    pidfd = records.open_process(record.init)
    storage = lifecycle.context.storage
    # The image is sealed before the processes are killed, and dropped after they run again: if it
    # is complete, it is the valid copy.
    has_memory = record.phase is not RecordPhase.STOPPING and is_complete(
        storage.sandbox_memory(sandbox.resource_name)
    )
    is_hibernating = record.phase is RecordPhase.HIBERNATING
    if pidfd is not None and is_hibernating and await _wait_until_untraced(pidfd, record):
        # The image may be incomplete: the processes are the valid copy.
        lifecycle.attach_init(sandbox, pidfd)
        if lifecycle.context.cgroups.is_usable:
            lifecycle.context.cgroups.freeze(sandbox.cgroup, frozen=False)
        sandbox.save(state=InstanceState.RUNNING, phase=RecordPhase.SETTLED)
        return
    if pidfd is not None:
        os.close(pidfd)
    await lifecycle.kill_processes(sandbox, keep_address=has_memory)
    kept = InstanceState.HIBERNATED if has_memory else InstanceState.STOPPED
    sandbox.save(state=kept, phase=RecordPhase.SETTLED, init=None, envd=None, ip=None)


async def _wait_until_untraced(pidfd: int, record: SandboxRecord) -> bool:
    """Wait until CRIU, which outlives the node, no longer traces init; whether init is alive.

    CRIU leaves processes frozen as it found them, or kills them: only then is the state known.
    """
    status = Path(f"/proc/{record.init.pid if record.init else 0}/status")
    try:
        for _ in range(_POLLS):
            text = status.read_text()
            signal.pidfd_send_signal(pidfd, 0)  # still alive: the status was of this process
            if "TracerPid:\t0\n" in text:
                break
            await asyncio.sleep(_POLL_SECONDS)
    except OSError:
        return False
    return True


def _mark_failed(lifecycle: SandboxLifecycle, record: SandboxRecord, reason: str) -> None:
    sandbox = lifecycle.by_uid.get(record.uid)
    if sandbox is None:
        sandbox = NodeSandbox(lifecycle.context, record, lifecycle.clock, lifecycle.spawn)
        lifecycle.by_uid[record.uid] = sandbox
    sandbox.record = structs.replace(sandbox.record, phase=RecordPhase.SETTLED)
    sandbox.save(state=InstanceState.FAILED, reason=reason, ip=None)
    sandbox.log_file.write("sandbox lost", level="error", reason=reason)
    lifecycle.publish(sandbox)


async def sweep(lifecycle: SandboxLifecycle) -> tuple[str, ...]:
    """Remove cgroups, links and files that belong to no sandbox; return what was removed."""
    context = lifecycle.context
    removed: list[str] = []
    if context.cgroups.is_usable:
        for name in context.cgroups.names() | context.views.names():
            slot = name.removeprefix("s")
            if not slot.isdigit() or context.slots.is_taken(int(slot)):
                continue
            context.slots.reserve(int(slot))  # no sandbox may get it meanwhile
            try:
                context.cgroups.kill(name)
                await remove_cgroups(context, name)
                removed.append(f"cgroup {name}")
            except PaddockError as problem:
                log.warning("cgroup not removed", extra=fields(cgroup=name, reason=problem.message))
            finally:
                context.slots.release(int(slot))
    if context.fabric is not None:
        placed = (*UP, InstanceState.HIBERNATED)  # a hibernated sandbox keeps its address
        there = {
            sandbox.resource_name
            for sandbox in lifecycle.by_uid.values()
            if sandbox.record.state in placed
        }
        kept = there | lifecycle.resource_names_in_use()  # also of sandboxes being created
        removed += [f"network {uid}" for uid in await context.fabric.release_all_unknown(kept)]
    for name in await context.run_in_thread(context.storage.disks):
        known = {
            sandbox.resource_name for sandbox in lifecycle.by_uid.values()
        } | lifecycle.resource_names_in_use()
        if name not in known and not context.directories.path_of(name).exists():
            await context.run_in_thread(context.storage.delete, name)
            removed.append(f"files {name}")
    await context.run_in_thread(context.directories.empty_trash)
    if removed:
        log.info("leftovers removed", extra=fields(what=", ".join(removed)))
    return tuple(removed)
