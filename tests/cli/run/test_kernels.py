"""`paddock run` with the real code interpreter and its kernels, without a sandbox."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.cli.run.conftest import FakeApi, fake_api
from tests.code_interpreter.e2b.conftest import Server, server
from tests.run_code.server import InterpreterServer, end

__all__ = ["server"]
pytestmark = pytest.mark.timeout(240)


class Forwarder(InterpreterServer):
    """Forwards each run to the code interpreter, as the gateway does."""

    def __init__(self, server_url: str) -> None:
        super().__init__(end)
        self._server_url = server_url

    async def execute(self, request: web.Request) -> web.StreamResponse:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self._server_url}/execute", data=await request.read()) as found,
        ):
            response = web.StreamResponse(status=found.status)
            await response.prepare(request)
            async for data in found.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response


@pytest.fixture
async def api(server: Server, tmp_path: Path) -> AsyncIterator[FakeApi]:
    async with fake_api(Forwarder(server.url), tmp_path) as opened:
        yield opened


async def test_a_script_runs_with_its_arguments(api: FakeApi) -> None:
    (api.directory / "job.py").write_text(
        "import sys\n\nif __name__ == '__main__':\n    print(*sys.argv, sep='|')\n"
        "    print('careful', file=sys.stderr)\n"
    )
    done = await api.run("job.py", "a b", "--fast", "'ö")
    assert done == (0, "job.py|a b|--fast|'ö\n", "careful\n")


async def test_the_value_of_the_last_expression_is_printed(api: FakeApi) -> None:
    assert await api.run("-c", "x = 20\nx + 22") == (0, "42\n", "")


async def test_an_exception_shows_the_line_of_the_script(api: FakeApi) -> None:
    (api.directory / "job.py").write_text("x = 1\ny = 2\nx / 0\n")
    done = await api.run("job.py")
    assert done.code == 1
    assert "----> 3 x / 0" in done.err
    assert "ZeroDivisionError: division by zero" in done.err


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit", 0, ""),
        ("import sys; sys.exit('it failed')", 1, "it failed\n"),
    ],
    ids=["number", "nothing", "message"],
)
async def test_sys_exit_sets_the_exit_code_in_silence(
    api: FakeApi, code: str, status: int, text: str
) -> None:
    assert await api.run("-c", code) == (status, "", text)


async def test_charts_are_saved_as_png(api: FakeApi) -> None:
    plot = "import matplotlib.pyplot as plt\nplt.plot([1, 2], [3, 4])\nplt.show()"
    done = await api.run("-c", plot)
    assert (done.code, done.err) == (0, "saved chart-1.png\n")
    assert (api.directory / "chart-1.png").read_bytes().startswith(b"\x89PNG")
    [shown] = json.loads((await api.run("-o", "json", "-c", plot)).out)["results"]
    assert (shown["file"], shown["chart"]["type"]) == ("chart-2.png", "line")


async def test_bash_gets_arguments_and_returns_its_status(api: FakeApi) -> None:
    (api.directory / "job.sh").write_text('echo "$1"; exit 4\n')
    done = await api.run("job.sh", "a b")
    assert (done.code, done.out) == (4, "a b\n")


async def test_output_of_100_mb_arrives_whole(api: FakeApi) -> None:
    done = await api.run("-c", "for _ in range(100):\n    print('x' * 999_999)", seconds=200)
    assert done.code == 0
    assert len(done.out) == 100_000_000
