"""The sandboxes of this node: create, start, configure, destroy.

Operations on one uid run one at a time; a concurrent caller waits and then sees the result of the
first. Freezing is in `freeze.py`, hibernation and checkpoints in `hibernation.py`, recovery after a
crash in `node/recovery.py`.
"""

import asyncio
import contextlib
import functools
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from msgspec import structs

from paddock.envd.config import OutboundFiles
from paddock.kit.clock import Clock
from paddock.kit.errors import NotFoundError, PaddockError, UnavailableError, UnsupportedError
from paddock.kit.logs import fields
from paddock.runtime.local.envd import envd_client
from paddock.runtime.local.envd.envd_listener import EnvdListener
from paddock.runtime.local.envd.zygote import WaitingEnvd
from paddock.runtime.local.identity.files import rewrite_identity
from paddock.runtime.local.images import host
from paddock.runtime.local.launch.skeleton import Skeleton
from paddock.runtime.local.node import records
from paddock.runtime.local.node.node_context import NodeContext, unlock_workdir
from paddock.runtime.local.node.records import RecordPhase, SandboxRecord
from paddock.runtime.local.sandbox.builder import (
    NetworkReservation,
    SandboxBuilder,
    host_name,
    kill_and_wait,
    remove_cgroups,
    set_group_limits,
    set_hostname,
)
from paddock.runtime.local.sandbox.image_check import check_image
from paddock.runtime.local.sandbox.oom_monitor import OomMonitor
from paddock.runtime.local.sandbox.readiness import wait_until_ready
from paddock.runtime.local.sandbox.sandbox import NodeSandbox, Spawn
from paddock.runtime.local.sandbox.usage import measure
from paddock.runtime.local.sandbox.warm_stock import WarmKind, WarmSandbox, WarmStock
from paddock.runtime.local.storage import SandboxDisk
from paddock.runtime.local.views.views import new_boot_id
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

UP = (InstanceState.RUNNING, InstanceState.FROZEN)
"""States in which a sandbox has processes."""


class SandboxLifecycle:
    """The sandboxes of a node by uid, and the operations on them."""

    def __init__(
        self,
        context: NodeContext,
        clock: Clock,
        spawn: Spawn,
        publish: Callable[[RuntimeEvent], None],
    ) -> None:
        self.context = context
        self.clock = clock
        self.spawn = spawn
        self.builder = SandboxBuilder(context)
        self.warm_stock = WarmStock(context, self.builder, clock, spawn)
        self.by_uid: dict[str, NodeSandbox] = {}
        self._publish = publish
        self.oom_monitor = OomMonitor(context.cgroups, clock, publish)
        self._locks: dict[str, asyncio.Lock] = {}
        self._lock_users: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def lock(self, uid: str) -> AsyncGenerator[None]:
        """Hold the lock of a sandbox; it is dropped when it is no longer used."""
        self._lock_users[uid] += 1
        try:
            async with self._locks.setdefault(uid, asyncio.Lock()):
                yield
        finally:
            self._lock_users[uid] -= 1
            if not self._lock_users[uid]:
                del self._lock_users[uid], self._locks[uid]

    def locked_uids(self) -> frozenset[str]:
        """Return the uids with an operation in progress."""
        return frozenset(self._lock_users)

    def get(self, uid: str) -> NodeSandbox:
        """Return a sandbox, or raise `NotFoundError`."""
        sandbox = self.by_uid.get(uid)
        if sandbox is None:
            raise NotFoundError(f"sandbox {uid} does not exist on this node")
        return sandbox

    def publish(self, sandbox: NodeSandbox) -> None:
        """Notify watchers of a change that no caller requested."""
        record = sandbox.record
        self._publish(RuntimeEvent(uid=record.uid, state=record.state, reason=record.reason))

    # Create

    async def create(self, blueprint: Blueprint) -> Instance:
        """Create a sandbox from an image, or return the existing one."""
        self.builder.validate(blueprint)
        async with self.lock(blueprint.uid):
            if (there := self.by_uid.get(blueprint.uid)) is not None:
                return there.instance()
            sandbox = await self._create(blueprint)
            facts = fields(sandbox=blueprint.uid, image=blueprint.image)
            # The caller gets the reply before the log line is written.
            note = functools.partial(log.info, "sandbox created", extra=facts)
            asyncio.get_running_loop().call_soon(note)
            return sandbox.instance()

    async def _create(self, blueprint: Blueprint) -> NodeSandbox:
        image, layers = await self.context.image(
            blueprint.image, digest=blueprint.image_digest, team=blueprint.image_team
        )
        # The layers of `host` are init's, its own, and perhaps the machine's root.
        facts = image.facts if image is not None else host.layer_facts(Path(layers[1]))
        check_image(blueprint, facts)
        if image is not None:
            config = image.config
            blueprint = structs.replace(
                blueprint,
                image_digest=image.digest,
                env={**config.env, **blueprint.env},
                workdir=blueprint.workdir or config.workdir,
            )
        kind = WarmKind(blueprint.image, layers, blueprint.privileges)
        if blueprint.mounts:
            return await self._create_cold(blueprint, layers)
        sandbox = await self._claim_warm(kind, blueprint)
        sandbox = sandbox or await self._create_cold(blueprint, layers)
        self.warm_stock.record_demand(
            kind, blueprint
        )  # after success: a failing kind is not kept warm
        return sandbox

    async def _claim_warm(self, kind: WarmKind, blueprint: Blueprint) -> NodeSandbox | None:
        """Assign a warm sandbox to this blueprint; writing its record commits the assignment."""
        warm = await self.warm_stock.take_sandbox(kind)
        if warm is None:
            return None
        before = warm.sandbox
        record = structs.replace(
            before.record,
            uid=blueprint.uid,
            blueprint=blueprint,
            state=InstanceState.RUNNING,
            phase=RecordPhase.SETTLED,
            agent=blueprint.agent,
            egress=blueprint.egress,
            init=warm.init,
            envd=warm.waiting_envd.process if warm.waiting_envd else None,
            ip=warm.build.ip,
            incarnation=blueprint.incarnation,
            started_at=self.clock.now(),
        )
        sandbox = NodeSandbox(self.context, record, self.clock, self.spawn)
        with self.warm_stock.refill_paused():
            try:
                await self._apply_differences(warm, sandbox)
                self.context.directories.write(record)
                self.attach_init(sandbox, os.dup(warm.pidfd), waiting_envd=warm.waiting_envd)
            except BaseException as problem:
                log.warning(
                    "warm sandbox not usable",
                    extra=fields(sandbox=sandbox.uid, reason=str(problem)),
                )
                sandbox.detach_init(kill=True)
                self.context.directories.discard(self.context.directories.path_of(sandbox.uid))
                await asyncio.shield(self.warm_stock.discard(warm))
                if not isinstance(problem, (PaddockError, OSError)):
                    raise
                return None
        os.close(warm.pidfd)
        self.by_uid[sandbox.uid] = sandbox
        self.warm_stock.mark_claimed(warm)
        return sandbox

    async def _apply_differences(self, warm: WarmSandbox, sandbox: NodeSandbox) -> None:
        """Apply the limits, egress policy and host name in which the two sandboxes differ."""
        before, context = warm.sandbox, self.context
        if sandbox.limits != before.limits and context.cgroups.is_usable:
            set_group_limits(context, sandbox, warm.init.pid)
            context.views.limit(sandbox.cgroup, sandbox.limits)
        if sandbox.limits.disk_bytes != before.limits.disk_bytes:
            limit = sandbox.limits.disk_bytes or 0
            await context.run_in_thread(context.storage.limit, sandbox.resource_name, limit)
        if sandbox.record.egress != before.record.egress and context.fabric is not None:
            await context.fabric.set_policy(sandbox.resource_name, sandbox.record.egress)
        await self.builder.change_bandwidth(sandbox, warm.init.pid, before.limits)
        hostname = host_name(sandbox.record.blueprint)
        set_hostname(warm.init.pid, hostname)
        rewrite_identity(warm.build.upper, hostname=hostname, ip=warm.build.ip)

    async def _create_cold(self, blueprint: Blueprint, layers: tuple[str, ...]) -> NodeSandbox:
        record = SandboxRecord(
            uid=blueprint.uid,
            blueprint=blueprint,
            state=InstanceState.CREATING,
            phase=RecordPhase.CREATING,
            slot=-1,
            agent=blueprint.agent,
            egress=blueprint.egress,
            layers=layers,
            incarnation=blueprint.incarnation,
        )
        sandbox = NodeSandbox(self.context, record, self.clock, self.spawn)
        skeleton: Skeleton | None = None
        with self.warm_stock.refill_paused():
            try:
                skeleton, disk, network = await self._allocate(sandbox)
                self.context.directories.write(sandbox.record)
                await self._launch(sandbox, skeleton, disk, network)
            except BaseException as problem:
                log.warning(
                    "sandbox not created", extra=fields(sandbox=sandbox.uid, reason=str(problem))
                )
                if skeleton is not None:
                    skeleton.kill()
                await asyncio.shield(self.erase(sandbox))
                if isinstance(problem, OSError):
                    raise UnavailableError(
                        f"cannot create sandbox {sandbox.uid}: {problem}"
                    ) from problem
                raise
        skeleton.release()
        self.by_uid[blueprint.uid] = sandbox
        return sandbox

    async def _allocate(
        self, sandbox: NodeSandbox
    ) -> tuple[Skeleton, SandboxDisk, NetworkReservation]:
        """Get a skeleton, files and an address concurrently: none depends on the others."""
        skeleton, ground = await asyncio.gather(
            self.warm_stock.take_skeleton(),
            self.builder.prepare_files_and_network(sandbox),
            return_exceptions=True,
        )
        if isinstance(skeleton, BaseException):
            raise skeleton
        if isinstance(ground, BaseException):
            await self.builder.discard_skeleton(skeleton)
            raise ground
        disk, network = ground
        init = records.identify(skeleton.pid)
        sandbox.record = structs.replace(
            sandbox.record,
            slot=skeleton.slot,
            init=init,
            place=network.slot,
            oom_kills=0,
            boot_id=new_boot_id(),
        )
        return skeleton, disk, network

    async def relaunch(self, sandbox: NodeSandbox) -> None:
        """Start new processes on the existing files of a sandbox."""
        before = sandbox.record
        await self.context.ensure_layers(before.layers)
        skeleton: Skeleton | None = None
        with self.warm_stock.refill_paused():
            try:
                phase = (
                    before.phase if before.phase is RecordPhase.CREATING else RecordPhase.RESTORING
                )
                skeleton, disk, network = await self._allocate(sandbox)
                sandbox.save(phase=phase, envd=None)
                await self._launch(sandbox, skeleton, disk, network)
                sandbox.save(incarnation=before.incarnation + 1, reason=None)
            except BaseException:
                if skeleton is not None:
                    skeleton.kill()
                await asyncio.shield(self.kill_processes(sandbox))
                with contextlib.suppress(FileNotFoundError):
                    sandbox.save(state=before.state, phase=before.phase, init=None)
                raise
        skeleton.release()

    def resource_names_in_use(self) -> frozenset[str]:
        """Return the names of files and network reservations that a sweep must not remove."""
        return self.locked_uids() | self.warm_stock.resource_names

    async def _launch(
        self,
        sandbox: NodeSandbox,
        skeleton: Skeleton,
        disk: SandboxDisk,
        network: NetworkReservation,
    ) -> None:
        """Turn a skeleton into the sandbox's init and record the sandbox as running."""
        is_expected = _is_envd_expected(sandbox.record.agent)
        listen = sandbox.listen if is_expected else None
        made = await self.builder.assemble(
            sandbox, skeleton, disk, network, with_envd=is_expected, while_launching=listen
        )
        self.attach_init(sandbox, os.dup(skeleton.pidfd), waiting_envd=made.waiting_envd)
        sandbox.save(
            state=InstanceState.RUNNING,
            # The creation of a clone ends with its hooks.
            phase=RecordPhase.CREATING if sandbox.is_new_clone else RecordPhase.SETTLED,
            envd=made.waiting_envd.process if made.waiting_envd else None,
            ip=made.ip,
            started_at=self.clock.now(),
        )
        self._start_envd_if_expected(sandbox)

    def _start_envd_if_expected(self, sandbox: NodeSandbox) -> None:
        """Start envd before the first call where one is expected at once."""
        if sandbox.envd_listener is not None and _is_envd_expected(sandbox.record.agent):
            sandbox.envd_listener.start()

    def attach_init(
        self,
        sandbox: NodeSandbox,
        pidfd: int,
        *,
        envd: records.RecordedProcess | None = None,
        waiting_envd: WaitingEnvd | None = None,
    ) -> None:
        """Watch the init of a running sandbox and listen for callers of its envd."""
        loop = asyncio.get_running_loop()
        sandbox.attach_init(
            pidfd,
            on_exit=self._on_init_exit,
            add_reader=loop.add_reader,
            remove_reader=loop.remove_reader,
            envd=envd,
            waiting_envd=waiting_envd,
        )

    # Running sandboxes

    async def start(self, uid: str) -> Instance:
        """Run the start command, once, and wait until the ready command succeeds."""
        async with self.lock(uid):
            sandbox = self.get(uid)
            sandbox.expect(InstanceState.RUNNING, doing="started")
            blueprint = sandbox.record.blueprint
            if sandbox.envd_settings().outbound != OutboundFiles():
                await self._write_outbound(sandbox)  # before any command runs
            commands = await sandbox.commands()
            if blueprint.start_command and not sandbox.record.is_started:
                sandbox.save(is_started=True)
                await commands.start(
                    blueprint.start_command,
                    user=blueprint.user,
                    env=sandbox.command_env(),
                    cwd=blueprint.workdir,
                )
            self._start_envd_if_expected(sandbox)
        if blueprint.ready_command:
            await wait_until_ready(sandbox, blueprint)
        return sandbox.instance()

    async def configure(self, uid: str, agent: AgentConfig) -> None:
        """Save the configuration of envd, and send it to a running envd."""
        async with self.lock(uid):
            sandbox = self.get(uid)
            sandbox.save(agent=agent)
            if sandbox.envd_listener is not None:
                await sandbox.envd_listener.ready()
            runs = sandbox.record.state is InstanceState.RUNNING
            if sandbox.envd_listener is not None and sandbox.envd_listener.is_serving:
                if runs:
                    await self._send_settings(sandbox, sandbox.envd_listener)
                else:
                    await sandbox.envd_listener.end()
            elif runs:
                self._start_envd_if_expected(sandbox)

    async def _write_outbound(self, sandbox: NodeSandbox) -> None:
        """Wait until envd has written CA certificates and mirrors into the sandbox."""
        listener = sandbox.envd_listener
        if listener is None:
            return
        listener.start()
        await listener.ready()
        if listener.is_serving:
            await self._send_settings(sandbox, listener)

    @staticmethod
    async def _send_settings(sandbox: NodeSandbox, listener: EnvdListener) -> None:
        await envd_client.configure(
            listener.control, sandbox.envd_settings(), names=sandbox.record.agent
        )

    async def set_egress(self, uid: str, policy: EgressPolicy) -> None:
        """Replace the policy; it takes effect at once if the sandbox is up."""
        async with self.lock(uid):
            sandbox = self.get(uid)
            fabric = self.context.fabric
            if fabric is None:
                raise UnsupportedError(
                    f"cannot filter egress on this node: {self.context.network_unavailable_reason}"
                )
            fabric.check_policy(policy)
            sandbox.save(egress=policy)
            if sandbox.record.state in UP:
                await fabric.set_policy(sandbox.resource_name, policy)

    async def usage(self, uid: str) -> Usage:
        return await measure(self.get(uid), self.clock)

    def netns(self, uid: str) -> int:
        """Open the network namespace of a running sandbox; the caller closes the descriptor."""
        return self.get(uid).namespace("net")

    # Destroy

    async def destroy(self, uid: str) -> None:
        """Kill a sandbox and remove everything it has; an unknown uid is no error."""
        async with self.lock(uid):
            sandbox = self.by_uid.get(uid)
            if sandbox is None:
                return
            # Destroying must work on a full disk.
            sandbox.save_if_possible(phase=RecordPhase.DESTROYING)
            await self.erase(sandbox)
            self.by_uid.pop(uid, None)
            self.oom_monitor.forget(uid)
            log.info("sandbox destroyed", extra=fields(sandbox=uid))

    async def erase(self, sandbox: NodeSandbox) -> None:
        """Remove everything a sandbox has. Idempotent: an interrupted call can be repeated."""
        await self._release_resources(sandbox)
        await self.context.run_in_thread(self.context.storage.delete, sandbox.resource_name)
        directories = self.context.directories
        if directories.discard(directories.path_of(sandbox.uid)) is not None:
            self.spawn("empty the trash", self.context.run_in_thread(directories.empty_trash))
        # The record is removed before another sandbox can get the slot.
        self.context.slots.release(sandbox.record.slot)
        sandbox.record = structs.replace(sandbox.record, slot=-1)

    async def kill_processes(self, sandbox: NodeSandbox, *, keep_address: bool = False) -> None:
        """Kill all processes, detach the network and release the slot; files are kept."""
        await self._release_resources(sandbox, keep_address=keep_address)
        slot = sandbox.record.slot
        if slot >= 0:
            # The record drops the slot before another sandbox can get it.
            sandbox.save(slot=-1, init=None, envd=None)
            self.context.slots.release(slot)

    async def _release_resources(self, sandbox: NodeSandbox, *, keep_address: bool = False) -> None:
        pidfd = os.dup(sandbox.pidfd) if sandbox.pidfd is not None else None
        if pidfd is None:
            pidfd = records.open_process(sandbox.record.init)
        sandbox.detach_init(kill=True)
        if self.context.cgroups.is_usable:
            self.context.cgroups.kill(sandbox.cgroup)
        if pidfd is not None:
            try:
                await kill_and_wait(pidfd)
            finally:
                os.close(pidfd)
        if self.context.fabric is not None:
            await self.context.fabric.detach(sandbox.resource_name, keep_address=keep_address)
        unlock_workdir(self.context, sandbox.resource_name)
        if sandbox.record.slot >= 0:
            await remove_cgroups(self.context, sandbox.cgroup)

    def _on_init_exit(self, sandbox: NodeSandbox) -> None:
        """Handle an init that exited unexpectedly."""
        sandbox.detach_init(kill=True)
        self.spawn(f"clean up {sandbox.uid}", self._handle_init_exit(sandbox))

    async def _handle_init_exit(self, sandbox: NodeSandbox) -> None:
        async with self.lock(sandbox.uid):
            if self.by_uid.get(sandbox.uid) is not sandbox or sandbox.pidfd is not None:
                return
            if sandbox.record.state not in UP:
                return
            cause = sandbox.kill_reason or self.oom_monitor.exit_cause(sandbox)
            reason = f"its init was killed: {cause}" if cause else "its init was killed"
            sandbox.save_if_possible(state=InstanceState.FAILED, reason=reason, ip=None)
            log.warning("sandbox failed", extra=fields(sandbox=sandbox.uid, reason=reason))
            self.publish(sandbox)
            with contextlib.suppress(OSError):
                sandbox.log_file.write("sandbox exited unexpectedly", level="error", reason=reason)
            await self.kill_processes(sandbox)


def _is_envd_expected(agent: AgentConfig) -> bool:
    return bool(agent.sandbox_id) or agent.is_reserved
