"""Sandboxes kept ready: whole ones of what is asked for most, and bare skeletons for the rest.

A parked sandbox has everything but an owner: files, root, network, limits, a running init, and an
envd that has joined it and waits to be told whom it serves. Nothing is written down about it, so
whatever a killed node leaves of one belongs to nobody and is swept. Who gets it is decided by the
one record that names it (`Record.home`).
"""

import asyncio
import collections
import contextlib
import logging
import os
from collections.abc import Generator, Iterable

from msgspec import Struct, structs

from paddock.kit import ids
from paddock.kit.clock import Clock
from paddock.kit.errors import PaddockError, UnavailableError
from paddock.kit.logs import fields
from paddock.runtime.local.envd.zygote import Waiter
from paddock.runtime.local.kernel.pidfds import has_ended
from paddock.runtime.local.launch.launcher import Skeleton
from paddock.runtime.local.node import records
from paddock.runtime.local.node.node_context import Machine
from paddock.runtime.local.node.records import Phase, Record
from paddock.runtime.local.node.slots import group_name
from paddock.runtime.local.sandbox.builder import Made, Making, kill_and_wait, remove_groups
from paddock.runtime.local.sandbox.sandbox import Sandbox, Spawn
from paddock.runtime.port import Blueprint, InstanceState

log = logging.getLogger(__name__)

_BREATH = 0.02
"""Seconds in which whoever got a sandbox makes its first call, before the stock is filled up."""
_HOST_NAME = "p"
"""Of a sandbox without an owner. No name is shorter, so files with one need not be cut off."""
_REMEMBERED = 64
"""So many of the last creations decide what is parked."""


class Kind(Struct, frozen=True):
    """What cannot be changed about a sandbox once it is parked."""

    image: str
    layers: tuple[str, ...]
    privileges: str


class Parked(Struct, eq=False):
    """A sandbox without an owner."""

    kind: Kind
    sandbox: Sandbox
    """Known by the name of its home; its record was never written."""
    init: records.Process
    pidfd: int
    made: Made
    waiter: Waiter | None


class Parking:
    """A small stock, filled up in the background."""

    def __init__(self, machine: Machine, making: Making, clock: Clock, spawn: Spawn) -> None:
        self._machine = machine
        self._making = making
        self._clock = clock
        self._spawn = spawn
        self._bare: collections.deque[Skeleton] = collections.deque()
        self._whole: collections.deque[Parked] = collections.deque()
        self._asked: collections.deque[Kind] = collections.deque(maxlen=_REMEMBERED)
        self._like: dict[Kind, Blueprint] = {}
        self.homes: set[str] = set()
        """Names of files and places in the network that are parked or about to be."""
        self._rush = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._adding = asyncio.Lock()
        self._is_filling = False
        self._is_open = True

    @property
    def count(self) -> int:
        """How many are ready, whole or not."""
        return len(self._bare) + len(self._whole)

    @property
    def whole(self) -> int:
        """How many are ready but for an owner."""
        return len(self._whole)

    @property
    def favourite(self) -> tuple[Kind | None, int]:
        """What is parked whole now, as it is asked for most, and how many of that are ready."""
        kind, _, _ = self._wanted()
        return kind, sum(parked.kind == kind for parked in self._whole)

    def note(self, kind: Kind, blueprint: Blueprint) -> None:
        """Hear what is asked for; the next ones parked are like the last one asked for."""
        self._asked.append(kind)
        self._like[kind] = blueprint
        if len(self._like) > 2 * _REMEMBERED:
            self._like = {one: self._like[one] for one in self._asked}

    async def take_whole(self, kind: Kind) -> Parked | None:
        """Give a parked sandbox of a kind, if there is one; its home stays reserved."""
        while (parked := next((p for p in self._whole if p.kind == kind), None)) is not None:
            self._whole.remove(parked)
            if not has_ended(parked.pidfd):
                return parked
            await self.discard(parked)  # somebody killed it
        return None

    async def take(self) -> Skeleton:
        """Give a skeleton, parked or made now."""
        while self._bare:
            skeleton = self._bare.popleft()
            if not has_ended(skeleton.pidfd):
                return skeleton
            await self._making.scrap(skeleton)  # somebody killed it
        return await self._making.clone()

    def handed_over(self, parked: Parked) -> None:
        """Forget one that has an owner, who is written down and known."""
        self.homes.discard(parked.sandbox.home)

    @contextlib.contextmanager
    def held_back(self) -> Generator[None]:
        """Make a sandbox for somebody: those who wait come before those who might."""
        self._rush += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._rush -= 1
            if not self._rush:
                self._quiet.set()
                self.fill()

    def fill(self) -> None:
        """See to it that the stock is full again soon."""
        if self._is_open and not self._is_filling and self._machine.settings.parked:
            self._is_filling = True
            self._spawn("park sandboxes", self._fill())

    async def close(self) -> None:
        """Give everything up."""
        self._is_open = False
        async with self._adding:  # what is being made is whole, or undone
            while self._bare:
                await self._making.scrap(self._bare.popleft())
            await asyncio.gather(*(self.discard(parked) for parked in self._drain()))

    async def discard(self, parked: Parked) -> None:
        """Remove a parked sandbox with everything it has."""
        if parked.waiter is not None:
            parked.waiter.close()
        try:
            await kill_and_wait(parked.pidfd)
        finally:
            os.close(parked.pidfd)
        await self._clear(parked.sandbox)

    async def _clear(self, sandbox: Sandbox) -> None:
        machine, home, slot = self._machine, sandbox.home, sandbox.record.slot
        if machine.fabric is not None:
            await machine.fabric.detach(home)
        await machine.work(machine.storage.delete, home)
        await remove_groups(machine, group_name(slot))
        machine.slots.free(slot)
        self.homes.discard(home)

    def _drain(self) -> Iterable[Parked]:
        while self._whole:
            yield self._whole.popleft()

    def _wanted(self) -> tuple[Kind | None, int, int]:
        """Decide what to park: whole ones of which kind, how many, and how many bare ones."""
        most = self._machine.settings.parked
        if not self._asked or self._machine.is_rootless:
            return None, 0, most
        kind, _ = collections.Counter(self._asked).most_common(1)[0]
        bare = most // 4
        return kind, most - bare, bare

    async def _fill(self) -> None:
        try:
            more = True
            while more and self._is_open:
                await asyncio.sleep(_BREATH)
                await self._quiet.wait()
                async with self._adding:
                    more = self._is_open and await self._add_one()
        except (PaddockError, OSError) as problem:
            log.warning("nothing parked", extra=fields(reason=str(problem)))
        finally:
            self._is_filling = False

    async def _add_one(self) -> bool:
        kind, whole, bare = self._wanted()
        stale = next((p for p in self._whole if p.kind != kind), None)
        if kind is not None and sum(p.kind == kind for p in self._whole) < whole:
            if stale is not None:
                self._whole.remove(stale)
                await self.discard(stale)
            try:
                self._whole.append(await self._park(kind))
            except (PaddockError, OSError):
                # Its image may be gone. Whoever asks for it again hears why.
                self._asked = collections.deque(
                    (one for one in self._asked if one != kind), maxlen=_REMEMBERED
                )
                raise
            return True
        if len(self._bare) < bare:
            skeleton = await self._making.clone()
            try:
                await self._machine.launching.ready(skeleton)
            except BaseException:
                await self._making.scrap(skeleton)
                raise
            self._bare.append(skeleton)
            return True
        return False

    async def _park(self, kind: Kind) -> Parked:
        home = f"parked-{ids.name_suffix(16)}"
        self.homes.add(home)
        skeleton: Skeleton | None = None
        sandbox: Sandbox | None = None
        try:
            skeleton = await self.take()
            sandbox = Sandbox(
                self._machine, self._record(home, kind, skeleton), self._clock, self._spawn
            )
            init = _identify(skeleton)
            box, place = await self._making.ground(sandbox)
            sandbox.record = structs.replace(sandbox.record, place=place.slot)
            made = await self._making.assemble(sandbox, skeleton, box, place)
            waiter = await self._making.send_envd(sandbox, skeleton, lacks=())
        except BaseException:
            if skeleton is not None:
                skeleton.kill()
            if sandbox is not None:
                await asyncio.shield(self._clear(sandbox))
            self.homes.discard(home)
            raise
        return Parked(kind, sandbox, init, skeleton.pidfd, made, waiter)

    def _record(self, home: str, kind: Kind, skeleton: Skeleton) -> Record:
        like = self._like[kind]
        blueprint = Blueprint(
            uid=home,
            image=kind.image,
            privileges=kind.privileges,
            limits=like.limits,
            hostname=_HOST_NAME,
        )
        return Record(
            uid=home,
            blueprint=blueprint,
            state=InstanceState.CREATING,
            phase=Phase.CREATING,
            slot=skeleton.slot,
            agent=blueprint.agent,
            egress=like.egress,
            layers=kind.layers,
            home=home,
        )


def _identify(skeleton: Skeleton) -> records.Process:
    process = records.identify(skeleton.pid)
    if process is None:
        raise UnavailableError("a sandbox died while it was parked")
    return process
