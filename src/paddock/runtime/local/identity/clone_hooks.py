"""Programs of a sandbox that run once in each new clone of it, before the first request.

They are the executable files of /etc/paddock/clone.d, in the order of their names. They run as
root inside, one after the other, while the restored processes run. Together they have a limited
time. A failure is reported in the logs of the sandbox and of the node; the clone is used anyway.
"""

import asyncio
import itertools
import logging
import os
import re

from paddock.envd.process.init_protocol import ChannelClosedError
from paddock.kit.errors import PaddockError, UnavailableError
from paddock.kit.logs import fields
from paddock.runtime.local.kernel import syscalls
from paddock.runtime.local.kernel.pidfds import has_ended
from paddock.runtime.local.sandbox.sandbox import NodeSandbox

log = logging.getLogger(__name__)

DIRECTORY = "/etc/paddock/clone.d"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MAX_ENTRIES = 256


async def run(sandbox: NodeSandbox, seconds: float) -> None:
    """Run the hooks of a new clone; raise `UnavailableError` if it ends meanwhile."""
    hooks = _hooks_of(sandbox) if seconds > 0 else []
    deadline = asyncio.get_running_loop().time() + seconds
    for path in hooks:
        left = deadline - asyncio.get_running_loop().time()
        problem = await _run_one(sandbox, path, left) if left > 0 else "not run: no time left"
        if problem:
            log.warning(
                "clone hook failed",
                extra=fields(sandbox=sandbox.uid, hook=path, reason=problem),
            )
            sandbox.log_file.write("clone hook failed", level="error", hook=path, reason=problem)
    if sandbox.pidfd is None or has_ended(sandbox.pidfd):
        raise _ended(sandbox)


async def _run_one(sandbox: NodeSandbox, path: str, seconds: float) -> str:
    """Run a hook; return what went wrong, or nothing."""
    env = {**sandbox.command_env(), "PADDOCK_GENERATION": sandbox.generation}
    began = asyncio.get_running_loop().time()
    commands = await sandbox.commands()
    try:
        async with asyncio.timeout(seconds + 1):  # a sandbox that does not even start it
            status = await commands.run_program(path, env=env, timeout=seconds)
    except ChannelClosedError as problem:
        raise _ended(sandbox) from problem
    except (PaddockError, OSError) as problem:
        return str(problem) or type(problem).__name__
    if status == 0:
        return ""
    took = asyncio.get_running_loop().time() - began
    return f"killed after {seconds:.1f} s" if took >= seconds else f"exit status {status}"


def _ended(sandbox: NodeSandbox) -> UnavailableError:
    return UnavailableError(f"sandbox {sandbox.uid} exited while its clone hooks ran")


def _hooks_of(sandbox: NodeSandbox) -> list[str]:
    try:
        return find(sandbox.record.init.pid) if sandbox.record.init else []
    except OSError:  # its init has just exited
        return []


def find(pid: int) -> list[str]:
    """Return the paths of the hooks of a sandbox whose init is `pid`, in order.

    Links are resolved inside its root and lead nowhere else.
    """
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            directory = syscalls.open_in_root(root, DIRECTORY, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return []
        try:
            with os.scandir(directory) as entries:
                names = [entry.name for entry in itertools.islice(entries, _MAX_ENTRIES)]
        finally:
            os.close(directory)
        paths = [f"{DIRECTORY}/{name}" for name in sorted(names) if _NAME.fullmatch(name)]
        return [path for path in paths if syscalls.is_program_in_root(root, path)]
    finally:
        os.close(root)
