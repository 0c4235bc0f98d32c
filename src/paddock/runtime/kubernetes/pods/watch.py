"""The pods of sandboxes by sandbox uid, with waiting and event streams, from the pod cache.

This module sends no requests to the cluster. `status` decides which pod belongs to which sandbox.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator

from paddock.kit.errors import InvalidError, NotFoundError, UnavailableError
from paddock.resources.kinds.pods import Pod
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.cluster import PodCache
from paddock.runtime.kubernetes.pods import status
from paddock.runtime.port import Instance, InstanceState, RuntimeEvent

CREATE_SECONDS = 20.0
"""How long a worker waits for a pod before the key is requeued."""


def instance_of(uid: str, pod: Pod) -> Instance:
    """Return the instance that a pod represents."""
    return status.read(pod, uid).instance


class PodWatch:
    """The current pods of sandboxes."""

    def __init__(self, pods: PodCache) -> None:
        self._pods: dict[str, Pod] = {}
        self._waiting: dict[str, set[asyncio.Event]] = defaultdict(set)
        """One event per waiter, so that a waiter that gives up does not affect the others."""
        self._watchers: set[asyncio.Queue[RuntimeEvent]] = set()
        pods.subscribe(self._on_change)

    def get(self, uid: str) -> Pod | None:
        """Return the pod of a sandbox, or `None`."""
        return self._pods.get(uid)

    def all(self) -> dict[str, Pod]:
        """Return all pods by sandbox uid."""
        return dict(self._pods)

    def require(self, uid: str) -> Pod:
        """Return the pod of a sandbox. Raises `NotFoundError`."""
        pod = self._pods.get(uid)
        if pod is None:
            raise NotFoundError(f"sandbox {uid} has no pod")
        return pod

    async def wait_running(self, uid: str) -> Instance:
        """Wait until the pod runs. Raises `InvalidError` if it failed, else `UnavailableError`."""
        reason = "its pod has not been seen yet"
        changed = asyncio.Event()
        self._waiting[uid].add(changed)
        try:
            async with asyncio.timeout(CREATE_SECONDS):
                while True:
                    changed.clear()
                    if (pod := self._pods.get(uid)) is not None:
                        instance = instance_of(uid, pod)
                        if instance.state is InstanceState.FAILED:
                            raise InvalidError(instance.reason or "its pod failed")
                        if instance.state is InstanceState.RUNNING:
                            return instance
                        reason = instance.reason or reason
                    await changed.wait()
        except TimeoutError as error:
            raise UnavailableError(f"sandbox {uid} {reason}", retry_after_seconds=1.0) from error
        finally:
            self._waiting[uid].discard(changed)
            if not self._waiting[uid]:
                del self._waiting[uid]

    async def watch(self) -> AsyncIterator[RuntimeEvent]:
        """Yield an event for every change of a sandbox's state."""
        events: asyncio.Queue[RuntimeEvent] = asyncio.Queue()
        self._watchers.add(events)
        try:
            while True:
                yield await events.get()
        finally:
            self._watchers.discard(events)

    def _on_change(self, old: Pod | None, new: Pod | None) -> None:
        pod = new or old
        uid = pod.metadata.labels.get(names.LABEL_UID, "") if pod is not None else ""
        # Any pod can have the label; only the owner reference proves ownership.
        if pod is None or not uid or not status.is_owned(pod, uid):
            return
        before = self._pods.get(uid)
        if new is not None:
            self._pods[uid] = new
        elif before is not None and before.metadata.uid == pod.metadata.uid:
            del self._pods[uid]
        for changed in self._waiting.get(uid, ()):
            changed.set()
        self._notify(uid, before, new)

    def _notify(self, uid: str, before: Pod | None, after: Pod | None) -> None:
        was = instance_of(uid, before).state if before is not None else None
        now = instance_of(uid, after) if after is not None else None
        state = now.state if now is not None else InstanceState.FAILED
        is_killed = after is not None and status.is_envd_killed_for_memory(before, after)
        if state is was and not is_killed:
            return
        reason = now.reason if now is not None else "its pod is gone"
        if is_killed:
            reason = "processes were killed: the sandbox used its memory"
        event = RuntimeEvent(uid=uid, state=state, reason=reason, memory_kills=int(is_killed))
        for watcher in self._watchers:
            watcher.put_nowait(event)
