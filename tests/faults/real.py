"""A storm of real clients on a real installation, and faults of its processes.

Clients create, write, read, run, fill their disks, misbehave, pause, wake and kill. Faults are
drawn from a deck, so that every role is killed equally often; a killed process is restarted, as a
supervisor would.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from typing import Any

import aiohttp

from paddock.kit.errors import PaddockError
from paddock.runtime.local.driver import LocalRuntime
from paddock.runtime.port import Instance
from tests.faults.clients import Action, Clients, CountingCommand
from tests.installation import Box, Installation
from tests.runtime.local.nodes import eventually, unexpected_traces

MARK = "/home/user/mine"
CLIENTS = 3
ROLES = ("node", "control", "gateway-0", "launcher", "zygote", "envd")
_OF_THE_NODE = ("launcher", "zygote", "envd")
"""Processes that the node starts and restarts."""
SMALL = "small"
"""A template with a small disk."""
TROUBLE = (AssertionError, aiohttp.ClientError, TimeoutError, OSError)
"""Errors that a client may see while the other side is down. It retries."""
MISDEEDS = {
    "floods": "yes | head -c 300000000 >/dev/stdout",
    "refuses_to_die": "trap '' TERM INT HUP; while :; do sleep 1; done",
    "spins": "while :; do :; done",
    "stops_itself": "exec 3<>/dev/zero; kill -STOP $$",
}
_FILL = (
    "ballast=/home/user/ballast-$$; head -c 200000000 /dev/zero >$ballast 2>/dev/null;"
    " stat -c %s $ballast; rm $ballast"
)
"""One file per command: an interrupted one continues beside the next."""


class Owned:
    """A sandbox of one client."""

    def __init__(self, box: Box, mark: bytes, counting: CountingCommand, *, is_small: bool) -> None:
        self.box = box
        self.mark = mark
        self.counting = counting
        self.is_small = is_small
        self.may_be_gone = False


class Storm(Clients):
    """Clients that do everything until stopped."""

    TROUBLE = TROUBLE

    def __init__(self, paddock: Installation, seed: int, *, can_fill: bool) -> None:
        super().__init__(seed, count=CLIENTS)
        self.paddock = paddock
        self.owned: list[Owned] = []
        self.killed: set[str] = set()
        """Ids of sandboxes whose kill was acknowledged."""
        self.violations: list[str] = []
        self._can_fill = can_fill
        self._rogues: list[Box] = []

    def choose(self, dice: random.Random, mine: list[Owned]) -> Action:
        if self._rogues:
            return self._kill_misbehaving
        if not mine:
            return self._create
        if len(mine) >= 3:
            return dice.choice((self._use, self._kill))
        every = (self._use, self._rest, self._kill, self._fill, self._misbehave, self._create)
        return dice.choices(every, (5, 3, 1, 1, 1, 2))[0]

    async def _create(self, dice: random.Random, mine: list[Owned]) -> None:
        is_small = self._can_fill and dice.random() < 0.3
        box = await self.paddock.create(timeout=3600, templateID=SMALL if is_small else "base")
        if any(known.box.id == box.id for known in self.owned):
            self.violations.append(f"{box.id} was given twice")
        mark, counting = dice.randbytes(200).hex().encode(), CountingCommand(self.paddock, box)
        known = Owned(box, mark, counting, is_small=is_small)
        await self._retry_until_answered(lambda: self.paddock.write_file(box, MARK, known.mark))
        await self._retry_until_answered(counting.begin)
        self.owned.append(known)
        mine.append(known)

    async def _use(self, dice: random.Random, mine: list[Owned]) -> None:
        known = dice.choice(mine)
        said = await self._read(known.box)
        if said.encode() != known.mark:
            self.violations.append(f"{known.box.id} has lost its file: {said[:60]!r}")
        if problem_of := await known.counting.problem_of():
            self.violations.append(problem_of)

    async def _rest(self, dice: random.Random, mine: list[Owned]) -> None:
        known = dice.choice(mine)
        await self.paddock.api("POST", f"/sandboxes/{known.box.id}/pause")

    async def _kill(self, dice: random.Random, mine: list[Owned]) -> None:
        known = mine.pop(dice.randrange(len(mine)))
        known.may_be_gone = True
        await self._end(known.box)
        self.owned.remove(known)
        self.killed.add(known.box.id)

    async def _fill(self, dice: random.Random, mine: list[Owned]) -> None:
        """Fill a sandbox's disk: writes fail inside, and nothing else does."""
        small = [known for known in mine if known.is_small]
        if not small:
            return
        box = dice.choice(small).box
        await self.paddock.api("POST", f"/sandboxes/{box.id}/connect", {"timeout": 3600})
        # No output if there was no room even for the file.
        sizes = (await self.paddock.run(box, _FILL)).split()
        if (size := int(sizes[0]) if sizes else 0) >= 200_000_000:
            self.violations.append(f"{box.id} wrote {size} bytes to a disk of 64 MiB")

    async def _misbehave(self, dice: random.Random, mine: list[Owned]) -> None:
        # A short timeout: one that could not be killed would use the machine's time.
        box = await self.paddock.create(timeout=30)
        self._rogues.append(box)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await self.paddock.run(box, MISDEEDS[dice.choice(sorted(MISDEEDS))])
        await self._kill_misbehaving(dice, mine)

    async def _kill_misbehaving(self, _dice: random.Random, _mine: list[Owned]) -> None:
        """Kill what misbehaves, also if its client met an error."""
        for box in list(self._rogues):
            await self._end(box)
            if box in self._rogues:
                self._rogues.remove(box)

    async def _end(self, box: Box) -> None:
        """Kill one; also done if an earlier reply was lost or its deadline has passed."""
        assert await self._status("DELETE", box.id) in (204, 404)

    async def _status(self, method: str, sandbox_id: str) -> int:
        url = f"{self.paddock.url}/sandboxes/{sandbox_id}"
        headers = {"X-API-Key": self.paddock.secrets.api_key}
        async with self.paddock.http.request(method, url, headers=headers) as response:
            await response.read()
            return response.status

    async def _read(self, box: Box) -> str:
        await self.paddock.api("POST", f"/sandboxes/{box.id}/connect", {"timeout": 3600})
        return await self.paddock.run(box, f"cat {MARK}")

    async def _retry_until_answered(self, act, *, seconds: float = 25) -> Any:
        """Retry an idempotent request until it is answered."""
        end = asyncio.get_running_loop().time() + seconds
        while True:
            try:
                return await act()
            except TROUBLE:
                if asyncio.get_running_loop().time() > end:
                    raise
                await asyncio.sleep(0.2)

    async def check_all(self) -> list[str]:
        """Check everything that is still owned after the faults."""
        found = list(self.violations)
        for known in self.owned:
            box = known.box
            if known.may_be_gone:
                # It is unknown whether it was killed until it is requested again.
                await self._retry_until_answered(lambda box=box: self._end(box), seconds=90)
                self.killed.add(box.id)
                continue
            try:
                said = await self._retry_until_answered(lambda box=box: self._read(box), seconds=90)
                if said.encode() != known.mark:
                    found.append(f"{box.id} has lost its file: {said[:60]!r}")
                if problem_of := await known.counting.keeps_counting():
                    found.append(problem_of)
            except TROUBLE as error:
                found.append(f"{box.id} is lost: {error!r}"[:300])
        return found

    async def killed_but_present(self) -> list[str]:
        """Return sandboxes that still exist although their kill was acknowledged."""
        listed = await self.paddock.api("GET", "/v2/sandboxes?limit=100")
        found = self.killed & {item["sandboxID"] for item in listed}
        for sandbox_id in self.killed:
            if await self._status("GET", sandbox_id) != 404:
                found.add(sandbox_id)
        return sorted(found)


async def facts(paddock: Installation) -> dict[str, Any]:
    """Return the node's state."""
    runtime = LocalRuntime(paddock.directory / "run" / "node.sock")
    try:
        return await runtime._call("facts", kind=dict)
    finally:
        runtime.close()


async def instances(paddock: Installation) -> tuple[Instance, ...]:
    """Return all sandboxes that the node has anything of."""
    runtime = LocalRuntime(paddock.directory / "run" / "node.sock")
    try:
        return await runtime.instances()
    finally:
        runtime.close()


async def make_small_template(paddock: Installation) -> bool:
    """Create the template with the small disk; return whether disks can be limited here."""
    runtime = LocalRuntime(paddock.directory / "run" / "node.sock")
    try:
        can = (await runtime.capabilities()).can_limit_disk
    finally:
        runtime.close()
    template = {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "SandboxTemplate",
        "metadata": {"name": SMALL, "namespace": "default"},
        "spec": {"image": "base", "resources": {"disk": "64Mi"}},
    }
    path = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxtemplates"
    await paddock.kube("POST", path, template)
    return can


async def pid_of(paddock: Installation, role: str, dice: random.Random) -> int | None:
    if role not in _OF_THE_NODE:
        return paddock.pid(role)
    try:
        known = await facts(paddock)
    except PaddockError as error:
        error.add_note(paddock.log("node")[-3000:])
        raise
    if role != "envd":
        return known[role]
    return dice.choice(sorted(known["envds"].values())) if known["envds"] else None


async def uid_of(paddock: Installation, box: Box) -> str:
    """The node's id of a sandbox."""
    path = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxes"
    listed = (await paddock.kube("GET", path))["items"]
    (uid,) = (
        item["metadata"]["uid"]
        for item in listed
        if item["spec"].get("claim", {}).get("sandboxId") == box.id
    )
    return uid


async def envd_of(paddock: Installation, box: Box) -> int:
    """The envd of one sandbox: others may be ending with their sandboxes."""
    return (await facts(paddock))["envds"][await uid_of(paddock, box)]


async def only_warm_stock_is_left(paddock: Installation) -> None:
    """End everything through the API: the kernel then has only the warm stock of the node."""
    pool = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxpools/base"
    none = {"spec": {"replicas": 0}}
    await paddock.kube("PATCH", pool, none, kind="application/merge-patch+json")
    found: dict[str, Any] = {}

    async def holds() -> bool:
        for item in await paddock.api("GET", "/v2/sandboxes?limit=100"):
            with contextlib.suppress(AssertionError):  # Its deadline may have passed just now.
                await paddock.api("DELETE", f"/sandboxes/{item['sandboxID']}")
        said = await facts(paddock)
        beyond = unexpected_traces(paddock.node_state, paddock._number, said)
        found.update(instances=await instances(paddock), beyond=beyond, node=said)
        return not found["instances"] and not beyond

    try:
        await eventually(holds, seconds=180, pause=0.5)
    except AssertionError as error:
        raise AssertionError(f"something stays in the kernel: {found}") from error


class FaultInjector:
    """Kills, stops and disk fills, from a deck that holds every role once."""

    def __init__(self, paddock: Installation, dice: random.Random) -> None:
        self.did: Counter[str] = Counter()
        self.kills = 0
        self._paddock = paddock
        self._dice = dice
        self._deck: list[tuple[str, str]] = []

    async def do(self) -> None:
        if not self._deck:
            self._deck = [("kill", role) for role in ROLES]
            self._deck += [("stop", self._dice.choice(ROLES)), ("fill", "store")]
            self._dice.shuffle(self._deck)
        kind, role = self._deck.pop()
        try:
            await getattr(self, f"_{kind}")(role)
        except TROUBLE as error:
            if kind == "kill" and role not in _OF_THE_NODE:
                raise  # A killed process was not restarted.
            self.did[f"no {kind} {role}: {type(error).__name__}"] += 1
            return
        self.did[f"{kind} {role}"] += 1
        self.kills += kind == "kill"

    @property
    def untouched_roles(self) -> list[str]:
        """Roles without a killed process yet."""
        return [role for role in ROLES if not self.did[f"kill {role}"]]

    async def _kill(self, role: str) -> None:
        paddock = self._paddock
        if role in _OF_THE_NODE:
            pid = await pid_of(paddock, role, self._dice)
            if not pid:
                raise ProcessLookupError(f"there is no {role} just now")
            os.kill(pid, signal.SIGKILL)
            return
        paddock.kill(role)
        if role == "node":
            await paddock.start_node()
        elif role == "control":
            await paddock.start_control()
        else:
            await paddock.start_gateway(0)

    async def _stop(self, role: str) -> None:
        pid = await pid_of(self._paddock, role, self._dice)
        if not pid:
            raise ProcessLookupError(f"there is no {role} just now")
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._dice.random() * 2)
        finally:
            os.kill(pid, signal.SIGCONT)

    async def _fill(self, _role: str) -> None:
        """Fill the store's disk for a while."""
        ballast = self._paddock.directory / "state" / "ballast"
        try:
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while file.write(bytes(65536)):
                    pass
            await asyncio.sleep(self._dice.random() * 2)
        finally:
            ballast.unlink()
