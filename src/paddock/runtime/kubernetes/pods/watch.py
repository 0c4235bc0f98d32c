"""The pods of sandboxes as the watch shows them: by sandbox, waited for, and told of.

Nothing is asked of the cluster here. Whose pod is whose, `reading` knows.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator

from paddock.kit.errors import InvalidError, NotFoundError, UnavailableError
from paddock.resources.kinds.pods import Pod
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.cluster import Pods
from paddock.runtime.kubernetes.pods import status
from paddock.runtime.port import Instance, InstanceState, RuntimeEvent

CREATE_SECONDS = 20.0
"""A worker waits so long for a pod; after that the queue comes back to it."""


def instance_of(uid: str, pod: Pod) -> Instance:
    """Give what a pod says of its sandbox."""
    return status.read(pod, uid).instance


class Presence:
    """Which sandboxes have a pod, at this moment."""

    def __init__(self, pods: Pods) -> None:
        self._pods: dict[str, Pod] = {}
        self._waiting: dict[str, set[asyncio.Event]] = defaultdict(set)
        """One for each who waits: a waiter that gives up takes nothing from the others."""
        self._watchers: set[asyncio.Queue[RuntimeEvent]] = set()
        pods.subscribe(self._take)

    def get(self, uid: str) -> Pod | None:
        """Give a sandbox's pod, where it has one."""
        return self._pods.get(uid)

    def all(self) -> dict[str, Pod]:
        """Give every pod, by its sandbox."""
        return dict(self._pods)

    def pod(self, uid: str) -> Pod:
        """Give a sandbox's pod; `NotFoundError`."""
        pod = self._pods.get(uid)
        if pod is None:
            raise NotFoundError(f"sandbox {uid} has no pod")
        return pod

    async def until_answering(self, uid: str) -> Instance:
        """Wait for the pod to run, as the watch tells; raise why it does not."""
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
        """Tell of sandboxes whose state changes, for as long as it is read."""
        events: asyncio.Queue[RuntimeEvent] = asyncio.Queue()
        self._watchers.add(events)
        try:
            while True:
                yield await events.get()
        finally:
            self._watchers.discard(events)

    def _take(self, old: Pod | None, new: Pod | None) -> None:
        """Take in a change of the picture."""
        pod = new or old
        uid = pod.metadata.labels.get(names.LABEL_UID, "") if pod is not None else ""
        # A label can be put on any pod; the owner reference says whose it is.
        if pod is None or not uid or not status.is_owned(pod, uid):
            return
        before = self._pods.get(uid)
        if new is not None:
            self._pods[uid] = new
        elif before is not None and before.metadata.uid == pod.metadata.uid:
            del self._pods[uid]
        for changed in self._waiting.get(uid, ()):
            changed.set()
        self._tell(uid, before, new)

    def _tell(self, uid: str, before: Pod | None, after: Pod | None) -> None:
        was = instance_of(uid, before).state if before is not None else None
        now = instance_of(uid, after) if after is not None else None
        state = now.state if now is not None else InstanceState.FAILED
        if state is was:
            return
        reason = now.reason if now is not None else "its pod is gone"
        event = RuntimeEvent(uid=uid, state=state, reason=reason)
        for watcher in self._watchers:
            watcher.put_nowait(event)
