"""Drives the E2B SDK: create, then one command, in one of several modes; timed by the client.

    load.py sequential|staggered|burst COUNT      load.py poisson SECONDS RATE

One JSON object per line: start time, duration of create and in total, success.
"""

import asyncio
import json
import random
import sys
import time

from e2b import AsyncSandbox

STAGGER_SECONDS = 0.2


async def one(origin: float) -> dict[str, object]:
    began = time.perf_counter()
    entry: dict[str, object] = {"at": began - origin, "ok": False}
    try:
        box = await AsyncSandbox.create(timeout=120)
        entry["create"] = time.perf_counter() - began
        entry["id"] = box.sandbox_id
        result = await box.commands.run("echo hello")
        entry["total"] = time.perf_counter() - began
        entry["ok"] = result.stdout == "hello\n"
        entry["wall"] = time.perf_counter() - origin
        await box.kill()
    except Exception as error:
        entry["error"] = repr(error)[:200]
    return entry


async def main() -> None:
    mode, amount = sys.argv[1], float(sys.argv[2])
    await (await AsyncSandbox.create()).kill()  # imports and connections are not measured
    origin = time.perf_counter()
    results: list[dict[str, object]] = []
    if mode == "sequential":
        for _ in range(int(amount)):
            results.append(await one(origin))
    elif mode in ("staggered", "burst"):
        pause = STAGGER_SECONDS if mode == "staggered" else 0.0
        tasks = []
        for _ in range(int(amount)):
            tasks.append(asyncio.ensure_future(one(origin)))
            if pause:
                await asyncio.sleep(pause)
        results = await asyncio.gather(*tasks)
    else:
        # Open loop: arrivals do not wait for answers.
        dice, rate = random.Random(1), float(sys.argv[3])
        tasks, due = [], 0.0
        while (due := due + dice.expovariate(rate)) < amount:
            await asyncio.sleep(max(0.0, origin + due - time.perf_counter()))
            tasks.append(asyncio.ensure_future(one(origin)))
        results = await asyncio.gather(*tasks)
    for entry in results:
        print(json.dumps(entry), flush=True)


asyncio.run(main())
