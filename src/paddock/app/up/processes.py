"""Child processes of an installation: start, restart after a crash, stop."""

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paddock.kit.backoff import Backoff
from paddock.kit.errors import UnavailableError
from paddock.kit.logs import fields

log = logging.getLogger(__name__)

_RESTART = Backoff(base_seconds=0.2, cap_seconds=10.0)
_STEADY_SECONDS = 30.0
"""A process that ran this long is restarted without delay."""
TRIES, PATIENT_TRIES = 3, 8
"""After this many starts a process is given up; with backoff, eight take half a minute."""
STOP_SECONDS = 15.0
LOG_LIMIT_BYTES = 64 << 20
"""A larger log is rotated; one old log is kept."""
_TAIL_BYTES = 8192


class SupervisedProcess:
    """One child process that is restarted whenever it ends."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_file: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.environment = environment or {}
        """Added to our own environment."""
        self._command = tuple(command)
        self._log_file = log_file
        self._child: asyncio.subprocess.Process | None = None
        self._failures = 0
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """The process id while it runs, else None."""
        return self._child.pid if self._child and self._child.returncode is None else None

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments, program first."""
        return self._command

    @property
    def log_file(self) -> Path:
        """The file that receives its output."""
        return self._log_file

    async def keep_running(self) -> None:
        """Start the process, and again whenever it ends, until cancelled; then stop it."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                started = loop.time()
                code = await self._run_once()
                lived = loop.time() - started
                self._failures = 0 if lived > _STEADY_SECONDS else self._failures + 1
                self.restarts += 1
                pause = _RESTART.delay(self._failures)
                log.warning(
                    "process ended and is restarted",
                    extra=fields(process=self.name, code=code, seconds=round(pause, 2)),
                )
                await asyncio.sleep(pause)
        finally:
            await self._stop()

    def rotate_log(self) -> None:
        """Copy a large log aside and truncate it; the process keeps writing to the same file."""
        if not self._log_file.exists() or self._log_file.stat().st_size < LOG_LIMIT_BYTES:
            return
        older = self._log_file.with_suffix(".log.1")
        shutil.copyfile(self._log_file, older)
        older.chmod(0o600)
        os.truncate(self._log_file, 0)

    async def _run_once(self) -> int:
        self._log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.rotate_log()
        with self._log_file.open("ab") as output:
            os.fchmod(output.fileno(), 0o600)
            self._child = await asyncio.create_subprocess_exec(
                *_with_parent_death_signal(self._command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.environment},
                # Its own group: the supervisor forwards Ctrl-C, in the order of the stop.
                process_group=0,
            )
        return await self._child.wait()

    async def _stop(self) -> None:
        child = self._child
        if child is None or child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await child.wait()
        except TimeoutError:
            log.warning("process did not stop and is killed", extra=fields(process=self.name))
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


def _with_parent_death_signal(command: Sequence[str]) -> tuple[str, ...]:
    """End the child when its supervisor is killed, so that the next `up` finds ports free."""
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", "TERM", *command) if setpriv else tuple(command)


async def wait_until(
    check: Callable[[], bool],
    process: SupervisedProcess,
    *,
    seconds: float,
    what: str,
    tries: int = TRIES,
) -> None:
    """Wait until `check` is true; raise with the last log line if the process does not start."""
    try:
        async with asyncio.timeout(seconds):
            while not check():
                if process.restarts >= tries:
                    raise UnavailableError(
                        f"{what} exits right after its start: {last_line(process.log_file)}",
                        hint=f"see {process.log_file}",
                    )
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise UnavailableError(
            f"{what} did not start within {seconds:g} s: {last_line(process.log_file)}",
            hint=f"see {process.log_file}",
        ) from error


def last_line(file: Path) -> str:
    """Return the last line of a log that is not a hint."""
    try:
        with file.open("rb") as log_file:
            log_file.seek(max(file.stat().st_size - _TAIL_BYTES, 0))
            lines = log_file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return "it wrote nothing"
    messages = [line for line in lines if line and not line.startswith("hint: ")]
    return messages[-1] if messages else "it wrote nothing"
