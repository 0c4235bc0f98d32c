"""The Python kernel, driven without a protocol."""

import os
from pathlib import Path

import pytest

import code_interpreter
from code_interpreter.kernels.run import RunRequest
from tests.code_interpreter.conftest import run, seen

HOOK = Path(code_interpreter.__file__).with_name("clone_hook.sh")

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_state_is_kept_between_runs(contexts) -> None:
    assert (await run(contexts, "x = 41")).results == []
    assert (await run(contexts, "x + 1")).text == "42"


async def test_runs_are_counted(contexts) -> None:
    first, second = await run(contexts, "1"), await run(contexts, "2")
    assert second.counts == [first.counts[0] + 1]


async def test_output_keeps_its_order_and_stream(contexts) -> None:
    code = "import sys, os\nprint('a')\nprint('b', file=sys.stderr)\nos.system('echo c')\nNone"
    result = await run(contexts, code)
    assert "a\n" in result.printed()
    assert "c\n" in result.printed()
    assert result.printed("stderr") == "b\n"


async def test_an_error_is_reported_once_with_a_plain_traceback(contexts) -> None:
    result = await run(contexts, "print('before')\n1/0")
    [failure] = result.failures
    assert (failure.name, failure.value) == ("ZeroDivisionError", "division by zero")
    assert "\x1b" not in failure.traceback
    assert "1/0" in failure.traceback
    assert result.printed() == "before\n"
    assert (await run(contexts, "2")).text == "2"


async def test_a_syntax_error_is_reported(contexts) -> None:
    assert [f.name for f in (await run(contexts, "def")).failures] == ["SyntaxError"]


async def test_indented_code_and_top_level_await_run(contexts) -> None:
    assert (await run(contexts, "    a = 1\n    a")).text == "1"
    assert (
        await run(contexts, "import asyncio\nawait asyncio.sleep(0, 'slept')")
    ).text == "'slept'"


async def test_variables_of_a_run_are_reset_after_it(contexts) -> None:
    show = "import os; os.environ.get('OWN'), os.environ['HOME'] == '/nowhere'"
    changed = await run(contexts, show, variables={"OWN": "it's", "HOME": "/nowhere"})
    assert changed.text == '("it\'s", True)'
    assert (await run(contexts, show)).text == "(None, False)"


async def test_variables_are_reset_after_a_failed_run(contexts) -> None:
    await run(contexts, "1/0", variables={"OWN": "x"})
    assert (await run(contexts, "import os; 'OWN' in os.environ")).text == "False"


async def test_a_clone_gets_its_own_variables_and_random_numbers(contexts) -> None:
    async def of_first():
        return {"WHERE": "first", "ONLY": "1"}

    async def of_second():
        return {"WHERE": "second"}

    code = "import os, random, numpy; random.seed(1); numpy.random.seed(1)"
    await run(contexts, code, generation="1", get_variables=of_first)
    show = "os.environ['WHERE'], os.environ.get('ONLY'), random.random(), numpy.random.rand()"
    same = await run(contexts, show, generation="1")
    new = await run(
        contexts, code.partition(";")[0] + ";" + show, generation="2", get_variables=of_second
    )
    assert same.text is not None
    assert new.text is not None
    assert same.text.startswith("('first', '1', 0.134")
    assert new.text.startswith("('second', None, ")
    assert same.text.split(",")[2:] != new.text.split(",")[2:]


async def test_the_hook_of_clones_seeds_again_while_code_runs(contexts, settings) -> None:
    environment = {"CODE_INTERPRETER_RUNTIME": str(settings.runtime)}
    code = f"""
import random, subprocess
random.seed(1)
subprocess.check_call(["sh", {str(HOOK)!r}], env={environment})
random.random() != 0.13436424411240122
"""
    assert (await run(contexts, code)).text == "True"


async def test_modules_installed_meanwhile_can_be_imported(contexts, settings) -> None:
    await run(
        contexts, "import sys; sys.path.append('lib')\ntry: import fresh\nexcept ImportError: pass"
    )
    (settings.home / "lib").mkdir()
    (settings.home / "lib" / "fresh.py").write_text("value = 7")
    assert (await run(contexts, "import fresh; fresh.value")).text == "7"


async def test_code_sees_neither_the_server_nor_its_settings(contexts, settings) -> None:
    show = "import os, sys; [n for n in os.environ if 'INTERPRETER' in n], sys.argv, os.getcwd()"
    assert (await run(contexts, show)).text == f"([], [''], '{settings.home}')"
    root = HOOK.parents[1]
    paths = f"[p for p in sys.path if p in ({str(root)!r}, {str(HOOK.parent)!r})]"
    assert (await run(contexts, paths)).text == "[]"


async def test_a_long_text_arrives_whole_and_in_pieces(contexts) -> None:
    result = await run(contexts, "print('é' * 3_000_000, end='')")
    assert result.printed() == "é" * 3_000_000
    assert max(len(event.text) for event in result.events if hasattr(event, "text")) <= 131072


async def test_runs_of_one_context_wait_for_each_other(contexts) -> None:
    context = contexts.default("python")
    first = context.run(RunRequest("import time; time.sleep(0.2); order = ['first']"))
    second = context.run(RunRequest("order + ['second']"))
    assert (await seen(second)).text == "['first', 'second']"
    await seen(first)


async def test_the_kernel_runs_as_this_user_in_its_own_session(contexts) -> None:
    result = await run(contexts, "import os; os.getuid(), os.getsid(0) == os.getpid()")
    assert result.text == f"({os.getuid()}, True)"
