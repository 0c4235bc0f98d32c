"""A federation of control planes, one per cluster, that serve each other's claims.

Each polls the members of the others and uses a reply for a bounded time. A claim that cannot be
served here is forwarded once, to a cluster that can serve it. Nothing else is shared: specs stay
in their cluster, and a cluster that is cut off continues by itself.
"""

import asyncio
import logging
from datetime import timedelta
from typing import Protocol

import msgspec
from msgspec import Struct, structs

from paddock.cache.environments import MemberSnapshot
from paddock.claims.caller import Caller
from paddock.claims.requests import NewSandbox
from paddock.kit import metrics
from paddock.kit.clock import Clock
from paddock.kit.errors import (
    ConflictError,
    DeadlineExceededError,
    NotFoundError,
    PaddockError,
    UnavailableError,
)
from paddock.kit.logs import fields
from paddock.manager.environments.member_choice import MemberCandidate, candidate
from paddock.manager.environments.queue import ClaimQueue
from paddock.manager.federation.protocol import (
    GATEWAY,
    MAX_HOPS,
    PREFIX,
    AbandonedClaim,
    AnnouncedMember,
    Announcement,
    ForwardedCall,
    ForwardedClaim,
    ForwardedReply,
    PeerCluster,
    remote_id,
    tag_in,
    tag_of,
)
from paddock.resources import codec
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key

log = logging.getLogger(__name__)

ASK_SECONDS = 1.0
"""Interval of polling a peer."""
POLL_TIMEOUT_SECONDS = 2.0
"""Timeout of a poll."""
FRESH_SECONDS = 5.0
"""How long a reply is used."""
WAIT_SECONDS = 10.0
"""Longest wait of a claim in another cluster's queue."""
TAKE_SECONDS = 1.0
"""The same if the other cluster has idle sandboxes."""
HAND_OVER_SECONDS = 5.0
"""Longest handover of an idle sandbox: bounds the cost of a cluster that hangs."""
_ABANDON_TRIES = 5
_KEPT = 1024
_FORWARDED = metrics.counter(
    "paddock_federation_claims_total", "Claims sent to other clusters.", ("cluster", "outcome")
)


class Transport(Protocol):
    """Signed HTTP to peers."""

    async def call(
        self, peer: PeerCluster, method: str, path: str, body: bytes, *, timeout_seconds: float
    ) -> tuple[bytes, dict[str, str]]:
        """Call a peer; `PaddockError` is its reply, `UnavailableError` may be a lost reply."""
        ...


class _Known(Struct):
    """The last announcement of a peer."""

    announcement: Announcement
    received_at: float
    sent: dict[str, int]
    """Claims sent to each of its pools since, which the announcement does not include."""


class Federation:
    """The other clusters, and calls to them."""

    def __init__(
        self,
        *,
        cluster: str,
        gateway: str,
        peers: tuple[PeerCluster, ...],
        transport: Transport,
        clock: Clock,
    ) -> None:
        self.cluster = cluster
        self._gateway = gateway
        self._peers = {peer.cluster: peer for peer in peers}
        self._by_tag = {tag_of(peer.cluster): peer for peer in peers}
        self._transport = transport
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._abandon_tasks: set[asyncio.Task[None]] = set()
        self._abandoned: dict[str, None] = {}

    # ---- announcements -------------------------------------------------------------------

    def announcement(self, queue: ClaimQueue) -> Announcement:
        """Return the members of this cluster."""
        now = self._clock.now()
        members: list[AnnouncedMember] = []
        for env, snapshot in queue.snapshots().items():
            idle = {item.pool: item.idle for item in queue.candidates(env)}
            for member in snapshot.members:
                until = member.saturated_until
                saturated = (until - now).total_seconds() if until is not None else 0.0
                members.append(
                    AnnouncedMember(
                        namespace=env.namespace,
                        env=env.name,
                        name=member.name,
                        pool=member.pool.name,
                        priority=member.priority,
                        scaling_group=member.scaling_group,
                        idle=max(idle.get(member.pool, 0), 0),
                        pending=member.pending,
                        headroom=member.headroom,
                        saturated_seconds=max(saturated, 0.0),
                        age_seconds=max((now - snapshot.taken_at).total_seconds(), 0.0),
                    )
                )
        return Announcement(cluster=self.cluster, gateway=self._gateway, members=tuple(members))

    def candidates(self, env: Key) -> tuple[MemberCandidate, ...]:
        """Return other clusters' members of an environment, from fresh announcements."""
        now, moment = self._clock.now(), self._clock.monotonic()
        found: list[MemberCandidate] = []
        for cluster, known in self._known.items():
            heard = moment - known.received_at
            if heard > FRESH_SECONDS:
                continue
            for item in known.announcement.members:
                if (item.namespace, item.env) != env:
                    continue
                left = item.saturated_seconds - heard
                member = MemberSnapshot(
                    name=item.name,
                    pool=Key(item.namespace, item.pool),
                    priority=item.priority,
                    scaling_group=item.scaling_group,
                    idle=max(item.idle - known.sent.get(item.pool, 0), 0),
                    pending=item.pending,
                    headroom=item.headroom,
                    saturated_until=now + timedelta(seconds=left) if left > 0 else None,
                )
                taken_at = now - timedelta(seconds=item.age_seconds + heard)
                found.append(candidate(member, now=now, taken_at=taken_at, cluster=cluster))
        return tuple(found)

    async def run(self) -> None:
        """Poll all peers until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for peer in self._peers.values():
                    tasks.create_task(self._follow(peer), name=f"follow cluster {peer.cluster}")
        finally:
            # Abandoned claims that cannot be reported any more are left to their timeout.
            leavings = tuple(self._abandon_tasks)
            for task in leavings:
                task.cancel()
            await asyncio.gather(*leavings, return_exceptions=True)

    async def _follow(self, peer: PeerCluster) -> None:
        was_reachable = True
        while True:
            try:
                data, _ = await self._transport.call(
                    peer, "GET", f"{PREFIX}/snapshot", b"", timeout_seconds=POLL_TIMEOUT_SECONDS
                )
                announcement = msgspec.json.decode(data, type=Announcement)
                if announcement.cluster != peer.cluster:
                    raise ConflictError(f"{peer.url} is {announcement.cluster}, not {peer.cluster}")
                self._known[peer.cluster] = _Known(announcement, self._clock.monotonic(), {})
                was_reachable = True
            except (PaddockError, msgspec.DecodeError) as error:
                if was_reachable:
                    facts = fields(cluster=peer.cluster, error=str(error))
                    log.warning("peer cluster does not answer", extra=facts)
                was_reachable = False
            await asyncio.sleep(ASK_SECONDS)

    # ---- forwarding claims ---------------------------------------------------------------

    async def claim(
        self, caller: Caller, request: NewSandbox, env: Key, where: MemberCandidate
    ) -> Sandbox:
        """Return a sandbox of another cluster; after an error there is none."""
        peer = self._peers[where.cluster]
        sandbox_id = remote_id(where.cluster)
        if (known := self._known.get(where.cluster)) is not None:
            known.sent[where.pool.name] = known.sent.get(where.pool.name, 0) + 1
        wait_limit = WAIT_SECONDS if not where.can_serve else TAKE_SECONDS
        claim_timeout = min(request.claim_timeout_seconds, wait_limit)
        wanted = structs.replace(
            request,
            template=f"{env.namespace}/{env.name}",
            claim_timeout_seconds=claim_timeout,
            ready_timeout_seconds=HAND_OVER_SECONDS,
            sandbox_id=sandbox_id,
        )
        body = msgspec.json.encode(
            ForwardedClaim(
                team=caller.team,
                role=caller.role,
                key_id=caller.key_id if caller.scopes else "",
                request=wanted,
                via=(self.cluster,),
            )
        )
        timeout = claim_timeout + HAND_OVER_SECONDS
        outcome = "refused"
        try:
            data, _ = await self._transport.call(
                peer, "POST", f"{PREFIX}/claims", body, timeout_seconds=timeout
            )
            outcome = "served"
            return codec.decode(Sandbox, data)
        except (asyncio.CancelledError, UnavailableError, DeadlineExceededError):
            # It may have been created and the reply lost: no client will use it.
            outcome = "lost"
            self._abandon_later(peer, sandbox_id)
            raise
        finally:
            _FORWARDED.labels(where.cluster, outcome).inc()

    def _abandon_later(self, peer: PeerCluster, sandbox_id: str) -> None:
        task = asyncio.get_running_loop().create_task(
            self._abandon(peer, sandbox_id), name=f"abandon {sandbox_id}"
        )
        self._abandon_tasks.add(task)
        task.add_done_callback(self._abandon_tasks.discard)

    async def _abandon(self, peer: PeerCluster, sandbox_id: str) -> None:
        body = msgspec.json.encode(AbandonedClaim(sandbox_id))
        for attempt in range(_ABANDON_TRIES):
            try:
                await self._transport.call(
                    peer, "POST", f"{PREFIX}/abandon", body, timeout_seconds=POLL_TIMEOUT_SECONDS
                )
            except PaddockError:
                await asyncio.sleep(2.0**attempt)
            else:
                return
        facts = fields(cluster=peer.cluster, sandbox=sandbox_id)
        log.warning("abandoned claim could not be reported; it ends with its timeout", extra=facts)

    # ---- receiving claims ----------------------------------------------------------------

    def admit(self, claim: ForwardedClaim) -> NewSandbox:
        """Check a forwarded claim; `ConflictError` if it was forwarded too often."""
        if self.cluster in claim.via or len(claim.via) > MAX_HOPS:
            way = " → ".join((*claim.via, self.cluster))
            raise ConflictError(f"the claim was forwarded too often: {way}")
        if tag_in(claim.request.sandbox_id) != tag_of(self.cluster):
            raise ConflictError("the claim is meant for another cluster")
        return structs.replace(claim.request, is_forwarded=True)

    def abandon(self, sandbox_id: str) -> None:
        """Record that no client waits for a claim that may still be in flight."""
        self._abandoned[sandbox_id] = None
        while len(self._abandoned) > _KEPT:
            del self._abandoned[next(iter(self._abandoned))]

    def is_abandoned(self, sandbox_id: str) -> bool:
        """Whether no client waits for a claim any more."""
        return sandbox_id in self._abandoned

    # ---- sandboxes of other clusters -----------------------------------------------------

    def owner_cluster(self, sandbox_id: str) -> PeerCluster | None:
        """Return the other cluster that owns a sandbox, by the tag in its id."""
        tag = tag_in(sandbox_id)
        return self._by_tag.get(tag) if tag else None

    async def find(self, sandbox_id: str) -> tuple[Sandbox, str]:
        """Return a sandbox of another cluster and its gateway; `NotFoundError` if there is none."""
        peer = self.owner_cluster(sandbox_id)
        if peer is None:
            raise NotFoundError("the sandbox was not found")
        data, headers = await self._transport.call(
            peer,
            "GET",
            f"{PREFIX}/sandboxes/{sandbox_id}",
            b"",
            timeout_seconds=POLL_TIMEOUT_SECONDS,
        )
        gateway = headers.get(GATEWAY, "")
        if not gateway:
            raise UnavailableError(f"cluster {peer.cluster} did not return its gateway address")
        return codec.decode(Sandbox, data), gateway

    async def forward(
        self, sandbox_id: str, call: ForwardedCall, *, timeout_seconds: float
    ) -> ForwardedReply:
        """Forward a call to the cluster that owns the sandbox."""
        peer = self.owner_cluster(sandbox_id)
        if peer is None:
            raise NotFoundError("the sandbox was not found")
        return await self._forward(peer, call, timeout_seconds)

    async def forward_to_all(
        self, call: ForwardedCall
    ) -> tuple[dict[str, ForwardedReply], tuple[str, ...]]:
        """Forward a call to every other cluster; return replies, and clusters without a reply."""
        replies: dict[str, ForwardedReply] = {}

        async def ask(peer: PeerCluster) -> None:
            try:
                replies[peer.cluster] = await self._forward(peer, call, POLL_TIMEOUT_SECONDS)
            except (PaddockError, msgspec.DecodeError) as error:
                facts = fields(cluster=peer.cluster, path=call.path, error=str(error))
                log.info("peer cluster did not reply", extra=facts)

        async with asyncio.TaskGroup() as tasks:
            for peer in self._peers.values():
                # A cluster that has not replied recently must not delay the reply.
                if self._is_fresh(peer.cluster):
                    tasks.create_task(ask(peer), name=f"ask cluster {peer.cluster}")
        return replies, tuple(name for name in self._peers if name not in replies)

    def _is_fresh(self, cluster: str) -> bool:
        known = self._known.get(cluster)
        return known is not None and self._clock.monotonic() - known.received_at <= FRESH_SECONDS

    async def _forward(
        self, peer: PeerCluster, call: ForwardedCall, timeout_seconds: float
    ) -> ForwardedReply:
        data, _ = await self._transport.call(
            peer,
            "POST",
            f"{PREFIX}/calls",
            msgspec.json.encode(call),
            timeout_seconds=timeout_seconds,
        )
        return msgspec.json.decode(data, type=ForwardedReply)

    @property
    def gateway(self) -> str:
        """Address of this cluster's sandboxes: `host:port`."""
        return self._gateway
