"""A node that comes back: take over what lives, finish or undo what was begun, remove the rest.

Everything is judged by the records on disk and by the kernel, never by what the last node may have
thought. `sweep` runs at the start and now and then; it reports what it mended.
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
from paddock.runtime.local.checkpoint import is_whole
from paddock.runtime.local.node import records
from paddock.runtime.local.node.records import Phase, Record
from paddock.runtime.local.node.slots import group_name
from paddock.runtime.local.sandbox.builder import remove_groups
from paddock.runtime.local.sandbox.lifecycle import UP, Sandboxes
from paddock.runtime.local.sandbox.sandbox import Sandbox
from paddock.runtime.port import InstanceState

log = logging.getLogger(__name__)

_LOOKS, _PAUSE = 500, 0.02
"""How often, and every how many seconds, to look whether CRIU still works: for 10 s in all."""
_RESTS = (InstanceState.HIBERNATED, InstanceState.STOPPED, InstanceState.FAILED)


async def adopt(sandboxes: Sandboxes) -> None:
    """Take over every sandbox of the state directory."""
    machine = sandboxes.machine
    found = list(machine.directories.read_all())
    for _, record in found:
        if record is not None and record.state not in _RESTS:
            machine.slots.claim(record.slot)
    serving = await machine.work(_serving_envds)
    for name, record in found:
        if record is None or record.uid != name:
            # Made, but nothing was written yet: whatever it has is swept.
            machine.directories.discard(machine.directories.of(name))
            continue
        try:
            await _adopt_one(sandboxes, record, serving)
        except (PaddockError, OSError) as problem:
            log.warning("sandbox not adopted", extra=fields(sandbox=name, reason=str(problem)))
            _fail(sandboxes, record, f"the node could not take it over: {problem}")
    await machine.work(machine.storage.sweep)
    await sweep(sandboxes)


def _serving_envds() -> dict[str, int]:
    """Find every envd of this machine, by the network namespace that it has joined.

    One answers its first callers before its node has written down that there is one: killed just
    then, a node leaves an envd of which no record tells. A second beside it would have to share
    what init says with it, and neither would hear the whole.
    """
    found: dict[str, int] = {}
    ours = os.readlink("/proc/self/ns/pid")
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is somebody else's
            # What runs inside may call itself as it likes, but has another namespace of processes.
            if (path / "comm").read_bytes() == b"envd\n" and os.readlink(path / "ns/pid") == ours:
                found[os.readlink(path / "ns/net")] = int(path.name)
    return found


def _envd_of(record: Record, serving: Mapping[str, int]) -> records.Process | None:
    """Give the envd that a record tells of, or the one that serves it untold."""
    if (pidfd := records.open_process(record.envd)) is not None:
        os.close(pidfd)
        return record.envd
    try:
        network = os.readlink(f"/proc/{record.init.pid if record.init else 0}/ns/net")
    except OSError:
        return None
    pid = serving.get(network)
    return None if pid is None else records.identify(pid)


async def _adopt_one(sandboxes: Sandboxes, record: Record, serving: Mapping[str, int]) -> None:
    machine = sandboxes.machine
    sandbox = Sandbox(machine, record, sandboxes.clock, sandboxes.spawn)
    if record.phase in (Phase.DESTROYING, Phase.CREATING):
        # A creation nobody was told of is undone; the caller asks again.
        await sandboxes.erase(sandbox)
        log.info("unfinished sandbox removed", extra=fields(sandbox=record.uid))
        return
    sandboxes.known[record.uid] = sandbox
    if record.phase in (Phase.HIBERNATING, Phase.RESTORING, Phase.STOPPING):
        await _finish_pause(sandboxes, sandbox)
        return
    if record.state in _RESTS:
        return
    pidfd = records.open_process(record.init)
    if pidfd is None:
        _fail(sandboxes, record, "it ended while no node was there")
        await sandboxes.end_processes(sandboxes.known[record.uid])
        return
    envd = _envd_of(record, serving)
    sandboxes.come_up(sandbox, pidfd, envd=envd)
    if envd != record.envd and sandbox.door is not None and sandbox.door.is_serving:
        sandbox.save(envd=envd)
    if machine.cgroups.is_usable:
        is_frozen = machine.cgroups.is_frozen(group_name(record.slot))
        now = InstanceState.FROZEN if is_frozen else InstanceState.RUNNING
        if now is not record.state:
            sandbox.save(state=now)
    if sandbox.record.state is InstanceState.RUNNING and record.is_started:
        await sandbox.commands()
    log.info("sandbox adopted", extra=fields(sandbox=record.uid, state=sandbox.record.state))


async def _finish_pause(sandboxes: Sandboxes, sandbox: Sandbox) -> None:
    """Settle what was caught between two states: what is whole on disk decides."""
    record = sandbox.record
    pidfd = records.open_process(record.init)
    storage = sandboxes.machine.storage
    # Sealed before the processes are ended and dropped after they run again: it says who is right.
    has_memory = record.phase is not Phase.STOPPING and is_whole(storage.box_memory(sandbox.home))
    is_hibernating = record.phase is Phase.HIBERNATING
    if pidfd is not None and is_hibernating and await _is_let_go(pidfd, record):
        # The memory may be half written: the processes are the better copy.
        sandboxes.come_up(sandbox, pidfd)
        if sandboxes.machine.cgroups.is_usable:
            sandboxes.machine.cgroups.freeze(sandbox.group, frozen=False)
        sandbox.save(state=InstanceState.RUNNING, phase=Phase.SETTLED)
        return
    if pidfd is not None:
        os.close(pidfd)
    await sandboxes.end_processes(sandbox, keep_address=has_memory)
    kept = InstanceState.HIBERNATED if has_memory else InstanceState.STOPPED
    sandbox.save(state=kept, phase=Phase.SETTLED, init=None, envd=None, ip=None)


async def _is_let_go(pidfd: int, record: Record) -> bool:
    """Wait until CRIU, which outlives a node, has let go of an init; says whether that lives.

    It leaves processes as frozen as it found them, or ends them: only then the state is known.
    """
    status = Path(f"/proc/{record.init.pid if record.init else 0}/status")
    try:
        for _ in range(_LOOKS):
            text = status.read_text()
            signal.pidfd_send_signal(pidfd, 0)  # what was read was of the one we mean
            if "TracerPid:\t0\n" in text:
                break
            await asyncio.sleep(_PAUSE)
    except OSError:
        return False
    return True


def _fail(sandboxes: Sandboxes, record: Record, reason: str) -> None:
    sandbox = sandboxes.known.get(record.uid)
    if sandbox is None:
        sandbox = Sandbox(sandboxes.machine, record, sandboxes.clock, sandboxes.spawn)
        sandboxes.known[record.uid] = sandbox
    sandbox.record = structs.replace(sandbox.record, phase=Phase.SETTLED)
    sandbox.save(state=InstanceState.FAILED, reason=reason, ip=None)
    sandbox.journal.write("sandbox lost", level="error", reason=reason)
    sandboxes.tell(sandbox)


async def sweep(sandboxes: Sandboxes) -> tuple[str, ...]:
    """Remove groups, links and files that belong to no sandbox; give what was found."""
    machine = sandboxes.machine
    mended: list[str] = []
    if machine.cgroups.is_usable:
        for name in machine.cgroups.names():
            slot = name.removeprefix("s")
            if not slot.isdigit() or machine.slots.is_taken(int(slot)):
                continue
            machine.slots.claim(int(slot))  # nobody may be born into it meanwhile
            try:
                machine.cgroups.kill(name)
                await remove_groups(machine, name)
                mended.append(f"group {name}")
            except PaddockError as problem:
                log.warning("group not removed", extra=fields(group=name, reason=problem.message))
            finally:
                machine.slots.free(int(slot))
    if machine.fabric is not None:
        placed = (*UP, InstanceState.HIBERNATED)  # whoever sleeps keeps its address
        there = {box.home for box in sandboxes.known.values() if box.record.state in placed}
        kept = there | sandboxes.homes_in_use()  # one that is just being made has its link already
        mended += [f"network {uid}" for uid in await machine.fabric.release_all_unknown(kept)]
    for home in await machine.work(machine.storage.boxes):
        known = {box.home for box in sandboxes.known.values()} | sandboxes.homes_in_use()
        if home not in known and not machine.directories.of(home).exists():
            await machine.work(machine.storage.delete, home)
            mended.append(f"files {home}")
    await machine.work(machine.directories.empty_trash)
    if mended:
        log.info("leftovers removed", extra=fields(what=", ".join(mended)))
    return tuple(mended)
