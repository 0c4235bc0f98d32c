"""Simulates a pool and its autoscaler on a trace of claims, in virtual time.

The decisions are those of the controller; only the sandboxes are simulated. Used by `paddock
simulate` and by property tests of the autoscaler.
"""

import csv
import heapq
import random
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from msgspec import Struct, structs

from paddock.controllers.env.autoscale import (
    Decision,
    ScaledGroup,
    ScaledMember,
    ScalingAction,
    decide,
)
from paddock.controllers.env.formulas import decayed_rate
from paddock.kit.errors import InvalidError
from paddock.resources.kinds.env import ScalingGroup
from paddock.resources.kinds.pool import AutoscalingState

EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
PERIOD_SECONDS = 10.0
_ARRIVE, _READY, _END, _LOOK = range(4)


class TraceClaim(Struct, frozen=True):
    """One claim of a trace."""

    at: float
    """Seconds from the start."""
    duration: float
    """How long the sandbox is used, in seconds."""


class SimulationSample(Struct, frozen=True, kw_only=True):
    """The state at one instant."""

    at: float
    replicas: int
    idle: int
    running: int
    starting: int
    queue: int

    @property
    def demand(self) -> int:
        """Running sandboxes and waiting claims."""
        return self.running + self.queue


class SimulationStep(Struct, frozen=True):
    """One decision, and the demand at that time."""

    at: float
    before: int
    demand: int
    floor: int
    decision: Decision


class SimulationResult(Struct, frozen=True, kw_only=True):
    """The result of a run."""

    samples: tuple[SimulationSample, ...]
    steps: tuple[SimulationStep, ...]
    waits: tuple[tuple[float, float], ...]
    """Arrival and waiting time of each served claim."""
    unserved: int
    """Claims that were still waiting at the end."""


class Scenario(Struct, frozen=True, kw_only=True):
    """Parameters of a simulation."""

    group: ScalingGroup = ScalingGroup()
    minimum: int = 0
    maximum: int | None = None
    start_seconds: float = 0.5
    """Start time of a sandbox."""
    capacity: int | None = None
    """Limit of admission; `None` means unlimited."""
    settle_seconds: float = 0.0
    """How long the run continues after the last claim has ended."""


class Simulation:
    """One run of a simulation."""

    def __init__(self, scenario: Scenario, claims: Iterable[TraceClaim]) -> None:
        self._scenario = scenario
        self._now = 0.0
        self._number = 0
        self._events: list[tuple[float, int, int, TraceClaim | None]] = []
        self._replicas = 0
        self._idle: deque[float] = deque()
        """Time since when each sandbox is idle, oldest first."""
        self._starting = 0
        self._void = 0
        """Starts in flight that are no longer wanted."""
        self._running = 0
        self._queue: deque[TraceClaim] = deque()
        self._claims_since = 0
        self._last_claim: datetime | None = None
        self._state = AutoscalingState()
        self._samples: list[SimulationSample] = []
        self._steps: list[SimulationStep] = []
        self._waits: list[tuple[float, float]] = []
        self._last = 0.0
        for claim in claims:
            self._push(claim.at, _ARRIVE, claim)
            self._last = max(self._last, claim.at + claim.duration)

    def run(self) -> SimulationResult:
        """Run the trace to its end."""
        self._push(0.0, _LOOK, None)
        end = self._last + self._scenario.settle_seconds + PERIOD_SECONDS
        while self._events and self._events[0][0] <= end:
            self._now, kind, _, claim = heapq.heappop(self._events)
            self._happen(kind, claim)
            self._serve()
            self._sample()
        return SimulationResult(
            samples=tuple(self._samples),
            steps=tuple(self._steps),
            waits=tuple(self._waits),
            unserved=len(self._queue),
        )

    def _push(self, at: float, kind: int, claim: TraceClaim | None) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, kind, self._number, claim))

    def _happen(self, kind: int, claim: TraceClaim | None) -> None:
        if kind == _ARRIVE and claim is not None:
            self._queue.append(claim)
            self._serve()
            if self._queue:
                self._autoscale()
        elif kind == _READY:
            if self._void:
                self._void -= 1
            else:
                self._starting -= 1
                self._idle.append(self._now)
        elif kind == _END:
            self._running -= 1
            self._fill()
        elif kind == _LOOK:
            self._autoscale()
            self._push(self._now + PERIOD_SECONDS, _LOOK, None)

    def _serve(self) -> None:
        while self._queue and self._idle:
            claim = self._queue.popleft()
            self._idle.popleft()
            self._running += 1
            self._claims_since += 1
            self._waits.append((claim.at, self._now - claim.at))
            self._last_claim = self._moment()
            self._push(self._now + claim.duration, _END, None)

    def _moment(self) -> datetime:
        return EPOCH + timedelta(seconds=self._now)

    def _autoscale(self) -> None:
        """Take a snapshot, decide, and apply the decision."""
        scenario, now = self._scenario, self._moment()
        rate = decayed_rate(
            self._state.claim_rate,
            self._state.claim_rate_time,
            self._claims_since,
            now,
            window_seconds=scenario.group.forecast.window_seconds,
        )
        self._claims_since = 0
        state = _with_claims(self._state, rate, now, self._last_claim)
        member = ScaledMember(
            name="pool",
            replicas=self._replicas,
            idle=len(self._idle),
            running=self._running,
            idle_ages=tuple(self._now - since for since in self._idle),
            minimum=scenario.minimum,
            maximum=scenario.maximum,
            state=state,
        )
        group = ScaledGroup(
            policy=scenario.group, members=(member,), now=now, queue=len(self._queue)
        )
        (decision,) = decide(group)
        demand = self._running + len(self._queue)
        floor = max(scenario.minimum, group.floor)
        self._steps.append(SimulationStep(self._now, self._replicas, demand, floor, decision))
        self._state = decision.state
        self._replicas = self._admit(decision)
        self._fill()

    def _admit(self, decision: Decision) -> int:
        capacity = self._scenario.capacity
        if (
            decision.action is not ScalingAction.GROW
            or capacity is None
            or decision.target <= capacity
        ):
            return decision.target
        cooldown = timedelta(seconds=self._scenario.group.saturation_cooldown_seconds)
        self._state = _saturated(self._state, self._moment() + cooldown)
        return max(min(decision.target, capacity), self._replicas)

    def _fill(self) -> None:
        """Create what is missing; remove surplus: starting ones first, then the newest."""
        present = self._running + len(self._idle) + self._starting
        for _ in range(self._replicas - present):
            self._starting += 1
            self._push(self._now + self._scenario.start_seconds, _READY, None)
        for _ in range(present - self._replicas):
            if self._starting:
                self._starting -= 1
                self._void += 1
            elif self._idle:
                self._idle.pop()

    def _sample(self) -> None:
        sample = SimulationSample(
            at=self._now,
            replicas=self._replicas,
            idle=len(self._idle),
            running=self._running,
            starting=self._starting,
            queue=len(self._queue),
        )
        if self._samples and self._samples[-1].at == self._now:
            self._samples[-1] = sample
        else:
            self._samples.append(sample)


def _with_claims(
    state: AutoscalingState, rate: float, now: datetime, last: datetime | None
) -> AutoscalingState:
    return structs.replace(
        state, claim_rate=rate, claim_rate_time=now, last_claim_time=last or state.last_claim_time
    )


def _saturated(state: AutoscalingState, until: datetime) -> AutoscalingState:
    return structs.replace(state, saturated_until=until, last_attempt_result="JustRight")


# ---- traces ----------------------------------------------------------------------------------


def read_trace(path: Path) -> tuple[TraceClaim, ...]:
    """Read a CSV with the columns `at` and `duration` (seconds), optionally `count`."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        if rows.fieldnames is None or not {"at", "duration"} <= set(rows.fieldnames):
            raise InvalidError(
                f"{path} needs the columns at and duration", hint="the first line names them"
            )
        claims: list[TraceClaim] = []
        for number, row in enumerate(rows, start=2):
            claims.extend(_claims(row, f"{path}:{number}"))
    return tuple(sorted(claims, key=lambda claim: claim.at))


def _claims(row: dict[str, str], where: str) -> Sequence[TraceClaim]:
    try:
        claim = TraceClaim(float(row["at"]), float(row["duration"]))
        count = int(row.get("count") or 1)
    except (TypeError, ValueError) as error:
        raise InvalidError(f"{where}: {error}") from error
    if claim.at < 0 or claim.duration < 0 or count < 0:
        raise InvalidError(f"{where}: values must not be negative")
    return [claim] * count


def generated(
    kind: str, *, seconds: float, rate: float, duration: float, seed: int = 0
) -> tuple[TraceClaim, ...]:
    """Generate a trace: `steady`, `bursts` (10x rate, 10% of the time) or `wave`."""
    draw = random.Random(seed)  # noqa: S311 - repeatable on purpose
    claims: list[TraceClaim] = []
    at = 0.0
    while True:
        at += draw.expovariate(max(_rate(kind, at, rate), 1e-9))
        if at >= seconds:
            return tuple(claims)
        claims.append(TraceClaim(at, draw.expovariate(1 / duration)))


def _rate(kind: str, at: float, rate: float) -> float:
    match kind:
        case "steady":
            return rate
        case "bursts":
            return rate * 10 if at % 600 < 60 else rate * 0.1
        case "wave":
            return rate * (0.1 + abs((at % 3600) / 1800 - 1) * 1.8)
        case _:
            raise InvalidError(f"unknown trace {kind!r}; choose steady, bursts or wave")
