"""Resource usage of one sandbox, from its cgroups and its storage."""

import os

from paddock.kit.clock import Clock
from paddock.runtime.local.sandbox.sandbox import NodeSandbox
from paddock.runtime.port import InstanceState, Usage


async def measure(sandbox: NodeSandbox, clock: Clock) -> Usage:
    """Measure a sandbox; CPU percent covers the time since the last measurement."""
    context, limits = sandbox.context, sandbox.limits
    is_up = sandbox.record.state in (InstanceState.RUNNING, InstanceState.FROZEN)
    used = context.cgroups.usage(sandbox.cgroup) if is_up else None
    disk = await context.run_in_thread(context.storage.usage_bytes, sandbox.resource_name)
    count = (limits.cpu_millis or 1000 * (os.cpu_count() or 1)) / 1000
    now, cpu = clock.monotonic(), used.cpu_seconds if used else 0.0
    before = sandbox.cpu_sample or (now, cpu)
    percent = 100 * (cpu - before[1]) / (now - before[0]) if now > before[0] else 0.0
    sandbox.cpu_sample = (now, cpu)
    total = limits.memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Usage(
        at=clock.now(),
        cpu_count=count,
        cpu_used_percent=max(0.0, round(percent, 2)),
        cpu_seconds=cpu,
        memory_used_bytes=used.memory_bytes if used else 0,
        memory_total_bytes=total,
        memory_cache_bytes=used.cache_bytes if used else 0,
        disk_used_bytes=disk,
        disk_total_bytes=limits.disk_bytes or context.storage.space().total_bytes,
    )
