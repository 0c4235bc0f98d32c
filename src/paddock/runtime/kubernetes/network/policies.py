"""Create NetworkPolicies when a pod first needs one, delete them when unused.

A pod whose policy is missing can reach everything. So a policy is deleted only after it was unused
for `IDLE_SECONDS`, and never while `ensure` uses it. `policy_render` renders the policies.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Mapping

from paddock.kit.clock import Clock
from paddock.kit.errors import (
    AlreadyExistsError,
    ConflictError,
    NotFoundError,
    PaddockError,
)
from paddock.kit.logs import fields
from paddock.resources.kinds.pods import NetworkPolicyManifest
from paddock.resources.meta import Key
from paddock.resources.selectors import parse_labels
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.cluster import Cluster, PodCache
from paddock.runtime.kubernetes.network.policy_render import network_policy, policy_name
from paddock.runtime.port import EgressPolicy

log = logging.getLogger(__name__)

IDLE_SECONDS = 600.0
"""A policy is deleted after being unused this long; also the interval between sweeps."""
_OURS = re.compile(r"^paddock-[0-9a-f]{12}$")


class NetworkPolicies:
    """Creates and garbage-collects NetworkPolicies; runs in the leader only."""

    def __init__(
        self,
        cluster: Cluster,
        pods: PodCache,
        *,
        system_namespace: str,
        clock: Clock,
        namespace: str | None = None,
    ) -> None:
        self._cluster = cluster
        self._pods = pods
        self._namespace = namespace
        self._system = system_namespace
        self._clock = clock
        self._needed: dict[Key, float] = {}
        """Policies known to exist, with the time each was last needed."""
        self._idle_since: dict[Key, float] = {}
        self._lock = asyncio.Lock()

    def name(self, policy: EgressPolicy) -> str:
        return policy_name(policy, self._system)

    async def ensure(self, policy: EgressPolicy, namespace: str) -> None:
        """Create a policy unless it exists; call it before the pod is created."""
        key = Key(namespace, self.name(policy))
        if key not in self._needed:
            manifest = network_policy(policy, namespace, system_namespace=self._system)
            # A policy that is being deleted must be gone before it is created again.
            async with self._lock:
                # Many callers wait here when a pool starts; the first one creates it.
                if key not in self._needed:
                    with contextlib.suppress(AlreadyExistsError):
                        await self._cluster.create(manifest)
        self._needed[key] = self._clock.monotonic()

    async def run(self) -> None:
        """Sweep periodically until cancelled."""
        while True:
            await asyncio.sleep(IDLE_SECONDS)
            try:
                await self.sweep()
            except PaddockError as error:
                log.warning("sweep of network policies failed", extra=fields(error=error.message))

    async def sweep(self) -> tuple[Key, ...]:
        """Delete policies that no pod has used for `IDLE_SECONDS`; return their keys."""
        found = await self._cluster.list(
            NetworkPolicyManifest,
            # Only where pods are watched.
            namespace=self._namespace,
            labels=parse_labels(f"{names.LABEL_MANAGED}={names.MANAGER}"),
        )
        there = {item.key: item for item in found.items if _is_ours(item)}
        now = self._clock.monotonic()
        used = {_policy_of(pod.metadata.namespace, pod.metadata.labels) for pod in self._pods.all()}
        self._idle_since = {key: self._idle_since.get(key, now) for key in there if key not in used}
        gone: list[Key] = []
        for key, since in list(self._idle_since.items()):
            if now - since >= IDLE_SECONDS and await self._collect(there[key]):
                gone.append(key)
        return tuple(gone)

    async def _collect(self, policy: NetworkPolicyManifest) -> bool:
        key = policy.key
        async with self._lock:
            needed = self._needed.get(key)
            if needed is not None and self._clock.monotonic() - needed < IDLE_SECONDS:
                return False
            # From here on `ensure` waits for the lock and creates the policy again.
            self._needed.pop(key, None)
            self._idle_since.pop(key, None)
            try:
                await self._cluster.delete(NetworkPolicyManifest, key, uid=policy.metadata.uid)
            except (NotFoundError, ConflictError):
                return False
        log.info("unused network policy deleted", extra=fields(policy=key))
        return True


def _is_ours(policy: NetworkPolicyManifest) -> bool:
    name = policy.metadata.name
    selects = {"matchLabels": {names.LABEL_EGRESS: name}}
    return bool(_OURS.match(name)) and policy.spec.get("podSelector") == selects


def _policy_of(namespace: str, labels: Mapping[str, str]) -> Key:
    return Key(namespace, labels.get(names.LABEL_EGRESS, ""))
