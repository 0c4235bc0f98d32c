"""A mixed storm of clients on a manager, and what each of them was told."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import structs

from paddock.kit.errors import NotFoundError, PaddockError
from paddock.manager.requests import NewSandbox
from paddock.resources.meta import Key
from paddock.resources.pool import SandboxPool
from paddock.resources.sandbox import Phase, Sandbox
from paddock.resources.template import SandboxTemplate
from tests.faults.worlds import FaultyWorld, Plane
from tests.scenario.paddock import CALLER

LONG = 100_000
"""Seconds: a timeout that does not end within a test."""


class Known:
    """One sandbox as a client knows it."""

    def __init__(self, sandbox: Sandbox, marker: str, *, seconds: int | None) -> None:
        assert sandbox.spec.claim is not None
        self.sandbox_id = sandbox.spec.claim.sandbox_id
        self.uid = sandbox.metadata.uid
        self.op = sandbox.spec.claim.metadata.get("op", "")
        """The request that made it, or its first ancestor."""
        self.marker = marker
        self.paused: bool | None = False
        """Whether it rests, as its client was told last; `None` after an unclear answer."""
        self.is_killed = False
        self.may_be_killed = False
        self.may_expire = seconds is not None and seconds < LONG
        self.is_auto_paused = False


class Cut(Exception):  # noqa: N818 - not an error of anybody's: the other side died
    """The control plane that was asked is gone; nobody knows what it did."""


class Storm:
    """Clients that do everything at once; each failure they may not see is a violation."""

    def __init__(self, world: FaultyWorld, *, clients: int = 8, rounds: int = 14) -> None:
        self.given: list[Known] = []
        self.cut: set[str] = set()
        """Requests whose client never heard an answer."""
        self.crashed: set[str] = set()
        self.violations: list[str] = []
        self.did: Counter[str] = Counter()
        self._world = world
        self._clients = clients
        self._rounds = rounds
        self._numbers = itertools.count(1)
        self._random = random.Random(world.seed * 7 + 1)
        self._shared: list[Known] = []

    async def run(self) -> None:
        """Let every client do its rounds."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._clients):
                dice = random.Random(self._world.seed * 1000 + number)
                tasks.create_task(self._client(dice), name=f"client {number}")

    def crash_one(self) -> None:
        """Let some sandbox die by itself."""
        live = [known for known in self.given if not known.may_be_killed and not known.paused]
        if live:
            known = self._random.choice(live)
            try:
                self._world.runtime.crash(known.uid)
            except NotFoundError:
                return
            self.crashed.add(known.uid)

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
            (2, self._quarrel),
        ]
        weights = [weight for weight, _ in actions]
        for _ in range(self._rounds):
            (_, action), *_ = dice.choices(actions, weights)
            if not self._own(mine):
                action = self._create
            while not self._world.planes:
                await asyncio.sleep(0.1)
            name = getattr(action, "__name__", "").lstrip("_")
            try:
                await action(dice, mine)
                self.did[f"{name}: done"] += 1
            except Cut:
                self.did[f"{name}: cut"] += 1
            except PaddockError as error:
                self.did[f"{name}: {type(error).__name__}"] += 1
            except Exception as error:
                self.violations.append(f"{name} raised {error!r}")
            await asyncio.sleep(dice.random() * 2)

    def _plane(self, dice: random.Random) -> Plane:
        return dice.choice(self._world.planes)

    async def _ask(self, plane: Plane, asked: Awaitable[Any]) -> Any:
        """Ask a control plane and wait for its answer or its death."""
        task = asyncio.ensure_future(asked)
        dead = asyncio.ensure_future(plane.dead.wait())
        try:
            await asyncio.wait((task, dead), return_when=asyncio.FIRST_COMPLETED)
            if dead.done() and not task.done():
                task.cancel()
                await asyncio.wait((task,))
                raise Cut
            if task.cancelled():
                raise Cut
            return task.result()
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
            sandbox = await self._ask(plane, plane.manager.create(CALLER, wanted))
        except Cut:
            self.cut.add(op)
            raise
        known = self._enter(sandbox, seconds, auto_pause=auto_pause)
        mine.append(known)
        if dice.random() < 0.2:
            self._shared.append(known)
        await self._reads(plane, known, {Phase.RUNNING})

    def _enter(self, sandbox: Sandbox, seconds: int | None, *, auto_pause: bool) -> Known:
        known = Known(sandbox, f"marker {next(self._numbers)}", seconds=seconds)
        if auto_pause:
            # At its end it is paused and kept, not lost.
            known.may_expire, known.is_auto_paused = False, seconds is not None and seconds < LONG
        try:
            self._world.runtime.files(known.uid)["marker"] = known.marker
        except NotFoundError:
            self.violations.append(f"{known.sandbox_id} was given and does not exist")
        self.given.append(known)
        return known

    async def _reads(self, plane: Plane, known: Known, phases: set[Phase]) -> None:
        """After an answer, nothing older is read from who gave it."""
        if known.may_expire or known.is_auto_paused or known in self._shared:
            return
        if known.uid in self.crashed or plane.dead.is_set():
            return
        try:
            found = await plane.manager.get(CALLER, known.sandbox_id)
        except NotFoundError:
            self.violations.append(f"{known.sandbox_id} is not found right after an answer")
            return
        if found.status.phase not in phases:
            self.violations.append(f"{known.sandbox_id} reads as {found.status.phase}")

    def _own(self, mine: list[Known]) -> list[Known]:
        return [known for known in mine if known not in self._shared and not known.is_killed]

    def _pick(self, dice: random.Random, mine: list[Known]) -> Known:
        return dice.choice(self._own(mine))

    async def _pause(self, dice: random.Random, mine: list[Known]) -> None:
        known, plane = self._pick(dice, mine), self._plane(dice)
        before, known.paused = known.paused, None
        memory = dice.random() < 0.7
        try:
            await self._ask(plane, plane.manager.pause(CALLER, known.sandbox_id, memory=memory))
        except NotFoundError:
            self._missed(known)
            raise
        known.paused = True
        known.may_expire = known.may_expire and before is not False
        await self._reads(plane, known, {Phase.PAUSED})

    async def _connect(self, dice: random.Random, mine: list[Known]) -> None:
        known, plane = self._pick(dice, mine), self._plane(dice)
        known.paused = None
        try:
            await self._ask(
                plane, plane.manager.connect(CALLER, known.sandbox_id, timeout_seconds=LONG)
            )
        except NotFoundError:
            self._missed(known)
            raise
        known.paused = False
        await self._reads(plane, known, {Phase.RUNNING})

    async def _set_timeout(self, dice: random.Random, mine: list[Known]) -> None:
        known, plane = self._pick(dice, mine), self._plane(dice)
        known.may_expire = True
        known.is_auto_paused = True
        seconds = dice.choice((5, 60, 900))
        await self._ask(
            plane, plane.manager.set_timeout(CALLER, known.sandbox_id, timeout_seconds=seconds)
        )

    async def _kill(self, dice: random.Random, mine: list[Known]) -> None:
        known, plane = self._pick(dice, mine), self._plane(dice)
        known.may_be_killed = True
        await self._ask(plane, plane.manager.kill(CALLER, known.sandbox_id))
        known.is_killed = True
        try:
            await plane.manager.get(CALLER, known.sandbox_id)
        except NotFoundError:
            return
        if not plane.dead.is_set():
            self.violations.append(f"{known.sandbox_id} is found after its kill was answered")

    async def _snapshot(self, dice: random.Random, mine: list[Known]) -> None:
        known, plane = self._pick(dice, mine), self._plane(dice)
        await self._ask(plane, plane.manager.snapshot(CALLER, known.sandbox_id, name=None))

    async def _fork(self, dice: random.Random, mine: list[Known]) -> None:
        known, plane = self._pick(dice, mine), self._plane(dice)
        try:
            forks = await self._ask(
                plane,
                plane.manager.fork(CALLER, known.sandbox_id, count=2, timeout_seconds=LONG),
            )
        except Cut:
            # Its children carry their parent's metadata: they are of a request without an answer.
            self.cut.add(known.op)
            raise
        for fork in forks:
            if fork.sandbox is None:
                continue
            files = self._world.runtime.files(fork.sandbox.metadata.uid)
            if files.get("marker") != known.marker:
                self.violations.append(f"a fork of {known.sandbox_id} lacks its parent's file")
            child = self._enter(fork.sandbox, LONG, auto_pause=False)
            child.is_auto_paused = known.is_auto_paused
            mine.append(child)

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

    async def _quarrel(self, dice: random.Random, _mine: list[Known]) -> None:
        """Pause and wake a sandbox that others pause and wake just now."""
        if not self._shared:
            return
        known, plane = dice.choice(self._shared), self._plane(dice)
        known.paused = None
        if dice.random() < 0.5:
            await self._ask(plane, plane.manager.pause(CALLER, known.sandbox_id))
        else:
            await self._ask(
                plane, plane.manager.connect(CALLER, known.sandbox_id, timeout_seconds=LONG)
            )

    def _missed(self, known: Known) -> None:
        excused = known.may_expire or known.may_be_killed or known.uid in self.crashed
        if not excused:
            self.violations.append(f"{known.sandbox_id} is not found, and nobody ended it")
