"""Several control planes, one per cluster, that serve each other's claims.

Each asks the others every moment what they have, and believes an answer for a bounded time. A
claim that finds nothing here goes to one that has: once, never further. Nothing else is shared:
specs stay where they are, and a cluster that is cut off goes on by itself.
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
    Abandoned,
    Announced,
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
"""Between two questions to a peer."""
PATIENCE_SECONDS = 2.0
"""A peer that takes longer to say what it has is not believed to have any."""
FRESH_SECONDS = 5.0
"""For so long an answer is believed."""
WAIT_SECONDS = 10.0
"""A claim waits at most so long in another cluster's line."""
TAKE_SECONDS = 1.0
"""Where something is idle there is hardly a line."""
HAND_OVER_SECONDS = 5.0
"""What is idle there must be here within so long; a cluster that hangs costs no more than this."""
_ABANDON_TRIES = 5
_KEPT = 1024
_FORWARDED = metrics.counter(
    "paddock_federation_claims_total", "Claims sent to other clusters.", ("cluster", "outcome")
)


class Transport(Protocol):
    """The way to peers: signed HTTP."""

    async def call(
        self, peer: PeerCluster, method: str, path: str, body: bytes, *, timeout_seconds: float
    ) -> tuple[bytes, dict[str, str]]:
        """Ask a peer; `PaddockError` is its answer, `UnavailableError` may be no answer at all."""
        ...


class _Known(Struct):
    """What a peer said last."""

    announcement: Announcement
    heard_at: float
    sent: dict[str, int]
    """Claims sent to each of its pools since: its word does not know of them."""


class Federation:
    """The other clusters, as this one knows them."""

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
        self._leavings: set[asyncio.Task[None]] = set()
        self._abandoned: dict[str, None] = {}

    # ---- what there is -------------------------------------------------------------------

    def announcement(self, queue: ClaimQueue) -> Announcement:
        """Say what this cluster has."""
        now = self._clock.now()
        members: list[Announced] = []
        for env, snapshot in queue.snapshots().items():
            idle = {item.pool: item.idle for item in queue.candidates(env)}
            for member in snapshot.members:
                until = member.saturated_until
                saturated = (until - now).total_seconds() if until is not None else 0.0
                members.append(
                    Announced(
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
        """Give other clusters' members of an environment, as far as their word is fresh."""
        now, moment = self._clock.now(), self._clock.monotonic()
        found: list[MemberCandidate] = []
        for cluster, known in self._known.items():
            heard = moment - known.heard_at
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
        """Ask all peers again and again until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for peer in self._peers.values():
                    tasks.create_task(self._follow(peer), name=f"follow cluster {peer.cluster}")
        finally:
            # What is abandoned and cannot be told any more is left to its timeout.
            leavings = tuple(self._leavings)
            for task in leavings:
                task.cancel()
            await asyncio.gather(*leavings, return_exceptions=True)

    async def _follow(self, peer: PeerCluster) -> None:
        was_heard = True
        while True:
            try:
                data, _ = await self._transport.call(
                    peer, "GET", f"{PREFIX}/snapshot", b"", timeout_seconds=PATIENCE_SECONDS
                )
                told = msgspec.json.decode(data, type=Announcement)
                if told.cluster != peer.cluster:
                    raise ConflictError(f"{peer.url} is {told.cluster}, not {peer.cluster}")
                self._known[peer.cluster] = _Known(told, self._clock.monotonic(), {})
                was_heard = True
            except (PaddockError, msgspec.DecodeError) as error:
                if was_heard:
                    facts = fields(cluster=peer.cluster, error=str(error))
                    log.warning("another cluster does not answer", extra=facts)
                was_heard = False
            await asyncio.sleep(ASK_SECONDS)

    # ---- claims sent away ----------------------------------------------------------------

    async def claim(
        self, caller: Caller, request: NewSandbox, env: Key, where: MemberCandidate
    ) -> Sandbox:
        """Get a sandbox from another cluster; an error means that there is none from there."""
        peer = self._peers[where.cluster]
        sandbox_id = remote_id(where.cluster)
        if (known := self._known.get(where.cluster)) is not None:
            known.sent[where.pool.name] = known.sent.get(where.pool.name, 0) + 1
        line = WAIT_SECONDS if not where.can_serve else TAKE_SECONDS
        patience = min(request.claim_timeout_seconds, line)
        wanted = structs.replace(
            request,
            template=f"{env.namespace}/{env.name}",
            claim_timeout_seconds=patience,
            ready_timeout_seconds=HAND_OVER_SECONDS,
            sandbox_id=sandbox_id,
        )
        body = msgspec.json.encode(
            ForwardedClaim(team=caller.team, role=caller.role, request=wanted, via=(self.cluster,))
        )
        timeout = patience + HAND_OVER_SECONDS
        outcome = "refused"
        try:
            data, _ = await self._transport.call(
                peer, "POST", f"{PREFIX}/claims", body, timeout_seconds=timeout
            )
            outcome = "served"
            return codec.decode(Sandbox, data)
        except (asyncio.CancelledError, UnavailableError, DeadlineExceededError):
            # Perhaps it was made and the reply was lost: nobody will ever use it.
            outcome = "lost"
            self._leave(peer, sandbox_id)
            raise
        finally:
            _FORWARDED.labels(where.cluster, outcome).inc()

    def _leave(self, peer: PeerCluster, sandbox_id: str) -> None:
        task = asyncio.get_running_loop().create_task(
            self._abandon(peer, sandbox_id), name=f"abandon {sandbox_id}"
        )
        self._leavings.add(task)
        task.add_done_callback(self._leavings.discard)

    async def _abandon(self, peer: PeerCluster, sandbox_id: str) -> None:
        body = msgspec.json.encode(Abandoned(sandbox_id))
        for attempt in range(_ABANDON_TRIES):
            try:
                await self._transport.call(
                    peer, "POST", f"{PREFIX}/abandon", body, timeout_seconds=PATIENCE_SECONDS
                )
            except PaddockError:
                await asyncio.sleep(2.0**attempt)
            else:
                return
        facts = fields(cluster=peer.cluster, sandbox=sandbox_id)
        log.warning("an abandoned claim is left to its timeout", extra=facts)

    # ---- claims taken in -----------------------------------------------------------------

    def admit(self, claim: ForwardedClaim) -> NewSandbox:
        """Check a claim that another cluster sent; `ConflictError` where it has come too far."""
        if self.cluster in claim.via or len(claim.via) > MAX_HOPS:
            way = " → ".join((*claim.via, self.cluster))
            raise ConflictError(f"the claim has come too far: {way}")
        if tag_in(claim.request.sandbox_id) != tag_of(self.cluster):
            raise ConflictError("the claim is meant for another cluster")
        return structs.replace(claim.request, is_forwarded=True)

    def abandon(self, sandbox_id: str) -> None:
        """Remember that nobody waits for a claim that may still be under way."""
        self._abandoned[sandbox_id] = None
        while len(self._abandoned) > _KEPT:
            del self._abandoned[next(iter(self._abandoned))]

    def is_abandoned(self, sandbox_id: str) -> bool:
        """Say whether nobody waits for a claim any more."""
        return sandbox_id in self._abandoned

    # ---- sandboxes elsewhere -------------------------------------------------------------

    def home(self, sandbox_id: str) -> PeerCluster | None:
        """Give the cluster that a sandbox's id tells of, if it is another one."""
        tag = tag_in(sandbox_id)
        return self._by_tag.get(tag) if tag else None

    async def find(self, sandbox_id: str) -> tuple[Sandbox, str]:
        """Give a sandbox of another cluster and that cluster's gateway; `NotFoundError`."""
        peer = self.home(sandbox_id)
        if peer is None:
            raise NotFoundError("the sandbox was not found")
        data, headers = await self._transport.call(
            peer, "GET", f"{PREFIX}/sandboxes/{sandbox_id}", b"", timeout_seconds=PATIENCE_SECONDS
        )
        gateway = headers.get(GATEWAY, "")
        if not gateway:
            raise UnavailableError(f"cluster {peer.cluster} does not say where its gateway is")
        return codec.decode(Sandbox, data), gateway

    async def pass_on(
        self, sandbox_id: str, call: ForwardedCall, *, patience: float
    ) -> ForwardedReply:
        """Have another cluster answer a call about a sandbox of its own."""
        peer = self.home(sandbox_id)
        if peer is None:
            raise NotFoundError("the sandbox was not found")
        return await self._answer(peer, call, patience)

    async def pass_round(
        self, call: ForwardedCall
    ) -> tuple[dict[str, ForwardedReply], tuple[str, ...]]:
        """Have every other cluster answer a call; gives the answers, and who gave none."""
        replies: dict[str, ForwardedReply] = {}

        async def ask(peer: PeerCluster) -> None:
            try:
                replies[peer.cluster] = await self._answer(peer, call, PATIENCE_SECONDS)
            except (PaddockError, msgspec.DecodeError) as error:
                facts = fields(cluster=peer.cluster, path=call.path, error=str(error))
                log.info("another cluster gave no answer", extra=facts)

        async with asyncio.TaskGroup() as tasks:
            for peer in self._peers.values():
                # One that has been silent for a while holds nobody up.
                if self._is_heard(peer.cluster):
                    tasks.create_task(ask(peer), name=f"ask cluster {peer.cluster}")
        return replies, tuple(name for name in self._peers if name not in replies)

    def _is_heard(self, cluster: str) -> bool:
        known = self._known.get(cluster)
        return known is not None and self._clock.monotonic() - known.heard_at <= FRESH_SECONDS

    async def _answer(
        self, peer: PeerCluster, call: ForwardedCall, patience: float
    ) -> ForwardedReply:
        data, _ = await self._transport.call(
            peer, "POST", f"{PREFIX}/calls", msgspec.json.encode(call), timeout_seconds=patience
        )
        return msgspec.json.decode(data, type=ForwardedReply)

    @property
    def gateway(self) -> str:
        """Where this cluster's sandboxes are reached."""
        return self._gateway
