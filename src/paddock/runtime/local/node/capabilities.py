"""The capabilities of this node, and the reason for each one it lacks."""

import asyncio

from paddock.kit.errors import UnsupportedError
from paddock.runtime.local.checkpoint import Checkpointer, find_criu
from paddock.runtime.local.node.node_context import NodeContext
from paddock.runtime.local.node.rate_support import CACHED_WRITES
from paddock.runtime.port import Capabilities


class NodeCapabilities:
    """Probes the machine at first use and caches the result."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._checkpointer: Checkpointer | None = None
        self._checkpoint_unavailable_reason = ""
        self._is_probed = False
        self._probing = asyncio.Lock()

    async def checkpointer(self) -> Checkpointer:
        """Return the checkpointer, or raise `UnsupportedError` with the reason."""
        await self._probe()
        if self._checkpointer is None:
            raise UnsupportedError(
                f"cannot store memory on this node: {self._checkpoint_unavailable_reason}",
                hint="run `paddock doctor` to see what to install",
            )
        return self._checkpointer

    async def report(self) -> Capabilities:
        await self._probe()
        context = self._context
        groups, layout = context.cgroups.is_usable, context.cgroups.layout
        disk = context.storage.capabilities
        no_group = (
            "a node without root has no cgroups of its own"
            if context.is_rootless
            else "there is no writable cgroup v2 hierarchy; `mount -t cgroup2 none "
            "/sys/fs/cgroup/unified` mounts one"
        )
        limits = {f"can_limit_{c}": groups and layout.has(c) for c in ("cpu", "memory", "pids")}
        reasons = {
            "can_update_image": "not needed: creating a sandbox of the other image is as quick"
        }
        reasons |= {
            name: no_group if not groups else f"the kernel offers no {name[10:]} controller"
            for name, there in limits.items()
            if not there
        }
        if not groups:
            reasons["can_freeze"] = no_group
        if self._checkpointer is None:
            reasons["can_checkpoint"] = self._checkpoint_unavailable_reason
        if not disk.can_limit_disk:
            reasons["can_limit_disk"] = disk.reason
        if context.fabric is None:
            reasons["can_filter_egress"] = context.network_unavailable_reason
        fabric = context.fabric
        no_rates = fabric.rates_unavailable_reason if fabric else context.network_unavailable_reason
        if no_rates:
            reasons["can_limit_bandwidth"] = no_rates
        if no_io := context.cgroups.io_unavailable_reason:
            reasons["can_limit_io"] = reasons["can_limit_cached_writes"] = no_io
        elif not context.cgroups.limits_cached_writes:
            reasons["can_limit_cached_writes"] = CACHED_WRITES
        return Capabilities(
            can_freeze=groups,
            can_checkpoint=self._checkpointer is not None and groups,
            can_snapshot_files=True,
            can_stop=True,
            can_limit_cpu=limits["can_limit_cpu"],
            can_limit_memory=limits["can_limit_memory"],
            can_limit_pids=limits["can_limit_pids"],
            can_limit_disk=disk.can_limit_disk,
            can_filter_egress=context.fabric is not None,
            can_limit_bandwidth="can_limit_bandwidth" not in reasons,
            can_limit_io="can_limit_io" not in reasons,
            can_limit_cached_writes="can_limit_cached_writes" not in reasons,
            can_pull_images=True,
            reasons=reasons,
        )

    def close(self) -> None:
        """Close the checkpointer."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    async def _probe(self) -> None:
        async with self._probing:
            if self._is_probed:
                return
            if self._context.is_rootless:
                self._checkpoint_unavailable_reason = "it requires root"
            else:
                program, reason = await asyncio.to_thread(find_criu)
                if program is None:
                    self._checkpoint_unavailable_reason = reason
                else:
                    self._checkpointer = Checkpointer(program)
            self._is_probed = True
