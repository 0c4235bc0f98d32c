"""A mixed storm of clients on a manager, and the answers they got."""

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from datetime import datetime, timedelta
from typing import Any

from msgspec import structs

from paddock.claims.requests import NewSandbox
from paddock.kit.errors import ConflictError, NotFoundError, PaddockError
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.meta import Key
from tests.faults.worlds import FaultyWorld, JumpingClock, Plane
from tests.scenario.paddock import CALLER

LONG = 100_000
"""Seconds: a timeout that does not end within a test."""
MOST_ROUNDS = 300
"""How long a client waits for a result."""
CATCH_UP_SECONDS = 10
"""A stopped control plane has seen all changes of others after this time."""
_ROUNDING = timedelta(seconds=1)
"""Deadlines are written in whole seconds, as in Kubernetes."""


class Timeout:
    """When a deadline ends, as far as a client can know."""

    def __init__(self, clock: JumpingClock, seconds: int | None = None) -> None:
        self._clock = clock
        self._seconds = seconds if seconds is not None and seconds < LONG else None
        self._is_over = False
        self.ends: datetime | None = None
        """At the earliest; `None`: not within a test."""
        self.begins()

    def begins(self) -> None:
        """Count from now, or from an earlier start: requests take time and clocks jump."""
        if self._seconds is not None:
            end = self._clock.now() + timedelta(seconds=self._seconds)
            self.ends = min(self.ends or end, end)

    def may_have_expired(self) -> bool:
        """Whether that time has passed, even if the clock was set since."""
        is_past = self.ends is not None and self._clock.now() >= self.ends - _ROUNDING
        self._is_over = self._is_over or is_past
        return self._is_over


class Known:
    """One sandbox as its client sees it."""

    def __init__(self, sandbox: Sandbox, marker: str, timeout: Timeout) -> None:
        assert sandbox.spec.claim is not None
        self.sandbox_id = sandbox.spec.claim.sandbox_id
        self.uid = sandbox.metadata.uid
        self.op = sandbox.spec.claim.metadata.get("op", "")
        """The request that created it or its first ancestor."""
        self.marker = marker
        self.paused: bool | None = False
        """Whether it is paused, by the last answer; `None` after an unclear one."""
        self.is_killed = False
        self.may_be_killed = False
        self.timeouts = [timeout]
        """Its deadline, or the possible ones if an answer was lost."""
        self.never_ends = sandbox.spec.claim.timeout_seconds is None
        self.is_auto_paused = sandbox.spec.claim.auto_pause
        """At its deadline it is paused, not deleted."""

    def may_have_expired(self) -> bool:
        """Whether its deadline may have passed."""
        return any(timeout.may_have_expired() for timeout in self.timeouts)


class ControlPlaneKilled(Exception):  # noqa: N818 - not an error of anybody's: the other side died
    """The control plane was killed before it answered; the result is unknown."""


class Storm:
    """Concurrent clients; each failure that they must not see is a violation.

    They run their rounds, and continue until all planned faults have happened.
    """

    def __init__(
        self,
        world: FaultyWorld,
        *,
        clients: int = 8,
        rounds: int = 14,
        until: Callable[[], bool] = lambda: True,
    ) -> None:
        self.given: list[Known] = []
        self.cut: set[str] = set()
        """Requests without an answer."""
        self.crashed: set[str] = set()
        self.violations: list[str] = []
        self.did: Counter[str] = Counter()
        self._world = world
        self._clients = clients
        self._rounds = rounds
        self._until = until
        self._numbers = itertools.count(1)
        self._random = random.Random(world.seed * 7 + 1)
        self._shared: list[Known] = []
        self._asked: list[Timeout] = []
        """Sandboxes without an answer yet."""

    async def run(self) -> None:
        """Run the rounds of every client."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._clients):
                dice = random.Random(self._world.seed * 1000 + number)
                tasks.create_task(self._client(dice), name=f"client {number}")

    def crash_one(self) -> None:
        """Make some sandbox fail."""
        live = [known for known in self.given if not known.may_be_killed and not known.paused]
        if live:
            known = self._random.choice(live)
            try:
                self._world.runtime.crash(known.uid)
            except NotFoundError:
                return
            self.crashed.add(known.uid)

    async def repeat_unanswered(self) -> None:
        """After the faults, repeat all unanswered requests: then every state is known."""
        for known in self.given:
            plane = self._plane(self._random)
            try:
                if known.may_be_killed and not known.is_killed:
                    with contextlib.suppress(NotFoundError):
                        await self._ask(
                            plane, plane.manager.lifecycle.kill(CALLER, known.sandbox_id)
                        )
                    known.is_killed = True
                elif known.paused is None and not self._is_allowed(known):
                    with contextlib.suppress(ConflictError):  # It is already paused.
                        await self._ask(
                            plane, plane.manager.lifecycle.pause(CALLER, known.sandbox_id)
                        )
                    known.paused = True
                    known.timeouts.clear()
            except PaddockError as error:
                self.violations.append(
                    f"{known.sandbox_id} cannot be asked in end_faults: {error!r}"
                )

    def jump(self, seconds: float) -> None:
        """Set the wall clock; what has expired stays expired if it is set back."""
        for known in self.given:
            known.may_have_expired()
        for timeout in self._asked:
            timeout.may_have_expired()
        self._world.trace.add("trouble: the clock jumps by", seconds)
        self._world.clock.jump(seconds)
        for timeout in self._asked:
            timeout.begins()

    def is_certain(self, known: Known) -> bool:
        """Whether it must exist in its last acknowledged state."""
        return known.paused is not None and not self._is_allowed(known)

    def _is_allowed(self, known: Known) -> bool:
        return known.may_be_killed or known.uid in self.crashed or known.may_have_expired()

    # ---- one client ----------------------------------------------------------------------

    async def _client(self, dice: random.Random) -> None:
        mine: list[Known] = []
        actions: list[tuple[int, Callable[..., Awaitable[None]]]] = [
            (8, self._create),
            (4, self._pause),
            (5, self._connect),
            (3, self._set_timeout),
            (3, self._kill),
            (1, self._snapshot),
            (1, self._fork),
            (1, self._resize),
            (1, self._change_template),
            (2, self._race_for_one),
        ]
        weights = [weight for weight, _ in actions]
        for number in range(MOST_ROUNDS):
            if number >= self._rounds and self._until():
                return
            (_, action), *_ = dice.choices(actions, weights)
            if not self._own(mine):
                action = self._create
            while not self._world.planes:
                await asyncio.sleep(0.1)
            name = getattr(action, "__name__", "").lstrip("_")
            try:
                await action(dice, mine)
                self.did[f"{name}: done"] += 1
            except ControlPlaneKilled:
                self.did[f"{name}: cut"] += 1
            except PaddockError as error:
                self.did[f"{name}: {type(error).__name__}"] += 1
            except Exception as error:
                self.violations.append(f"{name} raised {error!r}")
            await asyncio.sleep(dice.random() * 2)

    def _plane(self, dice: random.Random) -> Plane:
        return dice.choice(self._world.planes)

    async def _ask(self, plane: Plane, asked: Coroutine[Any, Any, Any]) -> Any:
        """Send a request to a control plane and wait for its answer or its end."""
        began = asyncio.get_running_loop().time()
        task = plane.begin(asked)
        dead = asyncio.ensure_future(plane.dead.wait())
        try:
            await asyncio.wait((task, dead), return_when=asyncio.FIRST_COMPLETED)
            if dead.done() and not task.done():
                task.cancel()
                await asyncio.wait((task,))
                raise ControlPlaneKilled
            if task.cancelled():
                raise ControlPlaneKilled
            return task.result()
        except NotFoundError as error:
            # A stopped one may not yet know what another created.
            raise (ControlPlaneKilled if _is_behind(plane, began) else error) from error
        finally:
            dead.cancel()

    async def _create(self, dice: random.Random, mine: list[Known]) -> None:
        seconds = dice.choice((15, LONG, LONG, None))
        auto_pause = dice.random() < 0.2
        op = f"create {next(self._numbers)}"
        wanted = NewSandbox(
            template="base",
            timeout_seconds=seconds,
            auto_pause=auto_pause,
            metadata={"op": op},
        )
        plane = self._plane(dice)
        try:
            with self._asking(seconds) as timeout:
                sandbox = await self._ask(plane, plane.manager.claims.create(CALLER, wanted))
        except ControlPlaneKilled:
            self.cut.add(op)
            raise
        known = self._enter(sandbox, timeout)
        mine.append(known)
        if dice.random() < 0.2:
            self._shared.append(known)
        await self._reads(plane, known, {Phase.RUNNING})

    @contextlib.contextmanager
    def _asking(self, seconds: int | None) -> Generator[Timeout]:
        """Return a timeout that counts from any moment until the answer."""
        timeout = Timeout(self._world.clock, seconds)
        self._asked.append(timeout)
        try:
            yield timeout
        finally:
            self._asked.remove(timeout)

    def _enter(self, sandbox: Sandbox, timeout: Timeout) -> Known:
        known = Known(sandbox, f"marker {next(self._numbers)}", timeout)
        try:
            self._world.runtime.files(known.uid)["marker"] = known.marker
        except NotFoundError:
            self.violations.append(f"{known.sandbox_id} was given and does not exist")
        self.given.append(known)
        return known

    async def _reads(self, plane: Plane, known: Known, phases: set[Phase]) -> None:
        """After an answer, the same control plane never returns anything older."""
        if known in self._shared:
            return
        try:
            found = await self._ask(plane, plane.manager.queries.get(CALLER, known.sandbox_id))
            said = f"reads as {found.status.phase}" if found.status.phase not in phases else ""
        except NotFoundError:
            said = "is not found right after an answer"
        # Its deadline may have passed during the read.
        if said and not known.may_have_expired() and known.uid not in self.crashed:
            self.violations.append(f"{known.sandbox_id} {said}")

    def _own(self, mine: list[Known]) -> list[Known]:
        return [known for known in mine if known not in self._shared and not known.is_killed]

    def _pick(self, dice: random.Random, mine: list[Known]) -> Known:
        return dice.choice(self._own(mine))

    async def _pause(self, dice: random.Random, mine: list[Known]) -> None:
        known, plane = self._pick(dice, mine), self._plane(dice)
        known.paused = None
        memory = dice.random() < 0.7
        try:
            await self._ask(
                plane, plane.manager.lifecycle.pause(CALLER, known.sandbox_id, memory=memory)
            )
        except NotFoundError:
            self._missed(known)
            raise
        known.paused = True
        known.timeouts.clear()  # A paused sandbox has no deadline.
        await self._reads(plane, known, {Phase.PAUSED})

    async def _connect(self, dice: random.Random, mine: list[Known]) -> None:
        known, plane = self._pick(dice, mine), self._plane(dice)
        known.paused = None
        began = asyncio.get_running_loop().time()
        try:
            await self._ask(
                plane,
                plane.manager.lifecycle.connect(CALLER, known.sandbox_id, timeout_seconds=LONG),
            )
        except NotFoundError:
            self._missed(known)
            raise
        if _is_behind(plane, began):
            return  # As far as it knew, the sandbox ran and had time left: nothing to do.
        known.paused = False
        known.timeouts.clear()
        await self._reads(plane, known, {Phase.RUNNING})

    async def _set_timeout(self, dice: random.Random, mine: list[Known]) -> None:
        known, plane = self._pick(dice, mine), self._plane(dice)
        seconds = dice.choice((5, 60, 900))
        with self._asking(None if known.never_ends else seconds) as timeout:
            # Until an answer names this one, it may be any of them.
            known.timeouts.append(timeout)
            try:
                await self._ask(
                    plane,
                    plane.manager.lifecycle.set_timeout(
                        CALLER, known.sandbox_id, timeout_seconds=seconds
                    ),
                )
            except NotFoundError:
                if known.paused is False:
                    self._missed(known)
                raise
        known.timeouts[:] = [timeout]

    async def _kill(self, dice: random.Random, mine: list[Known]) -> None:
        known, plane = self._pick(dice, mine), self._plane(dice)
        known.may_be_killed = True
        await self._ask(plane, plane.manager.lifecycle.kill(CALLER, known.sandbox_id))
        known.is_killed = True
        try:
            await self._ask(plane, plane.manager.queries.get(CALLER, known.sandbox_id))
        except NotFoundError:
            return
        self.violations.append(f"{known.sandbox_id} is found after its kill was answered")

    async def _snapshot(self, dice: random.Random, mine: list[Known]) -> None:
        known, plane = self._pick(dice, mine), self._plane(dice)
        await self._ask(plane, plane.manager.snapshots.create(CALLER, known.sandbox_id, name=None))

    async def _fork(self, dice: random.Random, mine: list[Known]) -> None:
        known, plane = self._pick(dice, mine), self._plane(dice)
        try:
            forks = await self._ask(
                plane,
                plane.manager.snapshots.fork(
                    CALLER, known.sandbox_id, count=2, timeout_seconds=LONG
                ),
            )
        except ControlPlaneKilled:
            # Clones have their parent's metadata: they belong to an unanswered request.
            self.cut.add(known.op)
            raise
        for fork in forks:
            if fork.sandbox is None:
                continue
            files = self._world.runtime.files(fork.sandbox.metadata.uid)
            if files.get("marker") != known.marker:
                self.violations.append(f"a fork of {known.sandbox_id} lacks its parent's file")
            mine.append(self._enter(fork.sandbox, Timeout(self._world.clock, LONG)))

    async def _resize(self, dice: random.Random, _mine: list[Known]) -> None:
        plane = self._plane(dice)
        size = dice.randint(2, 10)

        def resized(pool: SandboxPool) -> SandboxPool:
            return structs.replace(pool, spec=structs.replace(pool.spec, replicas=size))

        write = plane.control.provider.write
        await self._ask(plane, write.mutate(SandboxPool, Key("default", "base"), resized))

    async def _change_template(self, dice: random.Random, _mine: list[Known]) -> None:
        plane = self._plane(dice)
        text = f"revision {next(self._numbers)}"

        def changed(template: SandboxTemplate) -> SandboxTemplate:
            spec = structs.replace(template.spec, env={"REVISION": text})
            return structs.replace(template, spec=spec)

        write = plane.control.provider.write
        await self._ask(plane, write.mutate(SandboxTemplate, Key("default", "base"), changed))

    async def _race_for_one(self, dice: random.Random, _mine: list[Known]) -> None:
        """Pause and wake a sandbox that other clients pause and wake at the same time."""
        if not self._shared:
            return
        known, plane = dice.choice(self._shared), self._plane(dice)
        known.paused = None
        if dice.random() < 0.5:
            await self._ask(plane, plane.manager.lifecycle.pause(CALLER, known.sandbox_id))
        else:
            await self._ask(
                plane,
                plane.manager.lifecycle.connect(CALLER, known.sandbox_id, timeout_seconds=LONG),
            )

    def _missed(self, known: Known) -> None:
        if not self._is_allowed(known):
            self.violations.append(f"{known.sandbox_id} is not found, and nobody ended it")


def _is_behind(plane: Plane, began: float) -> bool:
    """Whether the answer may come from before the control plane was stopped."""
    return plane.process.awake_since > max(0.0, began - CATCH_UP_SECONDS)
