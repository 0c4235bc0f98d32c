"""A client of `kubernetes_pods.py`: one sandbox for each line of input, with E2B's SDK.

A line is the template. Each line of output is one JSON object: the seconds of every step.
"""

import json
import sys
import time

from e2b import Sandbox


def one(template: str) -> dict[str, object]:
    """Create, run a command, pause, resume, run a command, kill; return the seconds of each."""
    took: dict[str, object] = {}
    box = None
    started = time.perf_counter()
    try:
        box = Sandbox.create(template, timeout=600)
        took["create"] = time.perf_counter() - started
        assert box.commands.run("echo here").stdout == "here\n"
        took["first_command"] = time.perf_counter() - started
        started = time.perf_counter()
        box.pause() if hasattr(box, "pause") else box.beta_pause()
        took["pause"] = time.perf_counter() - started
        started = time.perf_counter()
        box = Sandbox.connect(box.sandbox_id)
        took["resume"] = time.perf_counter() - started
        assert box.commands.run("echo again").stdout == "again\n"
        took["resume_first_command"] = time.perf_counter() - started
    except Exception as error:
        took["error"] = repr(error)[:300]
    if box is not None:
        box.kill()
    return took


for line in sys.stdin:
    print(json.dumps(one(line.strip())), flush=True)
