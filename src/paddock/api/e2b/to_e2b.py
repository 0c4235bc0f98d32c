"""Conversion of resources to E2B's response bodies. Pure."""

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET, UnsetType

from paddock.api.e2b.schemas import (
    LifecycleBody,
    ListedSandbox,
    MetricBody,
    NetworkConfig,
    NetworkPartView,
    NetworkView,
    SandboxBody,
    SandboxDetail,
    SnapshotInfo,
)
from paddock.cache.states import is_running_or_pausing
from paddock.claims.quota.ledger import resources_of
from paddock.manager.sandboxes.networks import NetworkInEffect, NetworkPart
from paddock.manager.sandboxes.requests import LogEntry, UsageSample
from paddock.resources import quantity
from paddock.resources.default_limits import (
    DEFAULT_CPU_MILLIS,
    DEFAULT_DISK_BYTES,
    DEFAULT_MEMORY_BYTES,
)
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.sandbox import ClaimIdentity, Phase, Sandbox
from paddock.resources.kinds.template import (
    NetworkPolicy,
    PauseStrategy,
    Resources,
)
from paddock.resources.tokens import TokenSeed
from paddock.resources.transitions import deadlines

ENVD_VERSION = "0.6.13"
CLIENT_ID = "6532622b"
"""Required by clients; without meaning."""
NEVER = datetime(1, 1, 1, tzinfo=UTC)
"""The end time of a sandbox without a timeout."""
LEVELS = ("debug", "info", "warn", "error")
"""Log levels, in rising order."""


class E2bRenderer:
    """Converts sandboxes to bodies, with the domain and tokens of this installation."""

    def __init__(self, seed: TokenSeed, domain: str | None) -> None:
        self._seed = seed
        self._domain = domain

    def _token(self, claim: ClaimIdentity) -> str | UnsetType:
        known = claim.access_token_hash
        return self._seed.access_token(claim.sandbox_id, known) if known else UNSET

    def created(self, sandbox: Sandbox) -> SandboxBody:
        """Return the body for create, connect, resume and fork; it includes the tokens."""
        claim = _claim(sandbox)
        known = claim.traffic_token_hash
        traffic = self._seed.traffic_token(claim.sandbox_id, known) if known else None
        return SandboxBody(
            template_id=claim.template_id,
            sandbox_id=claim.sandbox_id,
            client_id=CLIENT_ID,
            envd_version=ENVD_VERSION,
            envd_access_token=self._token(claim),
            traffic_access_token=traffic,
            domain=self._domain,
        )

    def listed(self, sandbox: Sandbox) -> ListedSandbox:
        """Return the body of a sandbox in a list."""
        return ListedSandbox(**_common(sandbox))

    def detail(
        self, sandbox: Sandbox, policy: NetworkPolicy, *, with_token: bool = True
    ) -> SandboxDetail:
        """Return the full body; with the token only for callers with write access.

        `policy` is the network policy in effect.
        """
        claim = _claim(sandbox)
        wakes = sandbox.spec.wake_on_traffic
        stopped = sandbox.status.pause_strategy is PauseStrategy.STOP
        is_plain = sandbox.spec.network is None and policy == NetworkPolicy()
        return SandboxDetail(
            **_common(sandbox),
            envd_access_token=self._token(claim) if with_token else UNSET,
            domain=self._domain,
            allow_internet_access=policy.allow_internet_access,
            network=UNSET if is_plain else network_body(policy),
            lifecycle=LifecycleBody(
                auto_resume=bool(wakes and wakes.enabled),
                on_timeout="pause" if claim.auto_pause else "kill",
            ),
            pause_mode=("filesystem" if stopped else "full") if _is_paused(sandbox) else UNSET,
        )


def _claim(sandbox: Sandbox) -> ClaimIdentity:
    claim = sandbox.spec.claim
    if claim is None:
        raise ValueError(f"sandbox {sandbox.key} is not claimed")
    return claim


def _is_paused(sandbox: Sandbox) -> bool:
    """Whether it is paused. A sandbox that is being paused still runs."""
    return sandbox.status.phase is Phase.PAUSED or not is_running_or_pausing(sandbox)


def _common(sandbox: Sandbox) -> dict[str, Any]:
    claim = _claim(sandbox)
    resources = resources_of(sandbox)
    paused = _is_paused(sandbox)
    end = deadlines.end_of(sandbox.spec)
    if sandbox.spec.paused and not paused and (before := sandbox.spec.before_pause) is not None:
        # It is being paused: its deadline applies until then.
        end = before.pause_time or before.shutdown_time
    return {
        "template_id": claim.template_id,
        "sandbox_id": claim.sandbox_id,
        "client_id": CLIENT_ID,
        "started_at": claim.claim_time,
        "end_at": end or NEVER,
        "cpu_count": cpu_count(resources),
        "memory_mb": memory_mb(resources),
        "disk_size_mb": disk_mb(resources),
        "state": "paused" if paused else "running",
        "envd_version": ENVD_VERSION,
        "metadata": claim.metadata,
    }


def cpu_count(resources: Resources) -> int:
    """Return whole cores, rounded up, at least 1."""
    millis = quantity.millis(resources.cpu) if resources.cpu else DEFAULT_CPU_MILLIS
    return max(math.ceil(millis / 1000), 1)


def memory_mb(resources: Resources) -> int:
    """Return memory in MiB."""
    size = quantity.whole(resources.memory) if resources.memory else DEFAULT_MEMORY_BYTES
    return quantity.mebibytes(size)


def disk_mb(resources: Resources) -> int:
    """Return disk space in MiB."""
    return quantity.mebibytes(
        quantity.whole(resources.disk) if resources.disk else DEFAULT_DISK_BYTES
    )


def network_view(effective: NetworkInEffect, parts: Sequence[NetworkPart]) -> NetworkView:
    """Return the body of a sandbox's network policy and its parts."""
    policy, rates = effective.policy, effective.rates
    return NetworkView(
        ingress_bandwidth=rates.ingress if rates else UNSET,
        egress_bandwidth=rates.egress if rates else UNSET,
        allow_internet_access=policy.allow_internet_access,
        allow_private_networks=policy.allow_private_networks,
        network=network_body(policy),
        parts=tuple(
            NetworkPartView(
                source=part.source,
                internet=part.internet or UNSET,
                allow_internet_access=part.policy.allow_internet_access if part.policy else UNSET,
                allow_private_networks=part.policy.allow_private_networks if part.policy else UNSET,
                network=network_body(part.policy) if part.policy else UNSET,
                exceeds_template=part.is_opened or UNSET,
                ingress_bandwidth=(part.rates and part.rates.ingress) or UNSET,
                egress_bandwidth=(part.rates and part.rates.egress) or UNSET,
            )
            for part in parts
        ),
    )


def network_body(policy: NetworkPolicy) -> NetworkConfig:
    """Return the body of a network policy."""
    return NetworkConfig(
        allow_public_traffic=policy.allow_public_traffic,
        allow_out=policy.allow_out,
        deny_out=policy.deny_out,
        dns_servers=policy.dns_servers,
        mask_request_host=policy.mask_request_host,
    )


def metric(sample: UsageSample) -> MetricBody:
    """Return the body of a metrics sample."""
    return MetricBody(
        timestamp=sample.at,
        timestamp_unix=int(sample.at.timestamp()),
        cpu_count=max(math.ceil(sample.cpu_count), 1),
        cpu_used_pct=round(sample.cpu_used_percent, 2),
        mem_used=sample.memory_used_bytes,
        mem_total=sample.memory_total_bytes,
        mem_cache=sample.memory_cache_bytes,
        disk_used=sample.disk_used_bytes,
        disk_total=sample.disk_total_bytes,
    )


def snapshot(checkpoint: Checkpoint) -> SnapshotInfo:
    """Return the body of a snapshot."""
    return SnapshotInfo(
        snapshot_id=checkpoint.status.checkpoint_id or checkpoint.spec.checkpoint_id,
        names=checkpoint.spec.names,
    )


def logs_v1(entries: Sequence[LogEntry]) -> dict[str, object]:
    """Return log lines for older clients: each line is JSON with a level."""
    return {
        "logs": [
            {
                "timestamp": entry.at,
                "line": json.dumps(
                    {
                        "level": entry.level,
                        "message": entry.message,
                        "timestamp": entry.at.isoformat(),
                        **entry.fields,
                    }
                ),
            }
            for entry in entries
        ],
        "logEntries": [_log_entry(entry) for entry in entries],
    }


def logs_v2(
    entries: Sequence[LogEntry], *, level: str | None, search: str | None
) -> list[dict[str, object]]:
    """Return log entries at or above a level that contain a text."""
    floor = 0 if level is None else LEVELS.index(level)
    return [
        _log_entry(entry)
        for entry in entries
        if _level(entry.level) >= floor and (not search or search in entry.message)
    ]


def _level(name: str) -> int:
    return LEVELS.index(name) if name in LEVELS else 1


def _log_entry(entry: LogEntry) -> dict[str, object]:
    return {
        "timestamp": entry.at,
        "message": entry.message,
        "level": entry.level if entry.level in LEVELS else "info",
        "fields": dict(entry.fields),
    }
