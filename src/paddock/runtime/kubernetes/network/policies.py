"""The NetworkPolicies of sandboxes: made when a pod first needs one, collected when none does.

A pod under a policy that is not there could reach everything, so a policy goes only after it was
idle for long, and never while somebody is about to use it. What it says is `network`'s business.
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
from paddock.runtime.kubernetes.cluster import Cluster, Pods
from paddock.runtime.kubernetes.network.policy_render import network_policy, policy_name
from paddock.runtime.port import EgressPolicy

log = logging.getLogger(__name__)

IDLE_SECONDS = 600.0
"""So long must no pod have needed a policy; also how often somebody looks."""
_OURS = re.compile(r"^paddock-[0-9a-f]{12}$")


class Policies:
    """Makes and collects them; one process at a time leads and does."""

    def __init__(
        self,
        cluster: Cluster,
        pods: Pods,
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
        """Policies that are known to be there, and when each was last needed."""
        self._idle_since: dict[Key, float] = {}
        self._lock = asyncio.Lock()

    def name(self, policy: EgressPolicy) -> str:
        """Give the name of a policy."""
        return policy_name(policy, self._system)

    async def ensure(self, policy: EgressPolicy, namespace: str) -> None:
        """See to it that a policy is there before a pod is under it."""
        key = Key(namespace, self.name(policy))
        if key not in self._needed:
            manifest = network_policy(policy, namespace, system_namespace=self._system)
            # One that is being collected right now must be gone before it is made anew.
            async with self._lock:
                # Many wait here when a pool begins, and the first has made it for all.
                if key not in self._needed:
                    with contextlib.suppress(AlreadyExistsError):
                        await self._cluster.create(manifest)
        self._needed[key] = self._clock.monotonic()

    async def run(self) -> None:
        """Collect now and then, until cancelled."""
        while True:
            await asyncio.sleep(IDLE_SECONDS)
            try:
                await self.sweep()
            except PaddockError as error:
                log.warning("policies were not collected", extra=fields(error=error.message))

    async def sweep(self) -> tuple[Key, ...]:
        """Delete policies that no pod was under for long; give their keys."""
        found = await self._cluster.list(
            NetworkPolicyManifest,
            # Where pods are looked at, and nowhere else.
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
            # Whoever needs it from here on waits for the lock and makes it anew.
            self._needed.pop(key, None)
            self._idle_since.pop(key, None)
            try:
                await self._cluster.delete(NetworkPolicyManifest, key, uid=policy.metadata.uid)
            except (NotFoundError, ConflictError):
                return False
        log.info("unused policy collected", extra=fields(policy=key))
        return True


def _is_ours(policy: NetworkPolicyManifest) -> bool:
    name = policy.metadata.name
    selects = {"matchLabels": {names.LABEL_EGRESS: name}}
    return bool(_OURS.match(name)) and policy.spec.get("podSelector") == selects


def _policy_of(namespace: str, labels: Mapping[str, str]) -> Key:
    return Key(namespace, labels.get(names.LABEL_EGRESS, ""))
