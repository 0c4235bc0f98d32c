"""One sandbox as the node holds it: its record, its first process, its envd, its log.

Steps that several operations share are here (settle the record, open and close what hangs on a
running init); the operations themselves are in `sandboxes` and `pausing`.
"""

import logging
import os
import signal
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

import msgspec
from msgspec import structs

from paddock.envd.config import Config, EnvdSettings
from paddock.envd.process.init_client import take_channel
from paddock.kit.clock import Clock
from paddock.kit.errors import ConflictError
from paddock.kit.logs import fields
from paddock.runtime.local.envd.envd_listener import Door
from paddock.runtime.local.envd.zygote import Waiter
from paddock.runtime.local.node import records
from paddock.runtime.local.node.node_context import Machine
from paddock.runtime.local.node.records import Phase, Record
from paddock.runtime.local.node.slots import group_name
from paddock.runtime.local.sandbox.commands import Commands
from paddock.runtime.local.sandbox.log_file import Journal
from paddock.runtime.local.sandbox.socket_dirs import DOOR
from paddock.runtime.port import Address, AgentConfig, Instance, InstanceState, Limits
from paddock.wire.seqpacket import close_all

log = logging.getLogger(__name__)

Spawn = Callable[[str, Coroutine[Any, Any, None]], None]

_NAMESPACES = {"userns": "user", "mntns": "mnt", "netns": "net"}


class Sandbox:
    """A sandbox on this node."""

    def __init__(self, machine: Machine, record: Record, clock: Clock, spawn: Spawn) -> None:
        self.machine = machine
        self.record = record
        self.journal = Journal(machine.directories.of(record.uid), clock)
        self.door: Door | None = None
        self.pidfd: int | None = None
        self.cpu_sample: tuple[float, float] | None = None
        self._commands: Commands | None = None
        self._spawn = spawn
        self._loop_reader: Callable[[], None] | None = None

    @property
    def uid(self) -> str:
        """Its uid."""
        return self.record.uid

    @property
    def home(self) -> str:
        """What its files and its place in the network are called."""
        return self.record.home or self.record.uid

    @property
    def group(self) -> str:
        """The name of its groups."""
        return group_name(self.record.slot)

    @property
    def limits(self) -> Limits:
        """Its limits, the node's defaults filled in."""
        asked, default = self.record.blueprint.limits, self.machine.settings.default_limits
        return Limits(
            cpu_millis=default.cpu_millis if asked.cpu_millis is None else asked.cpu_millis,
            memory_bytes=default.memory_bytes if asked.memory_bytes is None else asked.memory_bytes,
            disk_bytes=default.disk_bytes if asked.disk_bytes is None else asked.disk_bytes,
            pids=default.pids if asked.pids is None else asked.pids,
        )

    def instance(self) -> Instance:
        """Describe it."""
        record = self.record
        is_up = record.state in (InstanceState.RUNNING, InstanceState.FROZEN)
        directory = self.machine.directories.doors_of(record.uid)
        address = Address(
            ip=record.ip if is_up else None,
            envd=f"unix:{directory / DOOR}" if is_up else None,
            node=f"unix:{self.machine.settings.socket_path.absolute()}",
        )
        return Instance(
            uid=record.uid,
            state=record.state,
            address=address,
            reason=record.reason,
            started_at=record.started_at,
            image=record.blueprint.image,
            node_name=self.machine.settings.node_name,
            incarnation=record.incarnation,
        )

    def save(self, **changes: Any) -> None:
        """Change the record, on disk first."""
        record = structs.replace(self.record, **changes)
        self.machine.directories.write(record)
        self.record = record

    def save_if_possible(self, **changes: Any) -> None:
        """Change the record, on disk too if that has room: for what is so, written down or not."""
        try:
            self.save(**changes)
        except OSError as problem:
            log.warning("record not written", extra=fields(sandbox=self.uid, reason=problem))
            self.record = structs.replace(self.record, **changes)

    def expect(self, *states: InstanceState, doing: str) -> None:
        """Refuse what the state forbids."""
        if self.record.state not in states:
            reason = f" ({self.record.reason})" if self.record.reason else ""
            raise ConflictError(
                f"sandbox {self.uid} is {self.record.state}{reason} and cannot be {doing}"
            )

    # While it runs

    def come_up(
        self,
        pidfd: int,
        *,
        on_death: Callable[["Sandbox"], None],
        add_reader: Callable[..., object],
        remove_reader: Callable[[int], object],
        envd: records.Process | None = None,
        waiter: Waiter | None = None,
    ) -> None:
        """Hold a running init: hear of its end, and let callers reach envd."""
        self.pidfd = pidfd
        add_reader(pidfd, on_death, self)
        self._loop_reader = lambda: (remove_reader(pidfd), None)[1]
        self._door().open(envd, waiter)

    def hang_door(self) -> None:
        """Listen for callers of a sandbox that is about to come up."""
        self._door().listen()

    def _door(self) -> Door:
        if self.door is None:
            self.door = Door(
                self.machine.zygote,
                self.machine.directories.doors_of(self.uid) / DOOR,
                self.machine.directories.sockets_of(self.uid),
                make=self._envd_parts,
                on_change=self._envd_changed,
                spawn=self._spawn,
            )
        return self.door

    def go_down(self, *, kill: bool) -> None:
        """Let go of a running init; with `kill` its envd ends, too."""
        if self._loop_reader is not None:
            self._loop_reader()
            self._loop_reader = None
        if self._commands is not None:
            self._commands.close()
            self._commands = None
        if self.door is not None:
            self.door.close(kill=kill)
            self.door = None
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    async def commands(self) -> Commands:
        """Have a way to run the node's own commands."""
        if self.pidfd is None or self.record.init is None:
            raise ConflictError(f"sandbox {self.uid} does not run")
        if self._commands is None:
            self._commands = Commands(self.pidfd, self.record.init.pid, self.journal, self._spawn)
            await self._commands.attach()
        return self._commands

    def namespace(self, name: str) -> int:
        """Open a namespace of the running sandbox: `net`, `mnt`, `user`, `uts` …"""
        if self.pidfd is None or self.record.init is None:
            raise ConflictError(f"sandbox {self.uid} does not run")
        try:
            fd = os.open(f"/proc/{self.record.init.pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as problem:
            raise ConflictError(f"sandbox {self.uid} just ended") from problem
        try:
            # Still alive now: what was opened is no namesake's.
            signal.pidfd_send_signal(self.pidfd, 0)
        except ProcessLookupError as problem:
            os.close(fd)
            raise ConflictError(f"sandbox {self.uid} just ended") from problem
        return fd

    def envd_settings(self) -> EnvdSettings:
        """What envd is told by `/init`."""
        return envd_settings(self.record.agent, self.record)

    def joined_by(self, pid: int, pidfd: int, parts: Collection[str]) -> dict[str, int]:
        """Open parts of the sandbox (see `envds.JOINED`) that has this first process."""
        fds: dict[str, int] = {}
        try:
            for key, name in _NAMESPACES.items():
                if key in parts:
                    fds[key] = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
            groups = self.machine.cgroups.directories(self.group) if "groups" in parts else {}
            for key, path in groups.items():
                fds[key] = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            meter = self.machine.storage.open_meter(self.home) if "groups" in parts else None
            if meter is not None:
                fds["disk"] = meter
            if "init" in parts:
                fds["init"] = take_channel(pidfd).detach()
        except BaseException:
            close_all(list(fds.values()))
            raise
        return fds

    def _envd_parts(self, lacks: Collection[str]) -> tuple[Mapping[str, object], Mapping[str, int]]:
        """Give envd's config, and what it joins by."""
        if self.pidfd is None or self.record.init is None:
            raise ConflictError(f"sandbox {self.uid} does not run")
        limits = self.limits
        agent = self.record.agent
        config = Config(
            sandbox_id=agent.sandbox_id or "",
            template_id=agent.template_id or "",
            settings=self.envd_settings(),
            cpu_count=limits.cpu_millis / 1000 if limits.cpu_millis else None,
            memory_total_bytes=limits.memory_bytes or None,
            disk_total_bytes=limits.disk_bytes or None,
            disk_inherited_bytes=self.machine.storage.inherited_bytes(self.home),
            idle_exit_seconds=self.machine.settings.envd_idle_seconds,
            is_reserved=agent.is_reserved,
            has_one_id=self.machine.is_rootless,
        )
        try:
            fds = self.joined_by(self.record.init.pid, self.pidfd, lacks)
        except OSError as problem:
            raise ConflictError(f"sandbox {self.uid} just ended") from problem
        try:
            # Still alive now: what was opened is no namesake's.
            signal.pidfd_send_signal(self.pidfd, 0)
        except ProcessLookupError as problem:
            close_all(list(fds.values()))
            raise ConflictError(f"sandbox {self.uid} just ended") from problem
        return msgspec.to_builtins(config), fds

    def _envd_changed(self, process: records.Process | None) -> None:
        if self.record.phase is not Phase.DESTROYING and self.record.envd != process:
            self.save(envd=process)


def envd_settings(agent: AgentConfig, record: Record) -> EnvdSettings:
    """Merge what the template and the claim say; the claim wins."""
    return EnvdSettings(
        access_token=agent.access_token,
        env_vars={**record.blueprint.env, **agent.env},
        default_user=agent.default_user,
        default_workdir=agent.default_workdir or record.blueprint.workdir,
    )
