"""The cases of E2B's own live tests of template builds, with unmodified SDKs and no internet.

They name `ubuntu:22.04`, which a mirror of Docker Hub has here, and `e2bdev/base`.
"""

import json
import subprocess

import pytest

from tests.api.e2b.test_template_builds import AWS, AWS_IMAGE
from tests.newcomer.blocks import blocks
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

pytestmark = [pytest.mark.sdk, pytest.mark.sandbox, pytest.mark.timeout(480)]
FLAVOURS = ("sync", "async", "javascript")
Results = dict[str, dict]


def command_of(flavour: str) -> list[object]:
    """Return the command that runs the cases with a client."""
    if flavour != "javascript":
        return [python_of(NEWEST), SCRIPTS / "templates_live.py"]
    if not (NODE_CLIENTS / "node_modules" / "e2b").exists() or not NODE.exists():
        pytest.skip("E2B's JavaScript SDK is not installed: run scripts/install-clients")
    return [NODE, SCRIPTS / "templates_live.mjs"]


def cases_of(flavour: str) -> list[str]:
    if flavour == "javascript":
        return javascript_checks("templates_live.mjs")
    return checks_of("templates_live.py", newest=True)


@pytest.fixture(scope="session")
def live_results(environment: dict[str, str]):
    """Return a function that returns the results of a client, which runs once."""
    known: dict[str, Results] = {}

    def run(flavour: str) -> Results:
        if flavour not in known:
            known[flavour] = results_of(command_of(flavour), environment | {"FLAVOUR": flavour})
        return known[flavour]

    return run


@pytest.mark.parametrize(
    ("flavour", "case"),
    [
        pytest.param(flavour, case, id=f"{flavour} {case}")
        for flavour in FLAVOURS
        for case in cases_of(flavour)
    ],
)
def test_a_live_test_of_e2b_passes(live_results, flavour: str, case: str) -> None:
    outcome = live_results(flavour)[case]
    assert outcome["problem"] is None, outcome["problem"]


def test_the_aws_example_of_the_guide_is_what_the_api_accepts() -> None:
    """No AWS answers here: what the SDK sends is compared with what the API is tested with."""
    found = [block.text for block in blocks("docs/how-to/templates.md")]
    [example] = [text for text in found if "from_aws_registry" in text]
    program = f"from e2b import Template\nprint(Template.to_json({example.strip()}))"
    done = subprocess.run(
        [python_of(NEWEST), "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    sent = json.loads(done.stdout)
    assert sent["fromImage"] == AWS_IMAGE
    assert sent["fromImageRegistry"].keys() == AWS.keys()
    assert [sent["fromImageRegistry"][name] for name in ("type", "awsRegion")] == [
        AWS["type"],
        AWS["awsRegion"],
    ]
