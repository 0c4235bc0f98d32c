"""The `local` driver: a client of the node process, over its socket.

Sandboxes do not depend on the control plane's process; it and the node may be restarted at any
time. Every operation is idempotent, so a call in flight when the node exits is retried for a few
seconds before it fails with `UnavailableError`. A call that exceeds its timeout fails the same way.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from paddock.kit.errors import UnavailableError, UnsupportedError
from paddock.resources.kinds.template import ImagePullPolicy
from paddock.runtime.local.images.provider import ImageRequest
from paddock.runtime.local.node import rpc
from paddock.runtime.local.node.heavy_work import WorkReport
from paddock.runtime.local.node.rpc_server import LogArguments, SnapshotArguments
from paddock.runtime.port import (
    AgentConfig,
    Blueprint,
    Capabilities,
    EgressPolicy,
    ImagePull,
    Instance,
    LogLine,
    ReadyImage,
    RegistryCredentials,
    Runtime,
    RuntimeEvent,
    StoredCheckpoint,
    Usage,
)

T = TypeVar("T")

_RETRY_DELAYS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds between attempts to connect to a node that is being restarted."""
_TIMEOUT_SECONDS = 30.0
_SLOW_TIMEOUT_SECONDS = 600.0
"""For methods that move much memory or many files."""
_SLOW_METHODS = frozenset(
    {
        *("create", "start", "stop", "destroy", "hibernate", "restore"),
        *("snapshot", "fork", "delete_checkpoint"),
    }
)


class LocalRuntime:
    """A `Runtime` on this machine."""

    def __init__(self, socket_path: str | os.PathLike[str]) -> None:
        self._client = rpc.RpcClient(os.fspath(socket_path))

    @property
    def name(self) -> str:
        return "local"

    def close(self) -> None:
        """Close the connection; sandboxes keep running."""
        self._client.close()

    async def capabilities(self) -> Capabilities:
        return await self._call("capabilities", kind=Capabilities)

    async def ensure_image(
        self,
        reference: str,
        *,
        team: str,
        policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT,
        credentials: tuple[RegistryCredentials, ...] = (),
    ) -> ReadyImage:
        request = ImageRequest(
            reference=reference, team=team, policy=policy, credentials=credentials
        )
        while True:  # each call joins the pull, also after a restart of the node
            found = await self._call("ensure_image", body=request, kind=ReadyImage | None)
            if found is not None:
                return found

    async def image_pulls(self) -> tuple[ImagePull, ...]:
        return await self._call("image_pulls", kind=tuple[ImagePull, ...])

    async def need_images(self, references: frozenset[str]) -> None:
        await self._call("need_images", body=tuple(sorted(references)), kind=None)

    async def prune_images(self) -> tuple[str, ...]:
        """Remove all pulled images that are not needed; return their names."""
        return await self._call("prune_images", kind=tuple[str, ...])

    async def create(self, blueprint: Blueprint) -> Instance:
        return await self._call("create", blueprint.uid, blueprint, kind=Instance)

    async def start(self, uid: str) -> Instance:
        return await self._call("start", uid, kind=Instance)

    async def configure(self, uid: str, agent: AgentConfig) -> None:
        await self._call("configure", uid, agent, kind=None)

    async def freeze(self, uid: str) -> Instance:
        return await self._call("freeze", uid, kind=Instance)

    async def thaw(self, uid: str) -> Instance:
        return await self._call("thaw", uid, kind=Instance)

    async def hibernate(self, uid: str) -> Instance:
        return await self._call("hibernate", uid, kind=Instance)

    async def restore(self, uid: str) -> Instance:
        return await self._call("restore", uid, kind=Instance)

    async def stop(self, uid: str) -> Instance:
        return await self._call("stop", uid, kind=Instance)

    async def snapshot(
        self, uid: str, checkpoint_id: str, *, memory: bool, keep_running: bool
    ) -> StoredCheckpoint:
        arguments = SnapshotArguments(
            checkpoint_id=checkpoint_id, memory=memory, keep_running=keep_running
        )
        return await self._call("snapshot", uid, arguments, kind=StoredCheckpoint)

    async def fork(self, uid: str, children: tuple[Blueprint, ...]) -> tuple[Instance | str, ...]:
        return await self._call("fork", uid, children, kind=tuple[Instance | str, ...])

    async def delete_checkpoint(self, checkpoint_id: str) -> None:
        await self._call("delete_checkpoint", checkpoint_id, kind=None)

    async def checkpoints(self) -> tuple[StoredCheckpoint, ...]:
        return await self._call("checkpoints", kind=tuple[StoredCheckpoint, ...])

    async def destroy(self, uid: str) -> None:
        await self._call("destroy", uid, kind=None)

    async def inspect(self, uid: str) -> Instance | None:
        return await self._call("inspect", uid, kind=Instance | None)

    async def instances(self) -> tuple[Instance, ...]:
        return await self._call("instances", kind=tuple[Instance, ...])

    async def update_image(self, uid: str, image: str) -> Instance:
        raise UnsupportedError(
            f"cannot change the image of sandbox {uid} in place",
            hint="create a sandbox of the other image; that takes no longer on this machine",
        )

    async def set_egress(self, uid: str, policy: EgressPolicy) -> None:
        await self._call("set_egress", uid, policy, kind=None)

    async def usage(self, uid: str) -> Usage:
        return await self._call("usage", uid, kind=Usage)

    async def logs(
        self, uid: str, *, since: datetime | None = None, limit: int = 1000
    ) -> tuple[LogLine, ...]:
        arguments = LogArguments(since=since, limit=limit)
        return await self._call("logs", uid, arguments, kind=tuple[LogLine, ...])

    async def heavy_work(self) -> tuple[WorkReport, ...]:
        """Return how much heavy work waits and runs on the node, by kind."""
        return await self._call("heavy_work", kind=tuple[WorkReport, ...])

    async def netns(self, uid: str) -> int:
        """Return a descriptor of the sandbox's network namespace; the caller closes it.

        Sockets created by a thread in this namespace reach all ports inside, also on loopback.
        """
        _, fds = await self._call_with_retry("netns", uid, None)
        return fds[0]

    async def watch(self) -> AsyncIterator[RuntimeEvent]:
        """Stream events; after a restart of the node, yield the state of every sandbox."""
        was_lost = False
        attempt = 0
        while True:
            try:
                replies = self._client.stream("watch")
            except UnavailableError:
                await asyncio.sleep(_RETRY_DELAYS[min(attempt, len(_RETRY_DELAYS) - 1)])
                attempt += 1
                continue
            attempt = 0
            try:
                await replies.get()  # the node confirms the watch
                if was_lost:
                    for instance in await self.instances():
                        yield RuntimeEvent(
                            uid=instance.uid, state=instance.state, reason=instance.reason
                        )
                while (reply := await replies.get()) is not None:
                    yield msgspec.msgpack.decode(reply.result, type=RuntimeEvent)
            finally:
                self._client.end_stream(replies)
            was_lost = True

    async def _call(self, method: str, uid: str = "", body: object = None, *, kind: Any) -> Any:
        result, fds = await self._call_with_retry(method, uid, body)
        for fd in fds:
            os.close(fd)
        return msgspec.msgpack.decode(result, type=kind) if kind is not None else None

    async def _call_with_retry(
        self, method: str, uid: str, body: object
    ) -> tuple[msgspec.Raw, list[int]]:
        """Call a method, retrying while the node is restarted."""
        seconds = _SLOW_TIMEOUT_SECONDS if method in _SLOW_METHODS else _TIMEOUT_SECONDS
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                for pause in _RETRY_DELAYS:
                    try:
                        return await self._client.call(method, uid, body)
                    except rpc.NodeLostError:
                        await asyncio.sleep(pause)
                return await self._client.call(method, uid, body)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise UnavailableError(
                f"the node did not reply to {method!r} within {seconds:g} s",
                hint="read the node's log: `paddock logs node`",
            ) from error


_: type[Runtime] = LocalRuntime
