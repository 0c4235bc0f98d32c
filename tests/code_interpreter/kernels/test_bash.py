"""The persistent bash."""

import pytest

from code_interpreter.kernels.bash import quoted
from code_interpreter.kernels.events import Output
from code_interpreter.kernels.run import RunRequest
from tests.code_interpreter.conftest import Seen, run

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def bash(contexts, code: str, **request) -> Seen:
    return await run(contexts, code, "bash", **request)


async def test_variables_functions_and_the_directory_are_kept(contexts) -> None:
    await bash(contexts, "x=41; f() { echo $((x + 1)); }; cd /usr")
    result = await bash(contexts, "f; pwd; cd ~-")
    assert result.printed() == "42\n/usr\n"
    assert result.printed("stderr") == ""


async def test_code_of_any_form_runs(contexts) -> None:
    text = "'quotes' \"two\" \\back $HOME `x` !history é😀\n"
    result = await bash(contexts, f"cat <<'END'\n{text}END\nif true; then\n  echo yes\nfi")
    assert result.printed() == f"{text}yes\n"
    assert quoted("a\n'b'\\") == r"$'a\n\'b\'\\'"


async def test_a_failing_command_is_reported_with_its_status(contexts) -> None:
    result = await bash(contexts, "echo out; (exit 3)")
    assert [(f.name, f.value) for f in result.failures] == [("ExitStatus", "3")]
    assert result.printed() == "out\n"


async def test_a_syntax_error_leaves_the_shell_usable(contexts) -> None:
    result = await bash(contexts, "echo 'unterminated")
    assert result.failures
    assert "unexpected EOF" in result.printed("stderr")
    assert (await bash(contexts, "echo fine")).printed() == "fine\n"


async def test_code_reads_nothing_from_the_shell(contexts) -> None:
    assert (await bash(contexts, "cat; echo done")).printed() == "done\n"


async def test_exit_ends_the_shell_with_its_status_and_the_next_run_has_another(contexts) -> None:
    await bash(contexts, "gone=1")
    result = await bash(contexts, "echo last; exit 7")
    assert result.printed() == "last\n"
    assert [f.value for f in result.failures] == ["7"]
    result = await bash(contexts, 'echo "[$gone]"')
    assert (result.printed(), result.printed("stderr")) == ("[]\n", "")


async def test_variables_of_a_run_are_reset_after_it(contexts) -> None:
    assert (await bash(contexts, "echo $OWN", variables={"OWN": "a 'b'"})).printed() == "a 'b'\n"
    assert (await bash(contexts, "echo [$OWN]")).printed() == "[]\n"


async def test_an_interrupt_abandons_a_loop_and_keeps_the_state(contexts) -> None:
    context = contexts.default("bash")
    await bash(contexts, "kept=1")
    loop = context.run(RunRequest("for i in 1 2 3; do echo $i; sleep 100; done"))
    while await loop.next() != Output("stdout", "1\n"):
        pass
    context.abandon(loop)
    result = await bash(contexts, "echo $kept")
    assert result.printed() == "1\n"
    assert result.printed("stderr") == ""


async def test_a_program_in_the_background_never_waits_for_a_reader(contexts) -> None:
    result = await bash(
        contexts, "(head -c 1000000 /dev/zero | tr '\\0' x; echo end > written) & echo started"
    )
    assert "started\n" in result.printed()
    result = await bash(contexts, "wait; cat written")
    assert result.printed().endswith("end\n")


async def test_a_prompt_set_by_code_is_not_printed(contexts) -> None:
    await bash(contexts, "PS1='(venv) $ '")
    assert (await bash(contexts, "echo a")).printed("stderr") == ""


async def test_much_output_arrives_whole(contexts) -> None:
    result = await bash(contexts, "head -c 20000000 /dev/zero | tr '\\0' x")
    assert result.printed() == "x" * 20_000_000
