"""Waiting for a sandbox's ready command to succeed."""

import asyncio

from paddock.kit.errors import DeadlineExceededError
from paddock.runtime.local.sandbox.sandbox import NodeSandbox
from paddock.runtime.port import Blueprint

_POLL_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5)


async def wait_until_ready(sandbox: NodeSandbox, blueprint: Blueprint) -> None:
    """Run the ready command until it exits 0, or raise `DeadlineExceededError`."""
    limit = blueprint.ready_timeout_seconds
    last = 0
    try:
        async with asyncio.timeout(limit):
            for attempt in range(10**9):
                commands = await sandbox.commands()
                last = await commands.run(
                    blueprint.ready_command or "true",
                    user=blueprint.user,
                    env=sandbox.command_env(),
                    cwd=blueprint.workdir,
                    timeout=limit,
                )
                if last == 0:
                    return
                await asyncio.sleep(_POLL_SECONDS[min(attempt, len(_POLL_SECONDS) - 1)])
    except TimeoutError:
        raise DeadlineExceededError(
            f"sandbox {sandbox.uid} was not ready within {limit:g} s: its ready command "
            f"last ended with {last}",
            hint="read the sandbox's log, or raise the ready timeout",
        ) from None
