"""The sandbox of one run: created for it, killed after it.

It ends by itself at its timeout if this process is killed.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

from msgspec import Struct

from paddock.cli.http import CallError
from paddock.cli.output import notes
from paddock.cli.target import CliTarget, path_of
from paddock.kit.errors import PaddockError


class SandboxOrder(Struct, frozen=True):
    """The sandbox to create."""

    template: str
    env: Mapping[str, str]
    timeout_seconds: int


class RunSandbox(Struct, frozen=True):
    """A sandbox that was created."""

    id: str
    token: str | None
    traffic_token: str | None


@asynccontextmanager
async def new_sandbox(
    target: CliTarget, order: SandboxOrder, *, keep: bool
) -> AsyncGenerator[RunSandbox]:
    """Create a sandbox; kill it at the end, unless it is kept."""
    creating = asyncio.ensure_future(asyncio.to_thread(_create, target, order))
    try:
        made = await asyncio.shield(creating)
    except asyncio.CancelledError:
        # The request is on its way: without its response the sandbox could not be killed.
        with suppress(PaddockError):
            await asyncio.to_thread(_kill, target, (await creating).id)
        raise
    try:
        yield made
    finally:
        if not keep:
            await asyncio.to_thread(_kill, target, made.id)


def _create(target: CliTarget, order: SandboxOrder) -> RunSandbox:
    body: dict[str, Any] = {
        "templateID": order.template,
        "timeout": order.timeout_seconds,
        "envVars": order.env,
        "metadata": {},
    }
    made: dict[str, Any] = target.e2b.call("POST", "/v2/sandboxes", body)
    return RunSandbox(
        made["sandboxID"], made.get("envdAccessToken"), made.get("trafficAccessToken")
    )


def _kill(target: CliTarget, sandbox_id: str) -> None:
    try:
        target.e2b.call("DELETE", path_of(sandbox_id))
    except CallError as error:
        if error.status != HTTPStatus.NOT_FOUND:  # it has ended already
            _not_killed(sandbox_id, error)
    except PaddockError as error:
        _not_killed(sandbox_id, error)


def _not_killed(sandbox_id: str, error: PaddockError) -> None:
    """Report it and go on: the result of the run matters more."""
    notes.print(
        f"sandbox {sandbox_id} could not be killed and ends at its timeout: {error.message}",
        markup=False,
        soft_wrap=True,
    )
