"""What this node can do, and for everything else why not and what to do about it."""

import asyncio

from paddock.kit.errors import UnsupportedError
from paddock.runtime.local.checkpoint import Checkpointer, find_criu
from paddock.runtime.local.node.node_context import Machine
from paddock.runtime.port import Capabilities


class Abilities:
    """Found out when first asked, then known."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._checkpointer: Checkpointer | None = None
        self._no_checkpoint_because = ""
        self._is_probed = False
        self._probing = asyncio.Lock()

    async def checkpointer(self) -> Checkpointer:
        """Give what stores memory, or say why there is none."""
        await self._probe()
        if self._checkpointer is None:
            raise UnsupportedError(
                f"memory cannot be stored here: {self._no_checkpoint_because}",
                hint="`paddock doctor` says how to install what is missing",
            )
        return self._checkpointer

    async def capabilities(self) -> Capabilities:
        """Say what can be done."""
        await self._probe()
        machine = self._machine
        groups, layout = machine.cgroups.is_usable, machine.cgroups.layout
        disk = machine.storage.abilities
        no_group = (
            "a node without root has no control groups of its own"
            if machine.is_rootless
            else "no cgroup v2 hierarchy that can be written to; `mount -t cgroup2 none "
            "/sys/fs/cgroup/unified` gives one"
        )
        limits = {f"can_limit_{c}": groups and layout.has(c) for c in ("cpu", "memory", "pids")}
        reasons = {"can_update_image": "a sandbox of another image is made anew as quickly"}
        reasons |= {
            name: no_group if not groups else f"the kernel offers no {name[10:]} controller here"
            for name, there in limits.items()
            if not there
        }
        if not groups:
            reasons["can_freeze"] = no_group
        if self._checkpointer is None:
            reasons["can_checkpoint"] = self._no_checkpoint_because
        if not disk.can_limit_disk:
            reasons["can_limit_disk"] = disk.reason
        if machine.fabric is None:
            reasons["can_filter_egress"] = machine.no_network_because
        return Capabilities(
            can_freeze=groups,
            can_checkpoint=self._checkpointer is not None and groups,
            can_snapshot_files=True,
            can_stop=True,
            can_limit_cpu=limits["can_limit_cpu"],
            can_limit_memory=limits["can_limit_memory"],
            can_limit_pids=limits["can_limit_pids"],
            can_limit_disk=disk.can_limit_disk,
            can_filter_egress=machine.fabric is not None,
            reasons=reasons,
        )

    def close(self) -> None:
        """Let go of what storing memory needed."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    async def _probe(self) -> None:
        async with self._probing:
            if self._is_probed:
                return
            if self._machine.is_rootless:
                self._no_checkpoint_because = "storing memory needs root"
            else:
                program, reason = await asyncio.to_thread(find_criu)
                if program is None:
                    self._no_checkpoint_because = reason
                else:
                    self._checkpointer = Checkpointer(program)
            self._is_probed = True
