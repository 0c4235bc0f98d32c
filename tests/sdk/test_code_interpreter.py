"""E2B's code interpreter SDKs, unmodified, with the template that `paddock` installs."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.installation import Installation
from tests.interpreter import PORT, TEMPLATE, install_template, pool_of, require_wheels
from tests.sdk.clients import (
    NEWEST,
    NODE,
    NODE_CLIENTS,
    SCRIPTS,
    checks_of,
    javascript_checks,
    python_of,
    results_of,
)

pytestmark = [
    pytest.mark.sdk,
    pytest.mark.sandbox,
    pytest.mark.timeout(480),
    pytest.mark.asyncio(loop_scope="module"),
]
PROCESSES = ("gateway-0", "control", "node")
_MIB = 1 << 20
Results = Callable[[str], Awaitable[dict[str, dict]]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def paddock() -> AsyncIterator[Installation]:
    """An installation with warm sandboxes of the code interpreter."""
    if os.geteuid() != 0:
        pytest.skip("sandboxes with checkpoints need root")
    require_wheels()
    async with Installation(pool_size=0) as made:
        await install_template(made, "--memory", "1Gi", "--warm", "3")
        await pool_of(made, 3)
        yield made
        # The purge of a node that is stopped would miss a restore that is in flight.
        await pool_of(made, 3)


@pytest.fixture(scope="module")
def environment(paddock: Installation) -> dict[str, str]:
    """The environment of a client: its settings, and no others of E2B or Paddock."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("E2B", "PADDOCK"))}
    return kept | {
        "E2B_API_KEY": paddock.secrets.api_key,
        "E2B_API_URL": paddock.url,
        "E2B_SANDBOX_URL": paddock.url,
        "NODE_CLIENTS": str(NODE_CLIENTS),
    }


@pytest.fixture(scope="module")
def results(environment: dict[str, str]) -> Results:
    """Return a function that returns the results of a client, which runs once."""
    known: dict[str, dict[str, dict]] = {}

    async def run(client: str) -> dict[str, dict]:
        if client not in known:
            known[client] = await asyncio.to_thread(results_of, command_of(client), environment)
        return known[client]

    return run


def command_of(client: str) -> list[object]:
    """Return the command that runs the checks with a client; skip if it is not installed."""
    if client == "python":
        python = python_of(NEWEST)
        if not any(python.parents[1].glob("lib/*/site-packages/e2b_code_interpreter")):
            pytest.skip("E2B's code interpreter SDK is not installed: run scripts/install-clients")
        return [python, SCRIPTS / "interpreter.py"]
    if not (NODE_CLIENTS / "node_modules/@e2b/code-interpreter").exists() or not NODE.exists():
        pytest.skip("E2B's JavaScript SDK is not installed: run scripts/install-clients")
    return [NODE, SCRIPTS / "interpreter.mjs"]


@pytest.mark.parametrize(
    ("client", "check"),
    [
        pytest.param(client, check, id=f"{client} {check}")
        for client, checks in (
            ("python", checks_of("interpreter.py", newest=True)),
            ("javascript", javascript_checks("interpreter.mjs")),
        )
        for check in checks
    ],
)
async def test_a_check_of_the_client_passes(results: Results, client: str, check: str) -> None:
    outcome = (await results(client))[check]
    assert outcome["problem"] is None, outcome["problem"]


async def test_100_mb_of_output_arrive_whole_with_bounded_memory(paddock: Installation) -> None:
    box = await paddock.create(templateID=TEMPLATE, timeout=600)
    before = {name: _restart_peak(paddock.pid(name)) for name in PROCESSES}
    headers = {
        "E2b-Sandbox-Id": box.id,
        "E2b-Sandbox-Port": str(PORT),
        "X-Access-Token": str(box.envd_access_token),
    }
    body = {"code": "for i in range(100): print('#' * 999_999)", "context_id": None}
    total = 0
    async with paddock.http.post(f"{paddock.url}/execute", json=body, headers=headers) as answer:
        assert answer.status == 200
        async for chunk in answer.content.iter_chunked(1 << 20):
            total += chunk.count(b"#")
    assert total == 100 * 999_999
    grown = {name: _peak(paddock.pid(name)) - size for name, size in before.items()}
    assert all(size < 32 * _MIB for size in grown.values()), grown
    await paddock.api("DELETE", f"/sandboxes/{box.id}")


async def test_many_sandboxes_run_code_at_once(
    paddock: Installation, environment: dict[str, str], request: pytest.FixtureRequest
) -> None:
    count = int(request.config.option.interpreters)
    command = [command_of("python")[0], SCRIPTS / "interpreter_many.py", count]
    done = await asyncio.to_thread(results_of, command, environment)
    assert done["many"]["texts"] == [str(number * 1000) for number in range(count)]


def _restart_peak(pid: int) -> int:
    """Forget the peak of a process's memory; return its present size in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _peak(pid)


def _peak(pid: int) -> int:
    """Return the largest resident size of a process in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [size] = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return size << 10
