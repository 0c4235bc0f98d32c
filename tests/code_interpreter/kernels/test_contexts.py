"""Contexts: isolation, restarts, interrupts, kernels that end."""

import asyncio
import os
import shutil
import signal

import pytest
import pytest_asyncio

from code_interpreter.kernels import process
from code_interpreter.kernels.contexts import Contexts
from code_interpreter.kernels.events import Accepted, KernelError, Output, UnknownContextError
from code_interpreter.kernels.process import Exit, explain
from code_interpreter.kernels.run import RunRequest
from tests.code_interpreter.conftest import make_settings, run, seen

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Little output, and kernels that obey an interrupt are not replaced on a busy machine."""
    made = make_settings(
        tmp_path_factory.mktemp("home"), max_output_bytes=8 << 20, interrupt_seconds=100.0
    )
    yield made
    shutil.rmtree(made.runtime)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(contexts):
    """A second context of Python."""
    return await contexts.create("python", "/usr")


async def test_default_contexts_are_listed_and_javascript_does_not_run_yet(contexts) -> None:
    assert [c.language.name for c in contexts.all()][:2] == ["python", "javascript"]
    assert [c.is_started for c in contexts.all()][:2] == [True, False]
    assert contexts.default(None) is contexts.default("Python")


async def test_contexts_share_nothing_and_have_their_own_directory(contexts, other) -> None:
    await run(contexts, "mine = 1")
    result = await seen(other.run(RunRequest("import os; os.getcwd(), 'mine' in globals()")))
    assert result.text == "('/usr', False)"


async def test_what_is_not_there_is_named(contexts) -> None:
    with pytest.raises(KernelError, match="'cobol'"):
        contexts.default("cobol")
    with pytest.raises(KernelError, match="/not/there"):
        await contexts.create("python", "/not/there")
    with pytest.raises(UnknownContextError, match="nope"):
        contexts.get("nope")


async def test_an_abandoned_run_is_interrupted_and_the_state_stays(contexts) -> None:
    context = contexts.default("python")
    await run(contexts, "kept = 1")
    endless = context.run(RunRequest("while True: pass"))
    assert isinstance(await endless.next(), Accepted)
    context.abandon(endless)
    assert (await run(contexts, "kept")).text == "1"


async def test_a_program_that_code_waits_for_is_interrupted(contexts) -> None:
    context = contexts.default("python")
    await run(contexts, "kept = 1")
    sleeping = context.run(RunRequest("import os; print('go'); os.system('sleep 100')"))
    while await sleeping.next() != Output("stdout", "go\n"):
        pass
    context.abandon(sleeping)
    assert (await run(contexts, "kept")).text == "1"


async def test_a_kernel_that_does_not_obey_is_replaced_and_the_next_run_says_so(tmp_path) -> None:
    settings = make_settings(tmp_path, interrupt_seconds=2.0)
    impatient = Contexts(settings)
    context = await impatient.create("python", None)
    code = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("deaf")
while True: pass
"""
    stubborn = context.run(RunRequest(code))
    while await stubborn.next() != Output("stdout", "deaf\n"):
        pass
    context.abandon(stubborn)
    result = await seen(context.run(RunRequest("'signal' in globals()")))
    assert result.text == "False"
    assert "did not stop within 2 s" in result.printed("stderr")
    await impatient.close()
    settings.runtime.rmdir()


async def test_a_kernel_that_is_killed_says_so_and_is_replaced(other) -> None:
    result = await seen(other.run(RunRequest("print('last'); import os; os.kill(os.getpid(), 9)")))
    assert [(f.name, f.value) for f in result.failures] == [
        ("KernelDied", "the kernel was killed by SIGKILL")
    ]
    assert (await seen(other.run(RunRequest("1 + 1")))).text == "2"


async def test_a_kernel_that_ended_while_idle_is_replaced_and_the_next_run_says_so(other) -> None:
    code = (
        "import os, signal; _ = signal.signal(signal.SIGTERM, lambda *_: os._exit(3)); os.getpid()"
    )
    result = await seen(other.run(RunRequest(code)))
    os.kill(int(result.text or ""), signal.SIGTERM)
    while other.is_started:
        await asyncio.sleep(0.02)
    result = await seen(other.run(RunRequest("1 + 1")))
    assert result.text == "2"
    assert "exited with status 3" in result.printed("stderr")


async def test_a_restart_ends_the_run_and_forgets_the_state(other) -> None:
    running = other.run(RunRequest("x = 1\nwhile True: pass"))
    assert isinstance(await running.next(), Accepted)
    await other.restart()
    assert [f.name for f in (await seen(running)).failures] == ["ContextRestarting"]
    result = await seen(other.run(RunRequest("'x' in globals()")))
    assert (result.text, result.printed("stderr")) == ("False", "")


async def test_too_much_output_interrupts_the_run_and_says_so(contexts) -> None:
    await run(contexts, "kept = 1")
    result = await run(contexts, "while True: print('x' * 1000)")
    names = [f.name for f in result.failures]
    assert "OutputLimitExceeded" in names
    assert len(result.printed()) <= 8 << 20
    assert (await run(contexts, "kept")).text == "1"


async def test_a_slow_reader_stops_the_kernel_and_gets_everything(contexts) -> None:
    context = contexts.default("python")
    printing = context.run(RunRequest("for i in range(7000): print('y' * 999)\nprint('end')"))
    await asyncio.sleep(1)
    assert printing.queue.waiting_bytes < 6 << 20
    result = await seen(printing)
    assert result.printed() == ("y" * 999 + "\n") * 7000 + "end\n"


async def test_removing_a_context_ends_its_run(contexts) -> None:
    made = await contexts.create("python", None)
    running = made.run(RunRequest("while True: pass"))
    assert isinstance(await running.next(), Accepted)
    await contexts.remove(made.id)
    assert [f.name for f in (await seen(running)).failures] == ["ContextRemoved"]
    with pytest.raises(UnknownContextError):
        contexts.get(made.id)


async def test_a_server_that_starts_ends_kernels_of_one_that_was_killed(tmp_path) -> None:
    left = process.KernelProcess(
        "left-1", ["sleep", "1000"], runtime=tmp_path, cwd=tmp_path, environment={}
    )
    process.kill_left(tmp_path)
    assert (await left.exited).status == -9


async def test_an_end_for_lack_of_memory_is_explained() -> None:
    gib = 1 << 30
    assert explain(Exit(-9, int(1.9 * gib)), 2 * gib) == (
        "the kernel was killed: it used 1945 MiB of the sandbox's 2048 MiB of memory"
    )
    assert explain(Exit(-9, 1 << 20), 2 * gib) == "the kernel was killed by SIGKILL"
    assert explain(Exit(2, 0), 0) == "the kernel exited with status 2"
