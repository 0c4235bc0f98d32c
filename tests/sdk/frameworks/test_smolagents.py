"""The example of smolagents with the real code interpreter and its kernels, without a sandbox."""

import os
from pathlib import Path

import pytest

from tests.cli.run.conftest import fake_api
from tests.cli.run.test_kernels import Forwarder
from tests.code_interpreter.e2b.conftest import Server, server
from tests.sdk.frameworks.examples import EXAMPLES, programs_of, run
from tests.sdk.frameworks.stub_model import Say, stub_model

__all__ = ["server"]
pytestmark = [pytest.mark.sdk, pytest.mark.timeout(300)]


async def test_a_code_agent_keeps_variables_between_its_steps(
    server: Server, tmp_path: Path
) -> None:
    python = programs_of("langchain-smolagents") / "python"
    turns = (
        Say("<code>\na, b = 0, 1\nfor _ in range(30):\n    a, b = b, a + b\nprint(a)\n</code>"),
        Say("<code>\nfinal_answer(a)\n</code>"),
    )
    async with (
        fake_api(Forwarder(server.url), tmp_path) as api,
        stub_model(*turns) as model,
    ):
        url = api.interpreter.url
        environment = {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": "e2b_" + "0" * 40}
        own = {**os.environ, **environment}
        text = await run(python, [EXAMPLES / "smolagents_code.py"], own, model, tmp_path)
        assert api.killed == ["i1"]
    assert "832040" in text.splitlines()
