"""JavaScript and TypeScript."""

import pytest

from code_interpreter.kernels.events import Output
from code_interpreter.kernels.run import RunRequest
from tests.code_interpreter.conftest import run, seen

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def javascript(contexts, code: str, **request):
    return await run(contexts, code, "javascript", **request)


async def test_state_and_counts_are_kept_between_runs(contexts) -> None:
    first = await javascript(contexts, "const x = 41; let y = 1")
    second = await javascript(contexts, "x + y")
    assert second.text == "42"
    assert second.counts == [first.counts[0] + 1]


async def test_all_output_arrives_before_the_end(contexts) -> None:
    result = await javascript(contexts, "for (let i = 0; i < 2000; i++) console.log('line ' + i)")
    assert result.printed() == "".join(f"line {i}\n" for i in range(2000))


async def test_an_error_is_reported_once(contexts) -> None:
    result = await javascript(contexts, "console.error('before'); throw new TypeError('bad')")
    assert [(f.name, f.value) for f in result.failures] == [("TypeError", "bad")]
    assert result.printed("stderr") == "before\n"


async def test_modules_promises_and_the_process_work(contexts) -> None:
    code = (
        "import fs from 'fs'; await Promise.resolve([fs.existsSync('/etc'), process.cwd()].join())"
    )
    assert (await javascript(contexts, code)).text == f'"true,{contexts.default("js").cwd}"'


async def test_variables_of_a_run_are_reset_after_it(contexts) -> None:
    value = "a'b\"c\\"
    shown = await javascript(contexts, "console.log(process.env.OWN)", variables={"OWN": value})
    assert shown.printed() == f"{value}\n"
    shown = await javascript(contexts, "console.log(process.env.OWN)")
    assert shown.printed() == "undefined\n"


@pytest.mark.parametrize("language", ["javascript", "typescript"])
async def test_a_clone_draws_its_own_random_numbers(contexts, language) -> None:
    async def draw(code: str, generation: str) -> str | None:
        return (await run(contexts, code, language, generation=generation)).text

    await draw("globalThis.mine = Math.random = () => 0.25", "first")
    assert await draw("Math.random === mine", "first") == "true"
    assert await draw("Math.random === mine", "second") == "false"
    draws = "const n = Array.from({length: 20000}, Math.random); "
    ranges = "n.every((x) => x >= 0 && x < 1), n.reduce((x, y) => x + y) / n.length"
    shown = await draw(f"{{ {draws} [new Set(n).size, {ranges}].join() }}", "second")
    different, are_in_range, mean = (shown or "").strip('"').split(",")
    assert (different, are_in_range) == ("20000", "true")
    assert 0.45 < float(mean) < 0.55
    assert await draw("new Set(crypto.getRandomValues(new Uint32Array(8))).size", "third") == "8"
    form = "/^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/"
    assert await draw(f"{form}.test(crypto.randomUUID())", "third") == "true"


async def test_typescript_has_a_context_of_its_own(contexts) -> None:
    code = "interface P { a: number }\nconst p: P = {a: 3}\np.a"
    assert (await run(contexts, code, "ts")).text == "3"
    assert contexts.default("typescript") is not contexts.default("javascript")


async def test_an_endless_loop_is_interrupted(contexts) -> None:
    context = contexts.default("javascript")
    endless = context.run(RunRequest("console.log('go'); while (true) {}"))
    while await endless.next() != Output("stdout", "go\n"):
        pass
    context.abandon(endless)
    assert (await seen(context.run(RunRequest("1 + 1")))).text == "2"
