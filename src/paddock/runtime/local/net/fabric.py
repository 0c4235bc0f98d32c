"""The network of all sandboxes of one node: the asyncio API for the node process.

The package docstring shows how to use it. `fabric_state` holds the state and changes the kernel;
this class runs it outside the event loop (one thread for all changes in order, one for deleting
links, which waits for the kernel) and runs the resolver. Operations are idempotent by uid.
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
from paddock.runtime.local.net.dns.upstream import UpstreamResolver, host_servers
from paddock.runtime.local.net.fabric_state import FabricState
from paddock.runtime.local.net.policy import compile_policy
from paddock.runtime.local.net.rtnetlink import Channel
from paddock.runtime.local.net.settings import (
    HOST_NAME,
    UNLIMITED,
    Attachment,
    Bandwidth,
    FabricSettings,
)
from paddock.runtime.port import EgressPolicy

__all__ = ["Attachment", "Fabric", "FabricSettings"]

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Fabric:
    """Attaches sandboxes to the network and enforces their egress policies."""

    def __init__(self, state: FabricState, netns_fd: int | None) -> None:
        self._state = state
        self._netns_fd = netns_fd
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fabric")
        self._remover = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fabric-remove")
        self._to_delete: deque[int] = deque()
        self._running = contextlib.AsyncExitStack()
        self._is_closed = False

    @classmethod
    async def open(cls, settings: FabricSettings, *, netns_fd: int | None = None) -> "Fabric":
        """Set up the fabric, or adopt the existing one with all its sandboxes.

        `netns_fd` is the network namespace of the host side, by default that of this process.
        Raises `UnsupportedError` without root or nftables, `ConflictError` if another node runs
        the same fabric or the subnet is in use on this machine.
        """
        own = None if netns_fd is None else os.dup(netns_fd)
        fabric = cls(FabricState(settings, own), own)
        try:
            await fabric._run_in_worker(fabric._state.open)
            await fabric._start_resolver(settings)
        except BaseException:
            await fabric.close()
            raise
        return fabric

    async def reserve(
        self, uid: str, slot: int | None = None, *, policy: EgressPolicy | None = None
    ) -> Attachment:
        """Do the part of `attach` that needs no network namespace.

        Useful while the namespace is still being created: `attach` then only creates the link. The
        address is known at once; the rules are applied in the background, before any `attach`.
        """
        found = await self._run_in_worker(self._state.reserve, uid, slot, policy)
        self._worker.submit(self._enforce, uid)
        return found

    async def attach(
        self,
        uid: str,
        netns_fd: int,
        slot: int | None = None,
        *,
        policy: EgressPolicy | None = None,
        bandwidth: Bandwidth = UNLIMITED,
    ) -> Attachment:
        """Set up loopback, address, route and policy in a sandbox's network namespace.

        The policy is enforced before the link exists. With `None` the policy stored for the uid is
        used, or the default: internet allowed, private ranges denied. `slot` requests a specific
        address (restore).
        """
        return await self._run_in_worker(self._state.attach, uid, netns_fd, slot, policy, bandwidth)

    async def detach(self, uid: str, *, keep_address: bool = False) -> None:
        """Remove a sandbox's link, rules and record; unknown uids are ignored.

        Traffic stops at once. The call returns when the kernel has removed the link (about 20 ms).
        `keep_address` keeps slot and policy for the next `attach` of the uid (hibernation).
        """
        await self._remove((uid,), keep_address=keep_address)

    async def set_policy(self, uid: str, policy: EgressPolicy) -> None:
        """Replace a policy and reset the flows it denies. `InvalidError` names invalid fields."""
        await self._run_in_worker(self._state.set_policy, uid, policy)

    @property
    def rates_unavailable_reason(self) -> str:
        """Why the bandwidth of sandboxes cannot be limited, or an empty string."""
        return self._state.rates_unavailable_reason

    async def set_bandwidth(self, uid: str, pid: int, bandwidth: Bandwidth) -> None:
        """Change the rates of an attached sandbox; `pid` is a process in its namespace."""
        await self._run_in_worker(self._state.set_bandwidth, uid, pid, bandwidth)

    async def release_all_unknown(self, known_uids: Collection[str]) -> tuple[str, ...]:
        """Remove all sandboxes but these, and stray links; return the removed uids."""
        unknown = [uid for uid in self._state.uids() if uid not in known_uids]
        await self._remove(unknown, keep_address=False)
        await self._delete(await self._run_in_worker(self._state.stray_links))
        await self._run_in_worker(self._state.refresh_uplinks)
        return tuple(unknown)

    def inspect(self, uid: str) -> Attachment | None:
        """Return a sandbox's attachment, or `None` if it is not attached."""
        return self._state.inspect(uid)

    def attached(self) -> tuple[str, ...]:
        """Return the uids of all sandboxes that have an address."""
        return self._state.uids()

    @staticmethod
    def check_policy(policy: EgressPolicy, *, root: str = "") -> None:
        """Validate a policy. Raises `InvalidError` with every invalid field."""
        compile_policy(policy, root=root)

    async def purge(self) -> None:
        """Remove the fabric from the machine, including the links of sandboxes."""
        await self._run_in_worker(self._state.purge)

    async def close(self) -> None:
        """Stop the resolver and close; sandboxes keep links and rules until the next `open`."""
        await self._running.aclose()
        self._is_closed = True
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._worker, self._state.close)
        self._worker.shutdown(wait=False)
        # Wait for deletions in flight: their links could be reused after the next `open`.
        await loop.run_in_executor(None, self._remover.shutdown)
        if self._netns_fd is not None:
            os.close(self._netns_fd)
            self._netns_fd = None

    async def _start_resolver(self, settings: FabricSettings) -> None:
        resolver = Resolver(
            rules_of=self._state.rules_of,
            admit=self._admit,
            host_servers=lambda: host_servers(settings.resolv_conf),
            upstream=UpstreamResolver(self._netns_fd),
            settings=settings.resolver,
            own_names={HOST_NAME: self._state.plan.gateway} if settings.host_ports else {},
            private_networks=settings.private_networks,
        )
        sockets = await self._run_in_worker(self._state.listeners)
        for one in sockets:
            self._running.callback(one.close)
        await self._running.enter_async_context(
            background(resolver.run(*sockets), name="resolver of sandboxes")
        )
        await resolver.is_serving.wait()

    def _enforce(self, uid: str) -> None:
        try:
            self._state.enforce(uid)
        except (PaddockError, OSError, KeyError) as problem:
            # `attach` retries this and raises the error to its caller.
            log.warning(
                "firewall rules of a reserved address not applied yet",
                extra=fields(uid=uid, reason=problem),
            )

    async def _admit(self, ip: str, name: str, answers: Sequence[tuple[IPv4Address, int]]) -> None:
        await self._run_in_worker(self._state.admit, ip, name, answers)

    async def _remove(self, uids: Collection[str], *, keep_address: bool) -> None:
        indexes = await self._run_in_worker(self._state.begin_detach, uids)
        await self._delete(indexes)
        await self._run_in_worker(self._state.finish_detach, uids, keep_address=keep_address)

    async def _delete(self, indexes: list[int]) -> None:
        # Deleting links waits for the kernel. It must not block `attach`, and all links that queue
        # up during one deletion are deleted together in the next.
        if indexes:
            self._check_open()
            self._to_delete.extend(indexes)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._remover, self._delete_batch)

    def _delete_batch(self) -> None:
        indexes: list[int] = []
        while self._to_delete:
            indexes.append(self._to_delete.popleft())
        if indexes:
            with Channel(self._netns_fd) as channel:
                links.delete_links(channel, indexes, group=self._state.plan.group)

    async def _run_in_worker(
        self, call: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs
    ) -> _T:
        self._check_open()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, lambda: call(*arguments, **named))

    def _check_open(self) -> None:
        if self._is_closed:
            raise UnavailableError("the network of sandboxes is closed")
