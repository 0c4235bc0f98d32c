"""Installs the code interpreter beside a running installation, so that no start waits for it.

A process of its own runs `paddock template install code-interpreter`. With unchanged contents all
of its steps are cached, so this costs a moment at each start. The build belongs to the control
plane: if this process is stopped, the next one continues at the last layer.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paddock.app.up.processes import last_line
from paddock.cli.http import CallError, Endpoint
from paddock.cli.template.log_lines import Heading, parse
from paddock.kit.errors import PaddockError
from paddock.settings import Settings

INSTALL = "template install code-interpreter"
TEMPLATE = "code-interpreter-v1"
LOG = "code-interpreter.log"
_COMMAND = "import sys; from paddock.cli import main; sys.exit(main())"
_STOP_SECONDS = 10.0
_CHECK_SECONDS = 2.0


def is_installed(url: str, api_key: str) -> bool:
    """Whether the template is ready; also true if this cannot be determined."""
    endpoint = Endpoint(url, {"X-API-Key": api_key})
    path = f"/templates/aliases/{TEMPLATE}%3Adefault"
    try:
        endpoint.call("GET", path, timeout_seconds=_CHECK_SECONDS)
    except CallError as error:
        return error.status != 404
    except PaddockError:
        return True
    return True


def command(config: Path | None) -> list[str]:
    """Return the command line of the installation."""
    given = ("--config", str(config)) if config is not None else ()
    return [sys.executable, "-c", _COMMAND, *given, *INSTALL.split(), "--progress", "plain"]


async def install(
    settings: Settings,
    config: Path | None,
    say: Callable[[str], None],
    argv: Sequence[str] | None = None,
) -> None:
    """Run the installation; say which step runs and how it ends. Its output is in a log."""
    log = settings.state / "logs" / LOG
    process = await asyncio.create_subprocess_exec(
        *(argv or command(config)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        # A signal of the terminal is for the supervisor, which ends this process.
        start_new_session=True,
    )
    try:
        # Unbuffered: people read the log while the build runs.
        with log.open("ab", buffering=0) as file:
            await _follow(process, file.write, say)
        if await process.wait() == 0:
            say("code interpreter: installed; run_code() works")
        else:
            say(
                f"code interpreter: not installed: {last_line(log).removeprefix('error: ')} "
                f"(`paddock {INSTALL}` tries again; the log is {log})"
            )
    finally:
        await _end(process)


async def _follow(
    process: asyncio.subprocess.Process, keep: Callable[[bytes], object], say: Callable[[str], None]
) -> None:
    """Keep every line that a process writes; say the headings of steps that run."""
    if process.stderr is None:
        return
    while line := await _line(process.stderr):
        keep(line)
        found = parse(line.decode(errors="replace").rstrip("\n"))
        if isinstance(found, Heading) and not found.is_cached:
            say(f"code interpreter: step {found.label}")


async def _line(stream: asyncio.StreamReader) -> bytes:
    """Return the next line, or the rest of a very long one."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(max(error.consumed, 1))


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process that still runs; the build goes on in the control plane."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
