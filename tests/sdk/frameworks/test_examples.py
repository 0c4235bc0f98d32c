"""The examples for frameworks, run as a user would, with unmodified packages and a stub model."""

import re
import shutil
from pathlib import Path

import pytest

from tests.sdk.frameworks.examples import EXAMPLES, programs_of, run
from tests.sdk.frameworks.stub_model import Call, Say, stub_model

pytestmark = [pytest.mark.sdk, pytest.mark.sandbox, pytest.mark.timeout(480)]


async def test_a_tool_loop_of_the_openai_sdk(environment, tmp_path: Path) -> None:
    primes = (
        "found, number = [], 2\n"
        "while len(found) < 100:\n"
        "    if all(number % prime for prime in found):\n"
        "        found.append(number)\n"
        "    number += 1\n"
        "print(sum(found))\n"
    )
    turns = (Call("run_python", {"code": primes}), Say("The sum is {result}."))
    async with stub_model(*turns) as model:
        python, program = programs_of("openai") / "python", EXAMPLES / "openai_tools.py"
        assert await run(python, [program], environment, model, tmp_path) == "The sum is 24133.\n"


async def test_an_agent_of_the_openai_agents_sdk(environment, tmp_path: Path) -> None:
    turns = (Call("exec_command", {"cmd": "python3 --version"}), Say("It has {result}."))
    async with stub_model(*turns) as model:
        python, program = programs_of("openai") / "python", EXAMPLES / "openai_agent.py"
        assert "Python 3." in await run(python, [program], environment, model, tmp_path)


async def test_a_deep_agent_of_langchain(environment, tmp_path: Path) -> None:
    turns = (
        Call("write_file", {"file_path": "/home/user/count.sh", "content": "wc -l < /etc/passwd"}),
        Call("execute", {"command": "sh /home/user/count.sh && stat -c %U count.sh"}),
        Say("Users and owner: {result}"),
    )
    async with stub_model(*turns) as model:
        python = programs_of("langchain-smolagents") / "python"
        text = await run(python, [EXAMPLES / "deep_agent.py"], environment, model, tmp_path)
    answer = text.removeprefix("Users and owner: ").split()
    assert int(answer[0]) > 10
    assert answer[1] == "user"


async def test_a_task_of_inspect_builds_its_template(environment, tmp_path: Path) -> None:
    turns = (
        Call("bash", {"command": "wc -w < /srv/poem.txt"}),
        Say("The poem has {result} words."),
    )
    for path in (EXAMPLES / "inspect").iterdir():
        shutil.copy(path, tmp_path)
    async with stub_model(*turns) as model:
        programs = programs_of("inspect")
        command = [programs / "inspect", "eval", "words.py"]
        options = ["--model", "openai/gpt-5", "--display", "plain"]
        text = await run(programs / "python", [*command, *options], environment, model, tmp_path)
    assert re.search(r"accuracy\s+1\.0", text), text
