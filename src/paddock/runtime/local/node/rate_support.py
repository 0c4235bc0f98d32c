"""Which rates of network and disk this node enforces. A sandbox never silently exceeds those that
its template or itself requests: it is refused, or its status has a note."""

from paddock.kit.errors import UnsupportedError
from paddock.runtime import rates
from paddock.runtime.local.node.node_context import NodeContext
from paddock.runtime.port import Limits

CACHED_WRITES = "cgroup v1 limits only writes of direct I/O, not those through the page cache"
_WRITES = ("io_write_bandwidth", "io_write_iops")


def check_rates(context: NodeContext, requested: Limits) -> None:
    """Raise `UnsupportedError` if a rate is requested that this node cannot enforce.

    The defaults of the node are no request. Without a network there is no traffic to limit.
    """
    fabric = context.fabric
    for names, what, reason in (
        (rates.NETWORK, "bandwidth", fabric.rates_unavailable_reason if fabric else ""),
        (rates.DISK, "disk I/O", context.cgroups.io_unavailable_reason),
    ):
        if reason and _is_requested(requested, names):
            raise UnsupportedError(
                f"this node cannot limit {what}: {reason}",
                hint="remove the limit from the template, or run `paddock doctor` to see what is "
                "missing",
            )


def limits_note(context: NodeContext, requested: Limits) -> str:
    """Return which requested rates are enforced in part, and why; empty if none."""
    if context.cgroups.limits_cached_writes or not _is_requested(requested, _WRITES):
        return ""
    return CACHED_WRITES


def _is_requested(limits: Limits, names: tuple[str, ...]) -> bool:
    return any(getattr(limits, name) for name in names)
