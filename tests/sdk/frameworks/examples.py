"""Runs the examples for frameworks with unmodified packages and a stub model."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.sdk.clients import CACHE, LEAVING
from tests.sdk.frameworks.stub_model import StubModel

EXAMPLES = Path(__file__).parents[3] / "examples" / "frameworks"
RUN_SECONDS = 200


def programs_of(lock: str) -> Path:
    """Return the directory of the programs that a lock file installs."""
    directory = CACHE / f"frameworks-{lock}" / "bin"
    if not (directory / "python").exists():
        pytest.skip(f"frameworks-{lock}.txt is not installed: run scripts/install-clients")
    return directory


async def run(
    python: Path,
    program: list[object],
    environment: Mapping[str, str],
    model: StubModel,
    directory: Path,
) -> str:
    """Run a program with the model; return what it prints."""
    own = {
        "HOME": str(directory),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENAI_BASE_URL": model.url,
        "OPENAI_API_KEY": "stub",
        # Traces would be sent to the provider.
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LANGSMITH_TRACING": "false",
    }
    process = await asyncio.create_subprocess_exec(
        *map(str, [python, LEAVING, *program]),
        cwd=directory,
        env={**environment, **own},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), RUN_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = out.decode()
    assert process.returncode == 0, text[-3000:] + err.decode()[-3000:]
    assert model.is_finished, text[-3000:]
    return text
