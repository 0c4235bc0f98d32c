"""`paddock run`: output, exit codes, images, and the life of its sandbox."""

import asyncio
import base64
import json
import signal
from pathlib import Path

import pytest

from tests.cli.run.conftest import Serve
from tests.run_code.server import Run, end

PNG = b"\x89PNG\r\n\x1a\n"
PICTURE = base64.b64encode(PNG).decode()


async def greet(run: Run) -> None:
    """Print, warn and return a value."""
    await run.send(type="stdout", text="hello\n")
    await run.send(type="stderr", text="careful\n")
    await run.send(type="result", text="42", is_main_result=True)
    await end(run)


async def draw(run: Run) -> None:
    await run.send(type="result", png=PICTURE, text="<Figure>", chart={"type": "line"})
    await run.send(type="result", jpeg=PICTURE, text="<Image>")
    await run.send(type="result", svg="<svg/>", text="<SVG>")
    await end(run)


def failing(name: str, value: str, traceback: str = ""):
    async def fail(run: Run) -> None:
        await run.send(type="error", name=name, value=value, traceback=traceback)
        await end(run)

    return fail


async def wait(run: Run) -> None:
    await run.send(type="stdout", text="started\n")
    await asyncio.sleep(3600)


async def test_code_runs_in_a_new_sandbox_that_is_killed_at_the_end(serve: Serve) -> None:
    api = await serve(greet)
    done = await api.run("--env", "COLOUR=blue", "--timeout", "30", "-c", "print('hello'); 42")
    assert done == (0, "hello\n42\n", "careful\n")
    [body] = api.created
    assert (body["templateID"], body["envVars"]) == ("code-interpreter-v1", {"COLOUR": "blue"})
    assert body["timeout"] == 90, "the sandbox ends by itself if the command is killed"
    assert api.killed == ["i1"]
    sent = api.interpreter.headers[-1]
    assert (sent["E2b-Sandbox-Id"], sent["E2b-Sandbox-Port"]) == ("i1", "49999")
    assert (sent["X-Access-Token"], sent["E2B-Traffic-Access-Token"]) == ("secret", "traffic")


async def test_a_script_gets_its_arguments_and_its_lines_stay_as_they_are(serve: Serve) -> None:
    api = await serve(greet)
    (api.directory / "job.py").write_text("import sys\nprint(sys.argv)\n")
    done = await api.run("job.py", "a b", "--fast", "-o", "ö'")
    assert done.code == 0
    prelude, code = api.codes
    assert code == "import sys\nprint(sys.argv)\n"
    assert "['job.py', 'a b', '--fast', '-o', \"\\xf6'\"]" in prelude
    assert {body["language"] for body in api.interpreter.bodies} == {"python"}


async def test_standard_input_is_code_with_the_name_of_a_dash(serve: Serve) -> None:
    api = await serve(greet)
    done = await api.run("-", "x", stdin="1 + 1")
    assert done.code == 0
    assert api.codes[1] == "1 + 1"
    assert "['-', 'x']" in api.codes[0]


async def test_the_suffix_of_a_file_selects_the_language(serve: Serve) -> None:
    api = await serve(greet)
    (api.directory / "job.ts").write_text("1")
    (api.directory / "job.sh").write_text("echo $1")
    await api.run("job.ts")
    await api.run("job.sh", "a b")
    await api.run("--language", "r", "job.ts")
    said = [(body["language"], body["code"]) for body in api.interpreter.bodies]
    assert said == [("typescript", "1"), ("bash", "set -- 'a b'"), ("bash", "echo $1"), ("r", "1")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no code to run"),
        (("job.rb",), "name the language with --language"),
        (("job.js", "x"), "javascript code takes no arguments"),
    ],
    ids=["nothing", "unknown suffix", "arguments"],
)
async def test_a_usage_error_creates_no_sandbox(serve: Serve, arguments, message: str) -> None:
    api = await serve(greet)
    (api.directory / "job.js").write_text("1")
    done = await api.run(*arguments)
    assert done.code == 2
    assert message in done.err
    assert api.created == []


async def test_a_missing_file_is_an_error(serve: Serve) -> None:
    api = await serve(greet)
    done = await api.run("nowhere.py")
    assert (done.code, done.err) == (1, "error: nowhere.py: No such file or directory\n")


# ---- exit codes ----------------------------------------------------------------------------


async def test_an_exception_prints_its_traceback_and_exits_with_1(serve: Serve) -> None:
    api = await serve(failing("ValueError", "no", "Traceback\nValueError: no"))
    assert await api.run("-c", "x") == (1, "", "Traceback\nValueError: no\n")
    assert api.killed == ["i1"]


@pytest.mark.parametrize(
    ("value", "code", "text"),
    [("3", 3, ""), ("0", 0, ""), ("", 0, ""), ("None", 0, ""), ("-1", 255, ""), ("no", 1, "no\n")],
)
async def test_sys_exit_sets_the_exit_code(serve: Serve, value: str, code: int, text: str) -> None:
    api = await serve(failing("SystemExit", value, "a traceback that is not shown"))
    assert await api.run("-c", "x") == (code, "", text)


async def test_a_kernel_that_ends_is_an_error(serve: Serve) -> None:
    async def die(run: Run) -> None:
        await run.send(type="unexpected_end_of_execution")

    api = await serve(die)
    done = await api.run("-c", "x")
    assert (done.code, done.err) == (1, "the kernel ended while it ran the code\n")


async def test_a_sandbox_that_ends_is_an_error(serve: Serve) -> None:
    async def vanish(run: Run) -> None:
        await run.send(type="stdout", text="before\n")
        run.cut()

    api = await serve(vanish)
    done = await api.run("-c", "x")
    assert done.code == 1
    assert "error: the sandbox ended or was paused while the code ran" in done.err


async def test_a_timeout_interrupts_the_code_and_kills_the_sandbox(serve: Serve) -> None:
    api = await serve(wait)
    # Long enough to connect and print on a busy machine.
    done = await api.run("--timeout", "5", "-c", "x")
    assert (done.code, done.out) == (1, "started\n")
    assert "the code ran for more than 5 s" in done.err
    assert api.killed == ["i1"]


async def test_a_missing_template_is_an_error_with_the_advice_of_the_api(serve: Serve) -> None:
    api = await serve(greet)
    api.refusal = (404, "template 'mine' not found (install it)")
    done = await api.run("--template", "mine", "-c", "1")
    assert (done.code, done.err) == (1, "error: template 'mine' not found (install it)\n")


# ---- results -------------------------------------------------------------------------------


async def test_images_are_saved_and_nothing_is_overwritten(serve: Serve) -> None:
    api = await serve(draw)
    kept = api.directory / "out" / "chart-1.png"
    kept.parent.mkdir()
    kept.write_text("mine")
    done = await api.run("--output-dir", "out", "-c", "x")
    assert done == (
        0,
        "",
        "saved out/chart-2.png\nsaved out/image-1.jpg\nsaved out/image-2.svg\n",
    )
    assert kept.read_text() == "mine"
    assert (kept.parent / "chart-2.png").read_bytes() == PNG
    assert (kept.parent / "image-2.svg").read_text() == "<svg/>"


async def test_json_has_output_results_files_and_the_exception(serve: Serve) -> None:
    api = await serve(greet)
    assert await api.json("-c", "x") == {
        "sandboxID": "i1",
        "exitCode": 0,
        "stdout": "hello\n",
        "stderr": "careful\n",
        "results": [{"is_main_result": True, "text": "42"}],
        "error": None,
    }
    api = await serve(draw)
    chart, *_ = (await api.json("-c", "x"))["results"]
    path = Path(chart.pop("file"))
    assert chart == {"is_main_result": False, "text": "<Figure>", "chart": {"type": "line"}}
    assert (api.directory / path).read_bytes() == PNG
    api = await serve(failing("ValueError", "no", "Traceback"))
    found = await api.json("-c", "x")
    assert (found["exitCode"], found["error"]["name"]) == (1, "ValueError")


async def test_a_run_that_is_broken_off_still_prints_its_json(serve: Serve) -> None:
    api = await serve(wait)
    done = await api.run("-o", "json", "--timeout", "1", "-c", "x")
    found = json.loads(done.out)
    assert (done.code, found["exitCode"], found["stdout"]) == (1, 1, "started\n")


async def test_output_is_forwarded_while_the_code_runs(serve: Serve) -> None:
    api = await serve(wait)
    process = await api.start("-c", "x")
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 30) == b"started\n"
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(process.communicate(), 30)


# ---- the sandbox ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signo", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
async def test_an_interrupt_ends_the_code_and_kills_the_sandbox(
    serve: Serve, signo: signal.Signals, code: int
) -> None:
    api = await serve(wait)
    process = await api.start("-c", "x")
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readline(), 30)
    process.send_signal(signo)
    _, err = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, err) == (code, b"")
    assert api.killed == ["i1"]
    await asyncio.wait_for(api.interpreter.disconnected.wait(), 30)


async def test_an_interrupt_during_the_creation_kills_the_sandbox_too(serve: Serve) -> None:
    api = await serve(greet)
    api.may_create.clear()
    process = await api.start("-c", "x")
    await asyncio.wait_for(api.creating.wait(), 30)
    process.send_signal(signal.SIGINT)
    api.may_create.set()
    await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 130
    assert len(api.created) == 1
    assert api.killed == ["i1"]


async def test_a_kept_sandbox_is_not_killed_and_its_id_is_printed(serve: Serve) -> None:
    api = await serve(greet)
    done = await api.run("--keep", "-c", "x")
    assert (done.code, done.out) == (0, "hello\n42\n")
    assert "sandbox i1 is kept and ends in 360 s" in done.err
    assert api.killed == []


async def test_a_reader_that_leaves_ends_the_run_and_the_sandbox(serve: Serve) -> None:
    async def chatter(run: Run) -> None:
        while True:
            await run.send(type="stdout", text="x" * 65536)

    api = await serve(chatter)
    process = await api.start("-c", "x")
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readexactly(100), 30)
    process._transport.get_pipe_transport(1).close()
    await asyncio.wait_for(process.wait(), 30)
    assert api.killed == ["i1"]
