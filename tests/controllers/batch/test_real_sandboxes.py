"""A batch of real sandboxes from the command line: tasks, outputs, logs, exit code."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from tests.installation import Installation

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(300)]

PADDOCK = Path(sys.executable).with_name("paddock")


async def command(place: Installation, *words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        PADDOCK,
        *words,
        env=place.environment | {"E2B_API_KEY": place.secrets.api_key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_a_command_runs_in_many_sandboxes_and_its_outputs_are_collected(
    tmp_path: Path,
) -> None:
    if os.geteuid() != 0:
        pytest.skip("real sandboxes need root")
    async with Installation(pool_size=3) as place:
        logs = tmp_path / "logs"
        code, out, err = await command(
            place,
            *("batch", "run", "--replicas", "3", "--pool", "base", "--logs", str(logs)),
            *("--env", "WHO=world", "--", "echo hello $WHO from $(hostname); id -un"),
        )
        assert code == 0, err
        assert out.count("hello world") == 3, out
        written = [(logs / f"{shard}.log").read_text() for shard in range(3)]
        assert all(text.startswith("hello world") and "user\n" in text for text in written)

        code, out, err = await command(
            place,
            *("-o", "json", "batch", "run", "--replicas", "2", "--pool", "base"),
            *("--timeout", "2", "--", "trap '' TERM; (setsid sleep 1000 &) ; sleep 1000"),
        )
        assert code == 1, (out, err)
        status = json.loads(out)["status"]
        assert status["phase"] == "Failed"
        assert {item["reason"] for item in status["tasks"]} == {"TaskTimeout"}
