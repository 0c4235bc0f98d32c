"""A sandbox that returns to a pool with `recycleStrategy: Restart` keeps nothing of its use."""

import os

import pytest

from tests.installation import Installation
from tests.runtime.local.nodes import eventually

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes with a network need root"),
]

GROUP = "/apis/paddock.dev/v1alpha1/namespaces/default"
LEFT = "cat note.txt /tmp/other; pgrep -x sleep; printenv SECRET; stat -c %s /dev/shm/kept"


async def test_a_killed_sandbox_is_reset_and_claimed_again() -> None:
    async with Installation(pool_size=1) as place:
        # The pool is paused, so nothing else can serve the second claim.
        change = {"spec": {"recycleStrategy": {"type": "Restart"}, "paused": True}}
        pool = f"{GROUP}/sandboxpools/base"
        await place.kube("PATCH", pool, change, kind="application/merge-patch+json")

        async def only() -> dict:
            [found] = (await place.kube("GET", f"{GROUP}/sandboxes"))["items"]
            return found

        first = await place.create(timeout=250, envVars={"SECRET": "of the first"})
        used = await only()
        await place.run(first, "echo mine | tee note.txt /tmp/other /dev/shm/kept")
        await place.run(first, "nohup sleep 4321 >/dev/null 2>&1 </dev/null &")
        shown = await place.run(first, LEFT)
        assert shown.startswith("mine\nmine\n")
        assert "of the first" in shown
        await place.api("DELETE", f"/sandboxes/{first.id}")
        status, _ = await place.call(first, 49983, "/health")
        assert status == 502, "its former client has no access"

        async def is_back() -> bool:
            return (await only())["status"].get("recycledCount") == 1

        await eventually(is_back, seconds=100)
        await place.stocked()
        second = await place.create(timeout=250)
        again = await only()
        assert again["metadata"]["uid"] == used["metadata"]["uid"], "it is the same sandbox"
        assert again["status"]["incarnation"] == used["status"]["incarnation"] + 1
        assert second.id != first.id
        assert await place.run(second, f"({LEFT}) 2>/dev/null; echo nothing") == "nothing\n"
