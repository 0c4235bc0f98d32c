"""The life of sandboxes on this node: made, started, reached, measured, ended.

One operation at a time per uid; a second caller of the same waits and then sees what the first
did. Pausing in all its forms is in `pausing`, coming back after a crash in `adoption`.
"""

import asyncio
import contextlib
import functools
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable

from msgspec import structs

from paddock.kit.clock import Clock
from paddock.kit.errors import (
    DeadlineExceededError,
    NotFoundError,
    PaddockError,
    UnavailableError,
    UnsupportedError,
)
from paddock.kit.logs import fields
from paddock.runtime.local.envd import envd_client
from paddock.runtime.local.envd.zygote import Waiter
from paddock.runtime.local.kernel import nproc_reserve
from paddock.runtime.local.launch.launcher import Skeleton
from paddock.runtime.local.node import records
from paddock.runtime.local.node.node_context import Machine, open_workdir
from paddock.runtime.local.node.records import Phase, Record
from paddock.runtime.local.sandbox.builder import (
    Making,
    Place,
    check,
    host_name,
    kill_and_wait,
    remove_groups,
    set_hostname,
)
from paddock.runtime.local.sandbox.identity import rewrite_identity
from paddock.runtime.local.sandbox.sandbox import Sandbox, Spawn
from paddock.runtime.local.sandbox.warm_stock import Kind, Parked, Parking
from paddock.runtime.local.storage import Box
from paddock.runtime.port import (
    AgentConfig,
    Blueprint,
    EgressPolicy,
    Instance,
    InstanceState,
    RuntimeEvent,
    Usage,
)

log = logging.getLogger(__name__)

_READY_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.5)
UP = (InstanceState.RUNNING, InstanceState.FROZEN)


class Sandboxes:
    """All sandboxes of a node."""

    def __init__(
        self, machine: Machine, clock: Clock, spawn: Spawn, tell: Callable[[RuntimeEvent], None]
    ) -> None:
        self.machine = machine
        self.clock = clock
        self.spawn = spawn
        self.making = Making(machine)
        self.parking = Parking(machine, self.making, clock, spawn)
        self.known: dict[str, Sandbox] = {}
        self._tell = tell
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def turn(self, uid: str) -> AsyncGenerator[None]:
        """Be the only one who does something to a sandbox."""
        self._users[uid] += 1
        try:
            async with self._locks.setdefault(uid, asyncio.Lock()):
                yield
        finally:
            self._users[uid] -= 1
            if not self._users[uid]:
                del self._users[uid], self._locks[uid]

    def busy(self) -> frozenset[str]:
        """Give those to which something is being done right now."""
        return frozenset(self._users)

    def get(self, uid: str) -> Sandbox:
        """Give a sandbox."""
        sandbox = self.known.get(uid)
        if sandbox is None:
            raise NotFoundError(f"no sandbox {uid} is known to this node")
        return sandbox

    def tell(self, sandbox: Sandbox, reason: str | None = None) -> None:
        """Let watchers know that something happened by itself."""
        record = sandbox.record
        self._tell(RuntimeEvent(uid=record.uid, state=record.state, reason=reason or record.reason))

    # Making

    async def create(self, blueprint: Blueprint) -> Instance:
        """Make a sandbox of an image, or give the one there is."""
        check(blueprint)
        async with self.turn(blueprint.uid):
            if (there := self.known.get(blueprint.uid)) is not None:
                return there.instance()
            sandbox = await self._make(blueprint)
            facts = fields(sandbox=blueprint.uid, image=blueprint.image)
            # Whoever asked is answered first.
            note = functools.partial(log.info, "sandbox created", extra=facts)
            asyncio.get_running_loop().call_soon(note)
            return sandbox.instance()

    async def _make(self, blueprint: Blueprint) -> Sandbox:
        image, layers = await self.machine.image(blueprint.image)
        if image is not None:
            config = image.config
            blueprint = structs.replace(
                blueprint,
                env={**config.env, **blueprint.env},
                workdir=blueprint.workdir or config.workdir,
            )
        kind = Kind(blueprint.image, layers, blueprint.privileges)
        if blueprint.mounts:
            return await self._make_anew(blueprint, layers)
        sandbox = await self._make_of_parked(kind, blueprint)
        sandbox = sandbox or await self._make_anew(blueprint, layers)
        self.parking.note(kind, blueprint)  # only now: what cannot be made cannot be parked
        return sandbox

    async def _make_of_parked(self, kind: Kind, blueprint: Blueprint) -> Sandbox | None:
        """Give a parked sandbox an owner; the record that says so is the step that counts."""
        parked = await self.parking.take_whole(kind)
        if parked is None:
            return None
        before = parked.sandbox
        record = structs.replace(
            before.record,
            uid=blueprint.uid,
            blueprint=blueprint,
            state=InstanceState.RUNNING,
            phase=Phase.SETTLED,
            agent=blueprint.agent,
            egress=blueprint.egress,
            init=parked.init,
            envd=parked.waiter.process if parked.waiter else None,
            ip=parked.made.ip,
            started_at=self.clock.now(),
        )
        sandbox = Sandbox(self.machine, record, self.clock, self.spawn)
        with self.parking.held_back():
            try:
                await self._fit(parked, sandbox)
                self.machine.directories.write(record)
                self.come_up(sandbox, os.dup(parked.pidfd), waiter=parked.waiter)
            except BaseException as problem:
                log.warning(
                    "parked sandbox of no use",
                    extra=fields(sandbox=sandbox.uid, reason=str(problem)),
                )
                sandbox.go_down(kill=True)
                self.machine.directories.discard(self.machine.directories.of(sandbox.uid))
                await asyncio.shield(self.parking.discard(parked))
                if not isinstance(problem, (PaddockError, OSError)):
                    raise
                return None
        os.close(parked.pidfd)
        self.known[sandbox.uid] = sandbox
        self.parking.handed_over(parked)
        return sandbox

    async def _fit(self, parked: Parked, sandbox: Sandbox) -> None:
        """Change what is asked for otherwise than it was parked."""
        before, machine = parked.sandbox, self.machine
        if sandbox.limits != before.limits and machine.cgroups.is_usable:
            machine.cgroups.limit(sandbox.group, sandbox.limits)
            nproc_reserve.keep(parked.init.pid, sandbox.limits.pids)
        if sandbox.limits.disk_bytes != before.limits.disk_bytes:
            limit = sandbox.limits.disk_bytes or 0
            await machine.work(machine.storage.limit, sandbox.home, limit)
        if sandbox.record.egress != before.record.egress and machine.fabric is not None:
            await machine.fabric.set_policy(sandbox.home, sandbox.record.egress)
        hostname = host_name(sandbox.record.blueprint)
        set_hostname(parked.init.pid, hostname)
        rewrite_identity(parked.made.upper, hostname=hostname, ip=parked.made.ip)

    async def _make_anew(self, blueprint: Blueprint, layers: tuple[str, ...]) -> Sandbox:
        record = Record(
            uid=blueprint.uid,
            blueprint=blueprint,
            state=InstanceState.CREATING,
            phase=Phase.CREATING,
            slot=-1,
            agent=blueprint.agent,
            egress=blueprint.egress,
            layers=layers,
        )
        sandbox = Sandbox(self.machine, record, self.clock, self.spawn)
        skeleton: Skeleton | None = None
        with self.parking.held_back():
            try:
                skeleton, box, place = await self._begin(sandbox)
                self.machine.directories.write(sandbox.record)
                await self._launch(sandbox, skeleton, box, place)
            except BaseException as problem:
                log.warning(
                    "sandbox not created", extra=fields(sandbox=sandbox.uid, reason=str(problem))
                )
                if skeleton is not None:
                    skeleton.kill()
                await asyncio.shield(self.erase(sandbox))
                if isinstance(problem, OSError):
                    raise UnavailableError(f"the sandbox could not be made: {problem}") from problem
                raise
        skeleton.release()
        self.known[blueprint.uid] = sandbox
        return sandbox

    async def _begin(self, sandbox: Sandbox) -> tuple[Skeleton, Box, Place]:
        """Have a skeleton, files and an address at once: none needs the others."""
        skeleton, ground = await asyncio.gather(
            self.parking.take(), self.making.ground(sandbox), return_exceptions=True
        )
        if isinstance(skeleton, BaseException):
            raise skeleton
        if isinstance(ground, BaseException):
            await self.making.scrap(skeleton)
            raise ground
        box, place = ground
        init = records.identify(skeleton.pid)
        sandbox.record = structs.replace(
            sandbox.record, slot=skeleton.slot, init=init, place=place.slot
        )
        return skeleton, box, place

    async def relaunch(self, sandbox: Sandbox) -> None:
        """Start a sandbox anew on the files it has."""
        before = sandbox.record
        await self.machine.ensure_layers(before.layers)
        skeleton: Skeleton | None = None
        with self.parking.held_back():
            try:
                phase = before.phase if before.phase is Phase.CREATING else Phase.RESTORING
                skeleton, box, place = await self._begin(sandbox)
                sandbox.save(phase=phase, envd=None)
                await self._launch(sandbox, skeleton, box, place)
                sandbox.save(incarnation=before.incarnation + 1, reason=None)
            except BaseException:
                if skeleton is not None:
                    skeleton.kill()
                await asyncio.shield(self.end_processes(sandbox))
                with contextlib.suppress(FileNotFoundError):
                    sandbox.save(state=before.state, phase=before.phase, init=None)
                raise
        skeleton.release()

    def homes_in_use(self) -> frozenset[str]:
        """Name the files and places in the network that the sweeper must leave alone."""
        return self.busy() | self.parking.homes

    async def _launch(self, sandbox: Sandbox, skeleton: Skeleton, box: Box, place: Place) -> None:
        """Let a skeleton become the sandbox's init, and write down that it runs."""
        is_expected = _is_expected(sandbox.record.agent)
        hang_door = sandbox.hang_door if is_expected else None
        made = await self.making.assemble(
            sandbox, skeleton, box, place, with_envd=is_expected, meanwhile=hang_door
        )
        self.come_up(sandbox, os.dup(skeleton.pidfd), waiter=made.waiter)
        sandbox.save(
            state=InstanceState.RUNNING,
            phase=Phase.SETTLED,
            envd=made.waiter.process if made.waiter else None,
            ip=made.ip,
            started_at=self.clock.now(),
        )
        self._expect_callers(sandbox)

    def _expect_callers(self, sandbox: Sandbox) -> None:
        """Have an envd ready where somebody is about to call, or must not wait when he does."""
        if sandbox.door is not None and _is_expected(sandbox.record.agent):
            sandbox.door.summon()

    def come_up(
        self,
        sandbox: Sandbox,
        pidfd: int,
        *,
        envd: records.Process | None = None,
        waiter: Waiter | None = None,
    ) -> None:
        """Hold a running sandbox."""
        loop = asyncio.get_running_loop()
        sandbox.come_up(
            pidfd,
            on_death=self._died,
            add_reader=loop.add_reader,
            remove_reader=loop.remove_reader,
            envd=envd,
            waiter=waiter,
        )

    # Running

    async def start(self, uid: str) -> Instance:
        """Give the start command, once, and wait for the ready command."""
        async with self.turn(uid):
            sandbox = self.get(uid)
            sandbox.expect(InstanceState.RUNNING, doing="started")
            blueprint = sandbox.record.blueprint
            env = sandbox.envd_settings().env_vars
            commands = await sandbox.commands()
            if blueprint.start_command and not sandbox.record.is_started:
                sandbox.save(is_started=True)
                await commands.begin(
                    blueprint.start_command,
                    user=blueprint.user,
                    env=env,
                    cwd=blueprint.workdir,
                )
            self._expect_callers(sandbox)
        if blueprint.ready_command:
            await self._wait_ready(sandbox, blueprint)
        return sandbox.instance()

    async def _wait_ready(self, sandbox: Sandbox, blueprint: Blueprint) -> None:
        limit = blueprint.ready_timeout_seconds
        settings = sandbox.envd_settings()
        last = 0
        try:
            async with asyncio.timeout(limit):
                for attempt in range(10**9):
                    commands = await sandbox.commands()
                    last = await commands.run(
                        blueprint.ready_command or "true",
                        user=blueprint.user,
                        env=settings.env_vars,
                        cwd=blueprint.workdir,
                        timeout=limit,
                    )
                    if last == 0:
                        return
                    await asyncio.sleep(_READY_PAUSES[min(attempt, len(_READY_PAUSES) - 1)])
        except TimeoutError:
            raise DeadlineExceededError(
                f"sandbox {sandbox.uid} was not ready within {limit:g} s: its ready command "
                f"last ended with {last}",
                hint="look at the sandbox's log, or allow more time",
            ) from None

    async def configure(self, uid: str, agent: AgentConfig) -> None:
        """Keep what envd must know, and tell the one that runs."""
        async with self.turn(uid):
            sandbox = self.get(uid)
            sandbox.save(agent=agent)
            if sandbox.door is not None:
                await sandbox.door.settle()
            runs = sandbox.record.state is InstanceState.RUNNING
            if sandbox.door is not None and sandbox.door.is_serving:
                if runs:
                    settings = sandbox.envd_settings()
                    await envd_client.configure(sandbox.door.control, settings, names=agent)
                else:
                    await sandbox.door.end()
            elif runs:
                self._expect_callers(sandbox)

    async def set_egress(self, uid: str, policy: EgressPolicy) -> None:
        """Replace the policy, at once where it runs."""
        async with self.turn(uid):
            sandbox = self.get(uid)
            fabric = self.machine.fabric
            if fabric is None:
                raise UnsupportedError(
                    f"egress cannot be filtered here: {self.machine.no_network_because}"
                )
            fabric.check_policy(policy)
            sandbox.save(egress=policy)
            if sandbox.record.state in UP:
                await fabric.set_policy(sandbox.home, policy)

    async def usage(self, uid: str) -> Usage:
        """Measure a sandbox."""
        sandbox = self.get(uid)
        limits = sandbox.limits
        used = self.machine.cgroups.usage(sandbox.group) if sandbox.record.state in UP else None
        disk = await self.machine.work(self.machine.storage.usage_bytes, sandbox.home)
        count = (limits.cpu_millis or 1000 * (os.cpu_count() or 1)) / 1000
        now, cpu = self.clock.monotonic(), used.cpu_seconds if used else 0.0
        before = sandbox.cpu_sample or (now, cpu)
        percent = 100 * (cpu - before[1]) / (now - before[0]) if now > before[0] else 0.0
        sandbox.cpu_sample = (now, cpu)
        total = limits.memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Usage(
            at=self.clock.now(),
            cpu_count=count,
            cpu_used_percent=max(0.0, round(percent, 2)),
            cpu_seconds=cpu,
            memory_used_bytes=used.memory_bytes if used else 0,
            memory_total_bytes=total,
            memory_cache_bytes=used.cache_bytes if used else 0,
            disk_used_bytes=disk,
            disk_total_bytes=limits.disk_bytes or self.machine.storage.space().total_bytes,
        )

    def netns(self, uid: str) -> int:
        """Open the network namespace of a running sandbox."""
        return self.get(uid).namespace("net")

    # Ending

    async def destroy(self, uid: str) -> None:
        """End a sandbox and remove every trace."""
        async with self.turn(uid):
            sandbox = self.known.get(uid)
            if sandbox is None:
                return
            # To destroy makes room: it must not need any.
            sandbox.save_if_possible(phase=Phase.DESTROYING)
            await self.erase(sandbox)
            self.known.pop(uid, None)
            log.info("sandbox destroyed", extra=fields(sandbox=uid))

    async def erase(self, sandbox: Sandbox) -> None:
        """Remove everything a sandbox has; safe to repeat from any point."""
        await self._clear(sandbox)
        await self.machine.work(self.machine.storage.delete, sandbox.home)
        directories = self.machine.directories
        if directories.discard(directories.of(sandbox.uid)) is not None:
            self.spawn("empty the trash", self.machine.work(directories.empty_trash))
        # The record is gone before another sandbox can have the slot.
        self.machine.slots.free(sandbox.record.slot)
        sandbox.record = structs.replace(sandbox.record, slot=-1)

    async def end_processes(self, sandbox: Sandbox, *, keep_address: bool = False) -> None:
        """Kill everything in it, take it off the network, give its place back."""
        await self._clear(sandbox, keep_address=keep_address)
        slot = sandbox.record.slot
        if slot >= 0:
            # The record lets go of the slot before another sandbox can have it.
            sandbox.save(slot=-1, init=None, envd=None)
            self.machine.slots.free(slot)

    async def _clear(self, sandbox: Sandbox, *, keep_address: bool = False) -> None:
        pidfd = os.dup(sandbox.pidfd) if sandbox.pidfd is not None else None
        if pidfd is None:
            pidfd = records.open_process(sandbox.record.init)
        sandbox.go_down(kill=True)
        if self.machine.cgroups.is_usable:
            self.machine.cgroups.kill(sandbox.group)
        if pidfd is not None:
            try:
                await kill_and_wait(pidfd)
            finally:
                os.close(pidfd)
        if self.machine.fabric is not None:
            await self.machine.fabric.detach(sandbox.home, keep_address=keep_address)
        open_workdir(self.machine, sandbox.home)
        if sandbox.record.slot >= 0:
            await remove_groups(self.machine, sandbox.group)

    def _died(self, sandbox: Sandbox) -> None:
        """Its init ended without being asked to."""
        sandbox.go_down(kill=True)
        self.spawn(f"bury {sandbox.uid}", self._bury(sandbox))

    async def _bury(self, sandbox: Sandbox) -> None:
        async with self.turn(sandbox.uid):
            if self.known.get(sandbox.uid) is not sandbox or sandbox.pidfd is not None:
                return
            if sandbox.record.state not in UP:
                return
            reason = "its first process was killed"
            if self.machine.cgroups.is_usable:
                usage = self.machine.cgroups.usage(sandbox.group)
                if usage.oom_kills > sandbox.record.oom_kills:
                    reason = "it ran out of memory"
            sandbox.save_if_possible(state=InstanceState.FAILED, reason=reason, ip=None)
            log.warning("sandbox failed", extra=fields(sandbox=sandbox.uid, reason=reason))
            self.tell(sandbox)
            with contextlib.suppress(OSError):
                sandbox.journal.write("sandbox ended by itself", level="error", reason=reason)
            await self.end_processes(sandbox)


def _is_expected(agent: AgentConfig) -> bool:
    return bool(agent.sandbox_id) or agent.is_reserved
