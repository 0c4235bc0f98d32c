"""A pool, its autoscaler and a trace of claims, in virtual time: what would have happened?

The decisions are the very ones that the controller makes; only the sandboxes are pretended. Used
by `paddock simulate` and by the tests that hold the autoscaler to its promises for any trace.
"""

import csv
import heapq
import random
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from msgspec import Struct, structs

from paddock.controllers.env.autoscale import Action, Decision, Group, Member, decide
from paddock.controllers.env.formulas import decayed_rate
from paddock.kit.errors import InvalidError
from paddock.resources.kinds.env import ScalingGroup
from paddock.resources.kinds.pool import AutoscalingState

EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
PERIOD_SECONDS = 10.0
_ARRIVE, _READY, _END, _LOOK = range(4)


class Claim(Struct, frozen=True):
    """One claim of a trace."""

    at: float
    """Seconds from the beginning."""
    duration: float
    """How long the sandbox is used."""


class Sample(Struct, frozen=True, kw_only=True):
    """How things stood at one instant."""

    at: float
    replicas: int
    idle: int
    running: int
    starting: int
    queue: int

    @property
    def demand(self) -> int:
        """In use and waited for."""
        return self.running + self.queue


class Step(Struct, frozen=True):
    """One decision, and the demand that it was made for."""

    at: float
    before: int
    demand: int
    floor: int
    decision: Decision


class Outcome(Struct, frozen=True, kw_only=True):
    """What happened."""

    samples: tuple[Sample, ...]
    steps: tuple[Step, ...]
    waits: tuple[tuple[float, float], ...]
    """When each claim that was served came, and how long it waited."""
    unserved: int
    """Claims that still waited at the end."""


class Scenario(Struct, frozen=True, kw_only=True):
    """What is simulated."""

    group: ScalingGroup = ScalingGroup()
    minimum: int = 0
    maximum: int | None = None
    start_seconds: float = 0.5
    """From wanting a sandbox to having it."""
    capacity: int | None = None
    """What admission allows; `None` is everything."""
    settle_seconds: float = 0.0
    """How long to go on looking after the last claim has ended."""


class Simulation:
    """One run."""

    def __init__(self, scenario: Scenario, claims: Iterable[Claim]) -> None:
        self._scenario = scenario
        self._now = 0.0
        self._number = 0
        self._events: list[tuple[float, int, int, Claim | None]] = []
        self._replicas = 0
        self._idle: deque[float] = deque()
        """Since when each has been idle, oldest first."""
        self._starting = 0
        self._void = 0
        """Starts under way that are no longer wanted."""
        self._running = 0
        self._queue: deque[Claim] = deque()
        self._claims_since = 0
        self._last_claim: datetime | None = None
        self._state = AutoscalingState()
        self._samples: list[Sample] = []
        self._steps: list[Step] = []
        self._waits: list[tuple[float, float]] = []
        self._last = 0.0
        for claim in claims:
            self._push(claim.at, _ARRIVE, claim)
            self._last = max(self._last, claim.at + claim.duration)

    def run(self) -> Outcome:
        """Run to the end of the trace."""
        self._push(0.0, _LOOK, None)
        end = self._last + self._scenario.settle_seconds + PERIOD_SECONDS
        while self._events and self._events[0][0] <= end:
            self._now, kind, _, claim = heapq.heappop(self._events)
            self._happen(kind, claim)
            self._serve()
            self._sample()
        return Outcome(
            samples=tuple(self._samples),
            steps=tuple(self._steps),
            waits=tuple(self._waits),
            unserved=len(self._queue),
        )

    def _push(self, at: float, kind: int, claim: Claim | None) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, kind, self._number, claim))

    def _happen(self, kind: int, claim: Claim | None) -> None:
        if kind == _ARRIVE and claim is not None:
            self._queue.append(claim)
            self._serve()
            if self._queue:
                self._look()
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
            self._look()
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

    def _look(self) -> None:
        """Take a snapshot, decide, and make it so."""
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
        member = Member(
            name="pool",
            replicas=self._replicas,
            idle=len(self._idle),
            running=self._running,
            idle_ages=tuple(self._now - since for since in self._idle),
            minimum=scenario.minimum,
            maximum=scenario.maximum,
            state=state,
        )
        group = Group(policy=scenario.group, members=(member,), now=now, queue=len(self._queue))
        (decision,) = decide(group)
        demand = self._running + len(self._queue)
        floor = max(scenario.minimum, group.floor)
        self._steps.append(Step(self._now, self._replicas, demand, floor, decision))
        self._state = decision.state
        self._replicas = self._admit(decision)
        self._fill()

    def _admit(self, decision: Decision) -> int:
        capacity = self._scenario.capacity
        if decision.action is not Action.GROW or capacity is None or decision.target <= capacity:
            return decision.target
        cooldown = timedelta(seconds=self._scenario.group.saturation_cooldown_seconds)
        self._state = _saturated(self._state, self._moment() + cooldown)
        return max(min(decision.target, capacity), self._replicas)

    def _fill(self) -> None:
        """Make what is missing, let go what is too much: starting ones first, then the newest."""
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
        sample = Sample(
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


def read_trace(path: Path) -> tuple[Claim, ...]:
    """Read a CSV with the columns `at` and `duration` (seconds) and perhaps `count`."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        if rows.fieldnames is None or not {"at", "duration"} <= set(rows.fieldnames):
            raise InvalidError(
                f"{path} needs the columns at and duration", hint="the first line names them"
            )
        claims: list[Claim] = []
        for number, row in enumerate(rows, start=2):
            claims.extend(_claims(row, f"{path}:{number}"))
    return tuple(sorted(claims, key=lambda claim: claim.at))


def _claims(row: dict[str, str], where: str) -> Sequence[Claim]:
    try:
        claim = Claim(float(row["at"]), float(row["duration"]))
        count = int(row.get("count") or 1)
    except (TypeError, ValueError) as error:
        raise InvalidError(f"{where}: {error}") from error
    if claim.at < 0 or claim.duration < 0 or count < 0:
        raise InvalidError(f"{where}: nothing here can be negative")
    return [claim] * count


def generated(
    kind: str, *, seconds: float, rate: float, duration: float, seed: int = 0
) -> tuple[Claim, ...]:
    """Make a trace: `steady`, `bursts` (ten times the rate, a tenth of the time) or `wave`."""
    draw = random.Random(seed)  # noqa: S311 - repeatable on purpose
    claims: list[Claim] = []
    at = 0.0
    while True:
        at += draw.expovariate(max(_rate(kind, at, rate), 1e-9))
        if at >= seconds:
            return tuple(claims)
        claims.append(Claim(at, draw.expovariate(1 / duration)))


def _rate(kind: str, at: float, rate: float) -> float:
    match kind:
        case "steady":
            return rate
        case "bursts":
            return rate * 10 if at % 600 < 60 else rate * 0.1
        case "wave":
            return rate * (0.1 + abs((at % 3600) / 1800 - 1) * 1.8)
        case _:
            raise InvalidError(f"there is no trace {kind!r}; choose steady, bursts or wave")
