"""Runs tasks in real sandboxes through the task API of envd.

Results are pushed: `GET /tasks?watch=1` stays open and sends a line for each change.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from paddock.adapters.envd_session import open_session
from paddock.controllers.batch.tasks.runner import TaskOrder, TaskReport, TaskRunner
from paddock.kit.errors import UnavailableError
from paddock.resources.kinds.batch import TaskState
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.tokens import TokenSeed
from paddock.runtime import envd_api

CALL_SECONDS = 30.0
IDLE_SECONDS = 60.0
"""envd sends a line at least this often; a watch without one for longer is broken."""


class _Ended(Struct, frozen=True, rename="camel"):
    exit_code: int = 0
    reason: str = ""
    message: str = ""
    started_at: datetime | None = None
    finished_at: datetime | None = None


class _Running(Struct, frozen=True, rename="camel"):
    started_at: datetime | None = None


class _Waiting(Struct, frozen=True):
    reason: str = ""
    message: str = ""


class _Status(Struct, frozen=True, rename="camel"):
    waiting: _Waiting | None = None
    running: _Running | None = None
    terminated: _Ended | None = None
    attempt: int = 1
    is_final: bool = False
    output_head: str = ""
    output_tail: str = ""


class _Task(Struct, frozen=True, rename="camel"):
    name: str
    process_status: _Status = _Status()


class EnvdTasks:
    """Calls the envd of each sandbox."""

    def __init__(self, seed: TokenSeed) -> None:
        self._seed = seed

    async def assign(
        self, sandbox: Sandbox, sandbox_id: str, orders: tuple[TaskOrder, ...]
    ) -> tuple[TaskReport, ...]:
        """Set the tasks that a sandbox runs."""
        body = msgspec.json.encode([_encoded(order) for order in orders])
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
        async with (
            self._session(sandbox, sandbox_id, timeout) as (session, base),
            session.post(f"{base}/setTasks", data=body) as response,
        ):
            return _reports(await self._read(sandbox, response))

    async def watch(
        self, sandbox: Sandbox, sandbox_id: str
    ) -> AsyncIterator[tuple[TaskReport, ...]]:
        """Yield reports as they are pushed."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=IDLE_SECONDS)
        async with (
            self._session(sandbox, sandbox_id, timeout) as (session, base),
            session.get(f"{base}/tasks?watch=1") as response,
        ):
            if response.status != 200:
                await self._read(sandbox, response)
            async for line in response.content:
                if line.strip():
                    yield _reports(line)

    @asynccontextmanager
    async def _session(
        self, sandbox: Sandbox, sandbox_id: str, timeout: aiohttp.ClientTimeout
    ) -> AsyncGenerator[tuple[aiohttp.ClientSession, str]]:
        if not (address := sandbox.status.address.envd):
            raise UnavailableError(f"sandbox {sandbox.key} has no address")
        claim = sandbox.spec.claim
        known = claim.access_token_hash if claim is not None else ""
        headers = {"X-Access-Token": self._seed.access_token(sandbox_id, known)}
        try:
            async with open_session(address, headers=headers, timeout=timeout) as opened:
                yield opened
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            text = str(error) or type(error).__name__
            raise UnavailableError(
                f"envd of sandbox {sandbox.key} does not answer: {text}"
            ) from error

    async def _read(self, sandbox: Sandbox, response: aiohttp.ClientResponse) -> bytes:
        body = await response.read()
        if response.status >= 300:
            raise envd_api.refusal(str(sandbox.key), response.url.path, response.status, body)
        return body


def _encoded(order: TaskOrder) -> dict[str, Any]:
    spec = order.spec
    process: dict[str, Any] = msgspec.to_builtins(spec.process)
    return {
        "name": order.name,
        "process": {
            **process,
            "timeoutSeconds": spec.timeout_seconds,
            "maxAttempts": spec.max_attempts,
            "backoffSeconds": spec.backoff_seconds,
            "graceSeconds": spec.grace_seconds,
            "firstAttempt": order.first_attempt,
        },
    }


def _reports(data: bytes) -> tuple[TaskReport, ...]:
    try:
        found = msgspec.json.decode(data, type=tuple[_Task, ...])
    except msgspec.DecodeError as error:
        raise UnavailableError(f"envd sent a response that cannot be decoded: {error}") from error
    return tuple(_report(task) for task in found)


def _report(task: _Task) -> TaskReport:
    status = task.process_status
    known: dict[str, Any] = {
        "name": task.name,
        "attempt": status.attempt,
        "output_head": status.output_head,
        "output_tail": status.output_tail,
        "is_final": status.is_final,
    }
    if (ended := status.terminated) is not None:
        state = TaskState.SUCCEEDED if ended.exit_code == 0 else TaskState.FAILED
        return TaskReport(
            **known,
            state=state,
            exit_code=ended.exit_code,
            reason=ended.reason,
            message=ended.message,
            started_at=ended.started_at,
            finished_at=ended.finished_at,
        )
    if status.running is not None:
        return TaskReport(**known, state=TaskState.RUNNING, started_at=status.running.started_at)
    waiting = status.waiting or _Waiting()
    return TaskReport(
        **known, state=TaskState.WAITING, reason=waiting.reason, message=waiting.message
    )


_: type[TaskRunner] = EnvdTasks
