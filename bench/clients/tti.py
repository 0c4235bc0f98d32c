"""Drives the E2B SDK for `bench/claim.py`: create, then one command, timed by the client."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from e2b import Sandbox


def one(origin: float) -> dict[str, object]:
    try:
        return attempt(origin)
    except Exception as error:
        return {"ok": 0, "error": repr(error)[:200]}


def attempt(origin: float) -> dict[str, object]:
    started = time.perf_counter()
    box = Sandbox.create()
    created = time.perf_counter()
    result = box.commands.run("echo hello")
    ended = time.perf_counter()
    return {
        "create": created - started,
        "total": ended - started,
        "wall": ended - origin,
        "ok": int(result.stdout == "hello\n"),
        "id": box.sandbox_id,
    }


def end(item: dict[str, object]) -> None:
    if "id" in item:
        Sandbox.kill(item["id"])


def main() -> None:
    mode, count = sys.argv[1], int(sys.argv[2])
    Sandbox.create().kill()
    if mode == "sequential":
        results = []
        for _ in range(count):
            results.append(one(time.perf_counter()))
            end(results[-1])
    else:
        with ThreadPoolExecutor(count) as pool:
            origin = time.perf_counter()
            results = list(pool.map(lambda _: one(origin), range(count)))
        for item in results:
            end(item)
    for item in results:
        print(json.dumps(item), flush=True)


main()
