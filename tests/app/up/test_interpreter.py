"""The installation of the code interpreter beside `paddock up`."""

import asyncio
import sys
from pathlib import Path

from paddock.app.up import interpreter
from paddock.settings import Settings

LINES = """
import sys
for line in (
    "=> code-interpreter-v1 from base, build b",
    "CACHED [builder 1/3] COPY . /opt [0123456789ab]",
    "[builder 2/3] RUN pip install [0123456789ab]",
    "[builder 2/3] [stdout]: downloading",
    *sys.argv[2:],
):
    print("x" * 300_000 if line == "LONG" else line, file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


def settings_in(directory: Path) -> Settings:
    (directory / "logs").mkdir()
    return Settings(state_dir=str(directory))


async def said(directory: Path, *arguments: str) -> list[str]:
    found: list[str] = []
    argv = [sys.executable, "-c", LINES, *arguments]
    await interpreter.install(settings_in(directory), None, found.append, argv)
    return found


async def test_the_steps_that_run_and_the_end_are_shown(tmp_path: Path) -> None:
    assert await said(tmp_path, "0") == [
        "code interpreter: step 2/3",
        "code interpreter: installed; run_code() works",
    ]
    assert "downloading" in (tmp_path / "logs" / interpreter.LOG).read_text()


async def test_a_failure_names_the_reason_the_log_and_the_command(tmp_path: Path) -> None:
    last = (await said(tmp_path, "1", "error: no space left", "", "hint: delete"))[-1]
    assert "not installed: no space left" in last
    assert "`paddock template install code-interpreter` tries again" in last
    assert str(tmp_path / "logs" / interpreter.LOG) in last


async def test_a_very_long_line_is_kept_whole(tmp_path: Path) -> None:
    await said(tmp_path, "0", "LONG")
    assert "x" * 300_000 in (tmp_path / "logs" / interpreter.LOG).read_text()


async def test_a_stop_ends_the_process_and_waits_for_it(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    program = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    work = asyncio.create_task(
        interpreter.install(
            settings_in(tmp_path), None, lambda _: None, [sys.executable, "-c", program]
        )
    )
    while not (mark.exists() and mark.read_text()):
        await asyncio.sleep(0.01)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert not Path(f"/proc/{mark.read_text()}").exists()


def test_the_installation_uses_the_configuration_of_the_supervisor() -> None:
    made = interpreter.command(Path("/etc/paddock.toml"))
    assert made[3:5] == ["--config", "/etc/paddock.toml"]
    assert made[5:8] == ["template", "install", "code-interpreter"]
