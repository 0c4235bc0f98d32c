"""The process of a kernel: started in a session of its own, waited for, and explained once ended.

Its id is in a file, so that a server that was killed leaves no kernel behind: the next one ends
what the files name. Hooks of clones use the files too.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

KERNEL = "CODE_INTERPRETER_KERNEL"
"""The variable by which the process of a kernel is known."""
_OOM_SCORE = 300
"""When memory is short, the kernel ends and not the server."""
_KIB = 1024
_LARGE = 0.5
"""A killed process that had this share of the memory was probably killed for it."""


class Exit(NamedTuple):
    """How a process ended."""

    status: int
    """As `subprocess` has it: negative for a signal."""
    peak_bytes: int
    """The most memory that the process had."""


class KernelProcess:
    """A child process and its end."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        runtime: Path,
        cwd: Path,
        environment: Mapping[str, str],
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
        stderr: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[Exit] = loop.create_future()
        """Its result is the end of the process."""
        self._popen = subprocess.Popen(
            command,
            cwd=cwd,
            env={**environment, KERNEL: name},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
        self.pid = self._popen.pid
        self._file = runtime / f"{name}.pid"
        try:
            self._file.write_text(f"{self.pid}\n")
            with contextlib.suppress(OSError):
                Path(f"/proc/{self.pid}/oom_score_adj").write_text(str(_OOM_SCORE))
            # A waiting thread costs nothing; a poll would wake the sandbox again and again.
            threading.Thread(
                target=self._wait, args=(loop,), name="kernel exit", daemon=True
            ).start()
        except BaseException:
            # Nobody else would end it: the caller gets no object.
            self._popen.kill()
            self._popen.wait()
            self._file.unlink(missing_ok=True)
            raise

    def signal(self, number: int, *, to_group: bool = False) -> None:
        """Send a signal to the process, or to its group."""
        if self.exited.done():
            return
        with contextlib.suppress(ProcessLookupError):
            if to_group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    async def kill(self) -> None:
        """Kill the process group and wait for the process."""
        self.signal(signal.SIGKILL, to_group=True)
        await asyncio.shield(self.exited)

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        _, status, usage = os.wait4(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._popen.returncode = code
        self._file.unlink(missing_ok=True)
        # The loop is closed if the server ends first.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._set, Exit(code, usage.ru_maxrss * _KIB))

    def _set(self, end: Exit) -> None:
        if not self.exited.done():
            self.exited.set_result(end)


def kill_left(runtime: Path) -> None:
    """Kill the kernels of a server that was killed, and remove their files."""
    for file in runtime.glob("*.pid"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(file.read_text())
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            # The number may belong to another process by now.
            if f"{KERNEL}={file.stem}".encode() in environment:
                os.killpg(pid, signal.SIGKILL)
                log.warning("killed a kernel of an earlier server: %s", file.stem)
    for file in runtime.iterdir():
        if not file.is_dir():
            file.unlink(missing_ok=True)


def explain(end: Exit, memory_bytes: int) -> str:
    """Return why a kernel has ended, for the caller of the code."""
    if end.status >= 0:
        return f"the kernel exited with status {end.status}"
    name = signal.Signals(-end.status).name
    if -end.status == signal.SIGKILL and memory_bytes and end.peak_bytes > memory_bytes * _LARGE:
        return (
            f"the kernel was killed: it used {_mib(end.peak_bytes)} of the sandbox's "
            f"{_mib(memory_bytes)} of memory"
        )
    return f"the kernel was killed by {name}"


def memory_of_sandbox() -> int:
    """Return the memory that the sandbox has, in bytes; 0 if it is not known."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * _KIB
    except (OSError, ValueError, IndexError):
        return 0
    return 0


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"
