"""kill -9 of a real control plane at random moments of a storm: nothing is lost, duplicated or
leaked.

Sandboxes and processes are real: what runs continues and responds, and what was acknowledged still
holds afterwards. `--faults-seed` replays a run as far as real time allows.
"""

import asyncio
import random
from typing import Any

import aiohttp
import pytest

from paddock.runtime.local.driver import LocalRuntime
from tests.faults.clients import Action, Clients, CountingCommand, replayed_by
from tests.installation import Box, Installation
from tests.runtime.local.nodes import eventually

pytestmark = [pytest.mark.faults, pytest.mark.sandbox, pytest.mark.timeout(600)]

CLIENTS = 5
KILLS = 5
LIVELY = 12
"""Number of answered requests between two kills."""
MARK = "/home/user/mine"


class UnclearAnswer(Exception):  # noqa: N818 - nobody's error: the other side died
    """No answer, or an answer that the service is unavailable."""


class Known:
    """A sandbox as its client sees it."""

    def __init__(self, box: Box, counting: CountingCommand) -> None:
        self.box = box
        self.counting = counting
        self.paused: bool | None = False
        """The last acknowledged state; `None` if an answer was lost."""
        self.may_be_killed = False
        self.is_killed = False
        """Whether a kill was acknowledged; an unclear one may not have happened."""
        self.is_marked = False
        self.is_counting = False


class Storm(Clients):
    """Clients that create, pause, resume and kill for a while."""

    TROUBLE = (UnclearAnswer, TimeoutError)

    def __init__(self, paddock: Installation, seed: int) -> None:
        super().__init__(seed, count=CLIENTS)
        self.paddock = paddock
        self.given: list[Known] = []

    def choose(self, dice: random.Random, mine: list[Known]) -> Action:
        changes = [self._pause, self._connect, self._kill] if mine else []
        return dice.choice([*([self._create] if len(mine) < 3 else []), *changes])

    async def ask(self, method: str, path: str, body: Any = None, *, fine: tuple[int, ...]) -> Any:
        headers = {"X-API-Key": self.paddock.secrets.api_key}
        url = self.paddock.url + path
        try:
            async with self.paddock.http.request(
                method, url, json=body, headers=headers, timeout=aiohttp.ClientTimeout(30)
            ) as response:
                data = await response.json(content_type=None) if response.status != 204 else None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnclearAnswer from error
        if response.status >= 500:
            raise UnclearAnswer
        assert response.status in fine, f"{method} {path}: {response.status} {data}"
        return data

    async def _create(self, _dice: random.Random, mine: list[Known]) -> None:
        body = {"templateID": "base", "timeout": 600}
        made = await self.ask("POST", "/v2/sandboxes", body, fine=(201,))
        box = Box(made["sandboxID"], made["envdAccessToken"])
        known = Known(box, CountingCommand(self.paddock, box))
        self.given.append(known)
        # Traffic to the sandbox does not pass the control plane: it works meanwhile,
        # unless the gateway has no route yet, and cannot look it up.
        try:
            await self.paddock.write_file(known.box, MARK, known.box.id.encode())
            known.is_marked = True
            await known.counting.begin()
        except AssertionError as error:
            raise (UnclearAnswer if '"code":503' in str(error) else error) from error
        known.is_counting = True
        mine.append(known)

    async def _pause(self, dice: random.Random, mine: list[Known]) -> None:
        known = dice.choice(mine)
        before, known.paused = known.paused, None
        # Already paused, or being resumed for a client that has given up.
        await self.ask("POST", f"/sandboxes/{known.box.id}/pause", {}, fine=(204, 409))
        known.paused = True if before is not None else None

    async def _connect(self, dice: random.Random, mine: list[Known]) -> None:
        known = dice.choice(mine)
        known.paused = None
        path = f"/v2/sandboxes/{known.box.id}/connect"
        said = await self.ask("POST", path, {"timeout": 600}, fine=(200, 201, 409))
        # A conflict: it is being paused for a client that has given up; the result is unknown.
        known.paused = False if "sandboxID" in said else None

    async def _kill(self, dice: random.Random, mine: list[Known]) -> None:
        known = mine.pop(dice.randrange(len(mine)))
        known.may_be_killed = True
        await self.ask("DELETE", f"/sandboxes/{known.box.id}", fine=(204,))
        known.is_killed = True


async def kill_repeatedly(storm: Storm, dice: random.Random) -> None:
    steady = CountingCommand(storm.paddock, await storm.paddock.create(timeout=3600))
    await steady.begin()
    for _ in range(KILLS):
        wanted = storm.acknowledged + dice.randrange(LIVELY // 2, LIVELY)
        await eventually(lambda wanted=wanted: storm.acknowledged >= wanted, seconds=120)
        await asyncio.sleep(dice.random() * 0.2)
        storm.paddock.kill("control")
        # The control plane is down, and sandboxes still run and respond.
        assert not (problem_of := await steady.keeps_counting()), problem_of
        await storm.paddock.start_control()
    wanted = storm.acknowledged + LIVELY
    await eventually(lambda: storm.acknowledged >= wanted, seconds=120)
    storm.is_over = True


async def test_acknowledged_changes_survive_repeated_kills_of_the_control_plane(
    faults_seed: int,
) -> None:
    with replayed_by(f"--faults-seed {faults_seed}"):
        await _storm(faults_seed)


async def _storm(seed: int) -> None:
    async with Installation(pool_size=3) as paddock:
        storm = Storm(paddock, seed)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill_repeatedly(storm, random.Random(seed)))
            tasks.create_task(storm.run())
        print(f"{storm.acknowledged} acknowledged: {dict(storm.did)}")
        assert storm.did["trouble"]
        await settled(paddock)
        await acknowledged_state_holds(storm)
        await nothing_is_left(paddock)


async def settled(paddock: Installation) -> None:
    """Wait until nothing is in flight."""
    path = "/apis/paddock.dev/v1alpha1/sandboxes"

    unsettled: list[Any] = []

    async def quiet() -> bool:
        items = (await paddock.kube("GET", path))["items"]
        unsettled[:] = [
            item
            for item in items
            if item["status"].get("phase") not in ("Running", "Paused")
            or "deletionTimestamp" in item["metadata"]
            or bool(item["spec"].get("paused")) != (item["status"]["phase"] == "Paused")
        ]
        return not unsettled

    try:
        await eventually(quiet, seconds=120)
    except AssertionError as error:
        raise AssertionError(f"these do not settle: {unsettled}") from error


async def acknowledged_state_holds(storm: Storm) -> None:
    ids = [known.box.id for known in storm.given]
    assert len(set(ids)) == len(ids), "one sandbox was given twice"
    listed = await storm.paddock.api("GET", "/v2/sandboxes?limit=100")
    states = {item["sandboxID"]: item["state"] for item in listed}
    for known in storm.given:
        path = f"/sandboxes/{known.box.id}"
        if known.may_be_killed:
            # An unclear kill may not have happened: then it can be repeated.
            is_there = known.box.id in states
            assert not (known.is_killed and is_there), f"{known.box.id} was killed and is there"
            await storm.ask("DELETE", path, fine=(204,) if is_there else (404,))
            await storm.ask("GET", path, fine=(404,))
            continue
        assert known.box.id in states, f"{known.box.id} is lost"
        if known.paused is not None:
            assert states[known.box.id] == ("paused" if known.paused else "running")
        await storm.ask("POST", f"/v2{path}/connect", {"timeout": 600}, fine=(200, 201))
        found = (await storm.paddock.run(known.box, f"cat {MARK} 2>/dev/null; true")).strip()
        assert found == known.box.id if known.is_marked else found in ("", known.box.id)
        if known.is_counting:
            assert not (problem_of := await known.counting.keeps_counting()), problem_of


async def nothing_is_left(paddock: Installation) -> None:
    """The node and the store have the same sandboxes."""
    node = LocalRuntime(paddock.directory / "run" / "node.sock")
    path = "/apis/paddock.dev/v1alpha1/sandboxes"

    async def same() -> bool:
        stored = {item["metadata"]["uid"] for item in (await paddock.kube("GET", path))["items"]}
        return {instance.uid for instance in await node.instances()} == stored

    try:
        await eventually(same, seconds=120)
    finally:
        node.close()
