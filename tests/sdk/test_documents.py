"""The programs in the documentation run unchanged with unmodified SDKs."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.sdk.clients import NEWEST, NODE, NODE_CLIENTS, python_of

pytestmark = [pytest.mark.sdk, pytest.mark.sandbox, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/how-to/agents.md", "docs/how-to/rollouts.md")


def programs(language: str) -> list:
    found = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [
        pytest.param(text, id=page)
        for page in PAGES
        for text in found.findall((ROOT / page).read_text())
    ]


def run(command: list[object], environment: dict[str, str]) -> None:
    variables = environment | {"E2B_DOMAIN": environment["E2B_API_URL"].removeprefix("http://")}
    done = subprocess.run(
        [str(word) for word in command],
        env=variables,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("text", programs("python"))
def test_a_python_program_of_the_documentation_runs(environment: dict[str, str], text: str) -> None:
    run([python_of(NEWEST), "-c", text], environment)


@pytest.mark.parametrize("text", programs("js"))
def test_a_javascript_program_of_the_documentation_runs(
    environment: dict[str, str], tmp_path: Path, text: str
) -> None:
    if not (NODE_CLIENTS / "node_modules" / "e2b").exists() or not NODE.exists():
        pytest.skip("E2B's JavaScript SDK is not installed: run scripts/install-clients")
    program = tmp_path / "program.mjs"
    program.write_text(text)
    # Node looks for modules next to the program.
    (tmp_path / "node_modules").symlink_to(NODE_CLIENTS / "node_modules")
    run([NODE, program], environment)
