"""Invariants under faults, checked over every version of the store, the runtime, and clients'
answers.

`Audit` watches the store and checks every change when it happens. `settled` checks the world when
the faults are over and time has passed. Each violation is one line.
"""

import asyncio
from collections import Counter
from contextlib import aclosing
from datetime import datetime, timedelta

from paddock.cache import states
from paddock.claims.quota.ledger import Dimension, QuotaScope, counted_claim
from paddock.controllers.sandbox.lifecycle import TRANSITIONS
from paddock.resources.kinds.checkpoint import Checkpoint, CheckpointPhase
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.meta import Key
from paddock.runtime.port import InstanceState
from paddock.store.port import Change
from tests.faults.storm import Known, Storm
from tests.faults.worlds import FaultyWorld

_MOVES = {(before, after) for (before, _), after in TRANSITIONS.items()}
_RESTING = (InstanceState.FROZEN, InstanceState.HIBERNATED, InstanceState.STOPPED)
_ROUNDING = timedelta(seconds=1)
"""Deletion timestamps have whole seconds, as in Kubernetes."""


class Audit:
    """Checks every version of every sandbox as it is written."""

    def __init__(self, world: FaultyWorld, *, most_claimed: int | None) -> None:
        self.violations: list[str] = []
        self.ended: dict[str, str] = {}
        """Why each deleted sandbox was deleted, by uid, as seen in the store."""
        self.most_seen = 0
        self._world = world
        self._most_claimed = most_claimed
        self._known: dict[str, Sandbox] = {}
        self._claimed: set[str] = set()
        self._ids: dict[str, str] = {}

    async def follow(self) -> None:
        """Watch the store until cancelled."""
        async with aclosing(self._world.store.watch(Sandbox)) as events:
            async for event in events:
                if event.object is not None:
                    self._take(event.change, event.object)

    def _take(self, change: Change, new: Sandbox) -> None:
        uid = new.metadata.uid
        old = self._known.get(uid)
        if old is not None and old.spec.claim is not None:
            lock = new.spec.claim.lock if new.spec.claim else None
            if lock != old.spec.claim.lock:
                self._report(new, "was claimed twice")
        if old is not None and old.status.phase is not new.status.phase:
            move = (old.status.phase, new.status.phase)
            if move not in _MOVES:
                self._report(new, f"went from {move[0]} to {move[1]}")
        if new.is_deleting and (old is None or not old.is_deleting):
            self._deletion(new)
        if change is Change.DELETED:
            self._known.pop(uid, None)
            self._claimed.discard(uid)
            return
        self._known[uid] = new
        self._count(new)

    def _count(self, new: Sandbox) -> None:
        claim, uid = new.spec.claim, new.metadata.uid
        if claim is not None and self._ids.setdefault(claim.sandbox_id, uid) != uid:
            self._report(new, f"has the id {claim.sandbox_id} of another")
        if counted_claim(new) is None:
            self._claimed.discard(uid)
            return
        self._claimed.add(uid)
        self.most_seen = max(self.most_seen, len(self._claimed))
        if self._most_claimed is not None and len(self._claimed) > self._most_claimed:
            self._report(new, f"is number {len(self._claimed)}, the quota is {self._most_claimed}")

    def _deletion(self, sandbox: Sandbox) -> None:
        at, end = sandbox.metadata.deletion_timestamp, sandbox.spec.shutdown_time
        over = end is not None and at is not None and at >= end - _ROUNDING
        self.ended[sandbox.metadata.uid] = "expired" if over else "deleted"

    def _report(self, sandbox: Sandbox, what: str) -> None:
        self.violations.append(f"{sandbox.key} ({sandbox.metadata.uid}) {what}")


async def settled(world: FaultyWorld, storm: Storm, audit: Audit) -> list[str]:
    """Check the world after the storm; return all violations."""
    found = list(audit.violations)
    page = await world.store.list(Sandbox)
    sandboxes = {item.metadata.uid: item for item in page.items}
    instances = {item.uid: item.state for item in await world.runtime.instances()}
    found += storm.violations
    found += _double_claims(storm)
    found += _orphans(sandboxes, instances)
    found += _phases(sandboxes, instances, world.clock.now())
    found += _acknowledged_sandboxes(world, storm, audit, sandboxes)
    found += _leftovers(storm, sandboxes)
    found += await _checkpoints(world)
    found += await _pool(world)
    for plane in world.planes:
        if (error := plane.failure()) is not None:
            found.append(f"a control plane ended by itself: {error!r}")
        if not plane.control.provider.waits.is_idle:
            found.append("a wait task was left behind")
        used = plane.control.ledger.used("team:default", Dimension.COUNT, QuotaScope.ALL)
        claimed = sum(1 for item in sandboxes.values() if counted_claim(item) is not None)
        if used != claimed:
            found.append(f"the ledger counts {used} sandboxes, the store has {claimed}")
    return found


def _double_claims(storm: Storm) -> list[str]:
    given = Counter(known.uid for known in storm.given)
    return [f"{uid} was given to {count} clients" for uid, count in given.items() if count > 1]


def _orphans(sandboxes: dict[str, Sandbox], instances: dict[str, InstanceState]) -> list[str]:
    return [f"instance {uid} belongs to nobody" for uid in instances.keys() - sandboxes.keys()]


def _phases(
    sandboxes: dict[str, Sandbox], instances: dict[str, InstanceState], now: datetime
) -> list[str]:
    found: list[str] = []
    for uid, sandbox in sandboxes.items():
        phase, state = sandbox.status.phase, instances.get(uid)
        if sandbox.is_deleting:
            found.append(f"{sandbox.key} is still being deleted")
        elif states.state(sandbox, now) is states.SandboxState.DEAD:
            if phase is not Phase.FAILED:
                found.append(f"{sandbox.key} is past its deadline and still there")
        elif phase is Phase.RUNNING and (state is not InstanceState.RUNNING or sandbox.spec.paused):
            found.append(f"{sandbox.key} is Running, its instance {state}")
        elif phase is Phase.PAUSED and (state not in _RESTING or not sandbox.spec.paused):
            found.append(f"{sandbox.key} is Paused, its instance {state}")
        elif phase not in (Phase.RUNNING, Phase.PAUSED):
            found.append(f"{sandbox.key} is stuck in {phase}: {sandbox.status.message}")
    return found


def _acknowledged_sandboxes(
    world: FaultyWorld, storm: Storm, audit: Audit, sandboxes: dict[str, Sandbox]
) -> list[str]:
    """A sandbox that a client was given exists in its last acknowledged state, unless ended."""
    found: list[str] = []
    for known in storm.given:
        sandbox = sandboxes.get(known.uid)
        if sandbox is None:
            ended = audit.ended.get(known.uid, "lost")
            may_expire = known.may_have_expired() and not known.is_auto_paused
            if not (known.may_be_killed or (ended == "expired" and may_expire)):
                found.append(f"{known.sandbox_id} is gone ({ended}) and nobody asked for that")
            continue
        if sandbox.spec.claim is None or sandbox.spec.claim.sandbox_id != known.sandbox_id:
            found.append(f"{known.sandbox_id} was given away")
        elif known.is_killed:
            found.append(f"{known.sandbox_id} was killed and is there")
        elif known.uid in storm.crashed:
            continue
        else:
            found += _as_told(world, storm, known, sandbox)
    return found


def _as_told(world: FaultyWorld, storm: Storm, known: Known, sandbox: Sandbox) -> list[str]:
    found: list[str] = []
    phase = sandbox.status.phase
    told = {True: Phase.PAUSED, False: Phase.RUNNING}
    if storm.is_certain(known) and phase is not told[bool(known.paused)]:
        found.append(f"{known.sandbox_id} should be {told[known.paused]} and is {phase}")
    if phase is Phase.FAILED:
        found.append(f"{known.sandbox_id} failed: {sandbox.status.message}")
    elif world.runtime.files(known.uid).get("marker") != known.marker:
        found.append(f"{known.sandbox_id} has lost its file")
    return found


def _leftovers(storm: Storm, sandboxes: dict[str, Sandbox]) -> list[str]:
    """A create that failed left no claim behind."""
    given = {known.uid for known in storm.given}
    left: list[str] = []
    for uid, sandbox in sandboxes.items():
        claim = sandbox.spec.claim
        if claim is None or uid in given or claim.metadata.get("op") in storm.cut:
            continue
        left.append(f"{sandbox.key} is claimed by a request that was refused: {claim.metadata}")
    return left


async def _checkpoints(world: FaultyWorld) -> list[str]:
    objects = {item.metadata.uid: item for item in (await world.store.list(Checkpoint)).items}
    stored = {item.id for item in await world.runtime.checkpoints()}
    found = [f"stored state {uid} belongs to nobody" for uid in stored - objects.keys()]
    for uid, item in objects.items():
        if item.status.phase is CheckpointPhase.SUCCEEDED and uid not in stored:
            found.append(f"checkpoint {item.key} has lost its data")
        if item.status.phase not in (CheckpointPhase.SUCCEEDED, CheckpointPhase.FAILED):
            found.append(f"checkpoint {item.key} is stuck in {item.status.phase}")
    return found


async def _pool(world: FaultyWorld) -> list[str]:
    pool = await world.store.get(SandboxPool, Key("default", "base"))
    now = world.clock.now()
    idle = [
        item
        for item in (await world.store.list(Sandbox)).items
        if item.spec.claim is None and states.state(item, now) is states.SandboxState.AVAILABLE
    ]
    if len(idle) != pool.spec.replicas:
        return [f"the pool has {len(idle)} sandboxes, not {pool.spec.replicas}: {pool.status}"]
    return []


async def hold(world: FaultyWorld, storm: Storm, audit: Audit, *, seconds: float) -> None:
    """Fail with every violation and the seed that replays it."""
    await world.end_faults()
    await asyncio.sleep(seconds / 2)
    await storm.repeat_unanswered()
    await asyncio.sleep(seconds / 2)
    violations = await settled(world, storm, audit)
    assert not violations, "\n".join(
        (f"seed {world.seed}, after {dict(world.faults.seen)}:", *violations)
    )
