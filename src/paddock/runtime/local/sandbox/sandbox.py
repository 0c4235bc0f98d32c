"""One sandbox in the node's memory: its record, init process, envd listener and log.

The operations on sandboxes are in `lifecycle.py`, `freeze.py` and `hibernation.py`.
"""

import logging
import os
import signal
import socket
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

import msgspec
from msgspec import structs

from paddock.envd.config import CA_VARIABLES, Config, EnvdSettings
from paddock.envd.process.init_client import take_channel
from paddock.envd.process.init_protocol import ChannelClosedError
from paddock.kit.clock import Clock
from paddock.kit.errors import ConflictError, UnavailableError
from paddock.kit.logs import fields
from paddock.runtime import outbound, rates
from paddock.runtime.local.envd import inside_socket
from paddock.runtime.local.envd.envd_listener import EnvdListener
from paddock.runtime.local.envd.zygote import WaitingEnvd
from paddock.runtime.local.net.settings import HOST_NAME
from paddock.runtime.local.node import records
from paddock.runtime.local.node.node_context import NodeContext
from paddock.runtime.local.node.rate_support import limits_note
from paddock.runtime.local.node.records import RecordPhase, SandboxRecord
from paddock.runtime.local.node.slots import cgroup_name
from paddock.runtime.local.sandbox.commands import Commands
from paddock.runtime.local.sandbox.log_file import LogFile
from paddock.runtime.local.sandbox.socket_dirs import ENVD_SOCKET
from paddock.runtime.port import (
    Address,
    AgentConfig,
    Instance,
    InstanceState,
    Limits,
    OutboundConfig,
)
from paddock.wire.seqpacket import close_all

log = logging.getLogger(__name__)

Spawn = Callable[[str, Coroutine[Any, Any, None]], None]

_NAMESPACES = {"userns": "user", "mntns": "mnt", "netns": "net"}


class NodeSandbox:
    """A sandbox of this node, running or not."""

    def __init__(
        self, context: NodeContext, record: SandboxRecord, clock: Clock, spawn: Spawn
    ) -> None:
        self.context = context
        self.record = record
        self.log_file = LogFile(context.directories.path_of(record.uid), clock)
        self.envd_listener: EnvdListener | None = None
        self.pidfd: int | None = None
        self.cpu_sample: tuple[float, float] | None = None
        self.kill_reason: str | None = None
        """Why the node has killed it, until its end is recorded."""
        self.generation = ""
        """The generation that was written while it was created; empty after a recovery."""
        self._measured_bytes: int | None = None
        self._limits: tuple[Limits, Limits] | None = None
        self._commands: Commands | None = None
        self._spawn = spawn
        self._stop_watching_init: Callable[[], None] | None = None

    @property
    def uid(self) -> str:
        return self.record.uid

    @property
    def resource_name(self) -> str:
        """The name of its files and of its network reservation."""
        return self.record.resource_name or self.record.uid

    @property
    def cgroup(self) -> str:
        """The name of its cgroups."""
        return cgroup_name(self.record.slot)

    @property
    def is_new_clone(self) -> bool:
        """Whether it is being created from a checkpoint."""
        record = self.record
        return record.phase is RecordPhase.CREATING and record.blueprint.checkpoint_id is not None

    @property
    def limits(self) -> Limits:
        """Its limits, with the node's defaults where none is set."""
        requested = self.record.blueprint.limits
        if self._limits is None or self._limits[0] is not requested:
            self._limits = (requested, _complete(requested, self.context.settings.default_limits))
        return self._limits[1]

    def instance(self) -> Instance:
        """Return its current state for callers of the runtime."""
        record = self.record
        is_up = record.state in (InstanceState.RUNNING, InstanceState.FROZEN)
        directory = self.context.directories.socket_dir_of(record.uid)
        address = Address(
            ip=record.ip if is_up else None,
            envd=f"unix:{directory / ENVD_SOCKET}" if is_up else None,
            node=f"unix:{self.context.settings.socket_path.absolute()}",
        )
        return Instance(
            uid=record.uid,
            state=record.state,
            address=address,
            reason=record.reason,
            started_at=record.started_at,
            image=record.blueprint.image,
            image_digest=record.blueprint.image_digest,
            node_name=self.context.settings.node_name,
            incarnation=record.incarnation,
            stored_bytes=self._stored_bytes(),
            limits_note=limits_note(self.context, record.blueprint.limits),
        )

    def _stored_bytes(self) -> int:
        """Return the size of its stored memory; it is measured once per hibernation."""
        if self.record.state is not InstanceState.HIBERNATED:
            return 0
        if self._measured_bytes is None:
            self._measured_bytes = self.context.storage.stored_memory_bytes(self.resource_name)
        return self._measured_bytes

    def save(self, **changes: Any) -> None:
        """Change the record: first on disk, then in memory."""
        record = structs.replace(self.record, **changes)
        self.context.directories.write(record)
        self.record = record
        self._measured_bytes = None

    def save_if_possible(self, **changes: Any) -> None:
        """Change the record in memory even if writing it fails, for example on a full disk.

        For changes that have already happened.
        """
        try:
            self.save(**changes)
        except OSError as problem:
            log.warning("record not written", extra=fields(sandbox=self.uid, reason=problem))
            self.record = structs.replace(self.record, **changes)

    def expect(self, *states: InstanceState, doing: str) -> None:
        """Raise `ConflictError` unless the sandbox is in one of these states."""
        if self.record.state not in states:
            reason = f" ({self.record.reason})" if self.record.reason else ""
            raise ConflictError(
                f"sandbox {self.uid} is {self.record.state}{reason} and cannot be {doing}"
            )

    # Running

    def attach_init(
        self,
        pidfd: int,
        *,
        on_exit: Callable[["NodeSandbox"], None],
        add_reader: Callable[..., object],
        remove_reader: Callable[[int], object],
        envd: records.RecordedProcess | None = None,
        waiting_envd: WaitingEnvd | None = None,
    ) -> None:
        """Watch the exit of a running init, and open the listener of envd."""
        self.pidfd = pidfd
        add_reader(pidfd, on_exit, self)
        self._stop_watching_init = lambda: (remove_reader(pidfd), None)[1]
        self._ensure_envd_listener().open(envd, waiting_envd)

    def listen(self) -> None:
        """Listen for callers before init is up; connections queue until then."""
        self._ensure_envd_listener().listen()

    def _ensure_envd_listener(self) -> EnvdListener:
        if self.envd_listener is None:
            self.envd_listener = EnvdListener(
                self.context.zygote,
                self.context.directories.socket_dir_of(self.uid) / ENVD_SOCKET,
                self.context.directories.take_sockets(self.uid),
                open_parts=self._open_envd_parts,
                on_change=self._save_envd,
                spawn=self._spawn,
                open_inside=self._open_inside,
            )
        return self.envd_listener

    def _open_inside(self) -> socket.socket | None:
        """Return the socket on which code inside reaches envd; `None` if it cannot be opened."""
        try:
            netns = self.namespace("net")
        except ConflictError:
            return None
        try:
            return inside_socket.listen(netns)
        finally:
            os.close(netns)

    def detach_init(self, *, kill: bool) -> None:
        """Stop watching init and close the listener; with `kill`, also kill envd."""
        if self._stop_watching_init is not None:
            self._stop_watching_init()
            self._stop_watching_init = None
        if self._commands is not None:
            self._commands.close()
            self._commands = None
        if self.envd_listener is not None:
            self.envd_listener.close(kill=kill)
            self.envd_listener = None
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    async def commands(self) -> Commands:
        """Return the node's channel for commands, opening it if needed."""
        if self.pidfd is None or self.record.init is None:
            raise ConflictError(f"sandbox {self.uid} is not running")
        if self._commands is not None:
            return self._commands
        try:
            commands = Commands(self.pidfd, self.record.init.pid, self.log_file, self._spawn)
            self._commands = commands
            await commands.attach()
        except (OSError, ChannelClosedError) as problem:
            raise UnavailableError(f"sandbox {self.uid} has just exited") from problem
        return commands

    def namespace(self, name: str) -> int:
        """Open a namespace of the running sandbox: `net`, `mnt`, `user`, `uts` …"""
        if self.pidfd is None or self.record.init is None:
            raise ConflictError(f"sandbox {self.uid} is not running")
        try:
            fd = os.open(f"/proc/{self.record.init.pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as problem:
            raise ConflictError(f"sandbox {self.uid} has just exited") from problem
        try:
            # Init is still alive, so its pid was not reused before the open.
            signal.pidfd_send_signal(self.pidfd, 0)
        except ProcessLookupError as problem:
            os.close(fd)
            raise ConflictError(f"sandbox {self.uid} has just exited") from problem
        return fd

    def envd_settings(self) -> EnvdSettings:
        """Return the settings that envd gets by `/init`."""
        settings = self.context.settings
        merged = outbound.merge(settings.outbound, self.record.agent.outbound)
        direct = (HOST_NAME,) if settings.host_ports else ()
        return envd_settings(self.record.agent, self.record, merged, direct)

    def command_env(self) -> Mapping[str, str]:
        """Return the variables of commands that the node itself runs in the sandbox."""
        settings = self.envd_settings()
        if not settings.outbound.ca_certificates:
            return settings.env_vars
        return {**CA_VARIABLES, **settings.env_vars}

    def open_parts(self, pid: int, pidfd: int, parts: Collection[str]) -> dict[str, int]:
        """Open parts of the sandbox (see `envd_listener.ENVD_PARTS`) whose init is `pid`."""
        fds: dict[str, int] = {}
        try:
            for key, name in _NAMESPACES.items():
                if key in parts:
                    fds[key] = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
            groups = self.context.cgroups.directories(self.cgroup) if "groups" in parts else {}
            for key, path in groups.items():
                fds[key] = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            counter = (
                self.context.storage.open_usage_counter(self.resource_name)
                if "groups" in parts
                else None
            )
            if counter is not None:
                fds["disk"] = counter
            if "init" in parts:
                fds["init"] = take_channel(pidfd).detach()
        except BaseException:
            close_all(list(fds.values()))
            raise
        return fds

    def _open_envd_parts(
        self, missing: Collection[str]
    ) -> tuple[Mapping[str, object], Mapping[str, int]]:
        """Return envd's config and descriptors of the parts to join."""
        if self.pidfd is None or self.record.init is None:
            raise ConflictError(f"sandbox {self.uid} is not running")
        limits = self.limits
        agent = self.record.agent
        config = Config(
            sandbox_id=agent.sandbox_id or "",
            template_id=agent.template_id or "",
            settings=self.envd_settings(),
            cpu_count=limits.cpu_millis / 1000 if limits.cpu_millis else None,
            memory_total_bytes=limits.memory_bytes or None,
            disk_total_bytes=limits.disk_bytes or None,
            disk_inherited_bytes=self.context.storage.inherited_bytes(self.resource_name),
            idle_exit_seconds=self.context.settings.envd_idle_seconds,
            is_reserved=agent.is_reserved,
            has_one_id=self.context.is_rootless,
            owns_root=True,
        )
        try:
            fds = self.open_parts(self.record.init.pid, self.pidfd, missing)
        except OSError as problem:
            raise ConflictError(f"sandbox {self.uid} has just exited") from problem
        try:
            # Init is still alive, so its pid was not reused before the open.
            signal.pidfd_send_signal(self.pidfd, 0)
        except ProcessLookupError as problem:
            close_all(list(fds.values()))
            raise ConflictError(f"sandbox {self.uid} has just exited") from problem
        return msgspec.to_builtins(config), fds

    def _save_envd(self, process: records.RecordedProcess | None) -> None:
        if self.record.phase is not RecordPhase.DESTROYING and self.record.envd != process:
            self.save(envd=process)


def _complete(requested: Limits, default: Limits) -> Limits:
    """Return limits with the defaults of a node, whose rates are also a ceiling."""
    found = Limits(
        cpu_millis=default.cpu_millis if requested.cpu_millis is None else requested.cpu_millis,
        memory_bytes=default.memory_bytes
        if requested.memory_bytes is None
        else requested.memory_bytes,
        disk_bytes=default.disk_bytes if requested.disk_bytes is None else requested.disk_bytes,
        pids=default.pids if requested.pids is None else requested.pids,
    )
    return rates.capped(rates.with_rates(found, requested), default)


def envd_settings(
    agent: AgentConfig, record: SandboxRecord, merged: OutboundConfig, direct_hosts: tuple[str, ...]
) -> EnvdSettings:
    """Merge the settings of the image, the operator, the template and the claim.

    The later ones take precedence.
    """
    return EnvdSettings(
        access_token=agent.access_token,
        env_vars={
            **record.blueprint.env,
            **outbound.variables(merged, direct_hosts),
            **agent.env,
        },
        default_user=agent.default_user,
        default_workdir=agent.default_workdir or record.blueprint.workdir,
        outbound=outbound.files(merged),
    )
