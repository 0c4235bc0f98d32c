"""The network of all sandboxes of one node: the door for the node process.

See the package's docstring for how it is used. What is attached and how lives in `core`; this class
keeps its work off the event loop (one thread for all changes, in order; one for removing links,
which waits for the kernel) and runs the resolver. Idempotent by uid, safe to repeat after a crash.
"""

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address
from typing import ParamSpec, TypeVar

from paddock.kit.errors import PaddockError, UnavailableError
from paddock.kit.logs import fields
from paddock.kit.tasks import background
from paddock.runtime.local.net import links
from paddock.runtime.local.net.dns.server import Resolver
from paddock.runtime.local.net.dns.upstream import Upstream, host_servers
from paddock.runtime.local.net.fabric_state import Core
from paddock.runtime.local.net.policy import compile_policy
from paddock.runtime.local.net.rtnetlink import Channel
from paddock.runtime.local.net.settings import Attachment, FabricSettings
from paddock.runtime.port import EgressPolicy

__all__ = ["Attachment", "Fabric", "FabricSettings"]

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Fabric:
    """Attaches sandboxes and keeps their egress policies."""

    def __init__(self, core: Core, netns_fd: int | None) -> None:
        self._core = core
        self._netns_fd = netns_fd
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fabric")
        self._remover = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fabric-remove")
        self._doomed: deque[int] = deque()
        self._running = contextlib.AsyncExitStack()
        self._is_closed = False

    @classmethod
    async def open(cls, settings: FabricSettings, *, netns_fd: int | None = None) -> "Fabric":
        """Set the fabric up, or take over the one that is there, with all its sandboxes.

        `netns_fd` is the network namespace to be the host's side, this process' own by default.
        Raises `UnsupportedError` without root or nftables, `ConflictError` where another node has
        the same fabric or the machine uses the subnet otherwise.
        """
        own = None if netns_fd is None else os.dup(netns_fd)
        fabric = cls(Core(settings, own), own)
        try:
            await fabric._work(fabric._core.open)
            await fabric._serve_names(settings)
        except BaseException:
            await fabric.close()
            raise
        return fabric

    async def reserve(
        self, uid: str, slot: int | None = None, *, policy: EgressPolicy | None = None
    ) -> Attachment:
        """Do what `attach` does before it needs a network namespace.

        It is worth it where that is still being made: `attach` then only has to put the link. The
        address is known at once; the rules are put in force meanwhile, before any `attach`.
        """
        found = await self._work(self._core.choose, uid, slot, policy)
        self._worker.submit(self._enforce, uid)
        return found

    async def attach(
        self,
        uid: str,
        netns_fd: int,
        slot: int | None = None,
        *,
        policy: EgressPolicy | None = None,
    ) -> Attachment:
        """Give a sandbox's network namespace loopback, an address, a route and a policy.

        The policy holds before the link exists. `None` keeps the one stored for the uid, or is the
        default: internet yes, private ranges no. A `slot` brings back a known address (restore).
        """
        return await self._work(self._core.attach, uid, netns_fd, slot, policy)

    async def detach(self, uid: str, *, keep_address: bool = False) -> None:
        """Remove a sandbox's link, rules and record; unknown uids are no error.

        Its traffic ends at once; the return waits for the kernel to remove the link, some 20 ms.
        `keep_address` keeps slot and policy for the next `attach` of the uid (hibernation).
        """
        await self._remove((uid,), keep_address=keep_address)

    async def set_policy(self, uid: str, policy: EgressPolicy) -> None:
        """Replace a policy at once; flows it denies are cut. `InvalidError` names bad fields."""
        await self._work(self._core.set_policy, uid, policy)

    async def release_all_unknown(self, known_uids: Collection[str]) -> tuple[str, ...]:
        """Remove every sandbox but these, and links of nobody; give the uids removed."""
        unknown = [uid for uid in self._core.uids() if uid not in known_uids]
        await self._remove(unknown, keep_address=False)
        await self._delete(await self._work(self._core.stray_links))
        await self._work(self._core.refresh_uplinks)
        return tuple(unknown)

    def inspect(self, uid: str) -> Attachment | None:
        """Give a sandbox's place in the network, or `None` for one that has none."""
        return self._core.inspect(uid)

    def attached(self) -> tuple[str, ...]:
        """Give the uids of every sandbox the fabric remembers."""
        return self._core.uids()

    @staticmethod
    def check_policy(policy: EgressPolicy, *, root: str = "") -> None:
        """Raise `InvalidError` with every bad field, doing nothing else."""
        compile_policy(policy, root=root)

    async def purge(self) -> None:
        """Remove every trace of the fabric from the machine, sandboxes' links included."""
        await self._work(self._core.purge)

    async def close(self) -> None:
        """Stop resolving names and let go; sandboxes keep links and rules until the next `open`."""
        await self._running.aclose()
        self._is_closed = True
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._worker, self._core.close)
        self._worker.shutdown(wait=False)
        # What is still being removed could be somebody else's a moment later.
        await loop.run_in_executor(None, self._remover.shutdown)
        if self._netns_fd is not None:
            os.close(self._netns_fd)
            self._netns_fd = None

    async def _serve_names(self, settings: FabricSettings) -> None:
        resolver = Resolver(
            rules_of=self._core.rules_of,
            admit=self._admit,
            host_servers=lambda: host_servers(settings.resolv_conf),
            upstream=Upstream(self._netns_fd),
            settings=settings.resolver,
        )
        sockets = await self._work(self._core.listeners)
        for one in sockets:
            self._running.callback(one.close)
        await self._running.enter_async_context(
            background(resolver.run(*sockets), name="resolver of sandboxes")
        )
        await resolver.is_serving.wait()

    def _enforce(self, uid: str) -> None:
        try:
            self._core.enforce(uid)
        except (PaddockError, OSError, KeyError) as problem:
            # `attach` does it again, and whoever asked for that hears why it cannot be done.
            log.warning("rules not in force yet", extra=fields(uid=uid, reason=problem))

    async def _admit(self, ip: str, name: str, answers: Sequence[tuple[IPv4Address, int]]) -> None:
        await self._work(self._core.admit, ip, name, answers)

    async def _remove(self, uids: Collection[str], *, keep_address: bool) -> None:
        indexes = await self._work(self._core.begin_detach, uids)
        await self._delete(indexes)
        await self._work(self._core.finish_detach, uids, keep_address=keep_address)

    async def _delete(self, indexes: list[int]) -> None:
        # Removing links waits for the kernel, so attaching must not queue behind it, and all that
        # gather while one removal runs go together in the next.
        if indexes:
            self._check_open()
            self._doomed.extend(indexes)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._remover, self._delete_doomed)

    def _delete_doomed(self) -> None:
        doomed: list[int] = []
        while self._doomed:
            doomed.append(self._doomed.popleft())
        if doomed:
            with Channel(self._netns_fd) as channel:
                links.delete_links(channel, doomed, group=self._core.plan.group)

    async def _work(self, call: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T:
        self._check_open()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, lambda: call(*arguments, **named))

    def _check_open(self) -> None:
        if self._is_closed:
            raise UnavailableError("the network of sandboxes was let go of")
