"""Runs code in COUNT sandboxes at once, and prints a JSON object with what each returned."""

import asyncio
import json
import os
import sys

from e2b_code_interpreter import AsyncSandbox

COUNT = int(sys.argv[1])


async def one(number, barrier):
    """Return the result of a run in a new sandbox, or the problem."""
    box = None
    try:
        box = await AsyncSandbox.create(timeout=600)
        await box.run_code(f"import numpy; x = numpy.full(1000, {number})")
        async with asyncio.timeout(120):
            await barrier.wait()  # all sandboxes exist at once
        return (await box.run_code("int(x.sum())")).text
    except Exception as problem:
        await barrier.abort()
        return repr(problem)
    finally:
        if box is not None:
            await box.kill()


async def main():
    barrier = asyncio.Barrier(COUNT)
    texts = await asyncio.gather(*(one(number, barrier) for number in range(COUNT)))
    sys.stdout.write(json.dumps({"check": "many", "texts": texts}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # see `harness._leave`


asyncio.run(main())
