"""Templates built with E2B's SDKs and CLI, unmodified."""

import json
import re
from pathlib import Path

import pytest

from tests.sdk.clients import (
    NEWEST,
    NODE,
    NODE_CLIENTS,
    OLDER,
    SCRIPTS,
    checks_of,
    javascript_checks,
    results_of,
)
from tests.sdk.test_e2b_cli import Cli, cli

__all__ = ["cli"]
pytestmark = [pytest.mark.sdk, pytest.mark.sandbox, pytest.mark.timeout(480)]
RUNS = [("templates.py", NEWEST), ("templates.py", OLDER), ("templates_async.py", NEWEST)]


@pytest.fixture(scope="session")
def javascript_results(environment: dict[str, str]) -> dict[str, dict]:
    if not (NODE_CLIENTS / "node_modules" / "e2b").exists() or not NODE.exists():
        pytest.skip("E2B's JavaScript SDK is not installed: run scripts/install-clients")
    return results_of([NODE, SCRIPTS / "templates.mjs"], environment)


@pytest.mark.parametrize(
    ("script", "version", "check"),
    [
        pytest.param(script, version, check, id=f"{script.removesuffix('.py')} {version} {check}")
        for script, version in RUNS
        for check in checks_of(script, newest=version == NEWEST)
    ],
)
def test_a_check_of_the_python_sdk_passes(results, script: str, version: str, check: str) -> None:
    outcome = results(script, version)[check]
    assert outcome["problem"] is None, outcome["problem"]


@pytest.mark.parametrize("check", javascript_checks("templates.mjs"))
def test_a_check_of_the_javascript_sdk_passes(
    javascript_results: dict[str, dict], check: str
) -> None:
    assert javascript_results[check]["problem"] is None, javascript_results[check]["problem"]


def test_the_cli_builds_lists_publishes_and_deletes_a_template(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "hello.txt").write_text("hello from the template\n")
    (tmp_path / "e2b.Dockerfile").write_text(
        "FROM base\nWORKDIR /app\nCOPY hello.txt .\nRUN cat hello.txt\nENV COLOUR=blue\n"
    )
    built = cli(
        *("template", "create", "from-cli", "-p", str(tmp_path), "-d", "e2b.Dockerfile"),
        *("--cpu-count", "1", "--memory-mb", "512", "-c", "python3 -m http.server 8000"),
        *("--ready-cmd", "curl -sf localhost:8000"),
    )
    assert "hello from the template" in built
    found = json.loads(cli("template", "list", "--format", "json"))
    shown = next(item for item in found if item["templateID"] == "from-cli")
    assert (shown["cpuCount"], shown["memoryMB"], shown["public"]) == (1, 512, False)
    assert shown["buildStatus"] == "ready"
    cli("template", "publish", "from-cli", "-y")
    cli("template", "unpublish", "from-cli", "-y")
    created = cli("sandbox", "create", "--detach", "from-cli")
    box = re.search(r"\bi[a-z0-9]{20}\b", created)
    assert box is not None, created
    served = cli("sandbox", "exec", box[0], "curl -s localhost:8000/hello.txt; echo $COLOUR")
    assert served == "hello from the template\nblue\n"
    refused = cli.run("template", "delete", "from-cli", "-y")
    assert refused.returncode != 0
    assert "running or paused sandboxes" in refused.stdout + refused.stderr
    cli("sandbox", "kill", box[0])
    cli("template", "delete", "from-cli", "-y")
    found = json.loads(cli("template", "list", "--format", "json"))
    assert "from-cli" not in [item["templateID"] for item in found]
