"""Sandboxes through Paddock's public APIs, with one API key.

Rights, quotas, limits, the audit log and clusters of a federation apply as to every client.
"""

from collections.abc import Mapping
from contextlib import aclosing
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from msgspec import Struct, field

from paddock.client.calls import HttpCalls
from paddock.client.envd import MAX_OUTPUT_BYTES, EnvdCalls, sandbox_headers
from paddock.client.model import (
    CodeOutcome,
    CodeRun,
    Interrupted,
    KnownSandbox,
    OpenSandbox,
    StoredSnapshot,
    WantedSandbox,
)
from paddock.client.output import LIMIT_BYTES, OutputTail, end_of
from paddock.client.urls import sandbox_url
from paddock.kit.errors import ConflictError, DeadlineExceededError, TooLargeError
from paddock.run_code.client import PORT as INTERPRETER_PORT
from paddock.run_code.client import CodeInterpreter
from paddock.run_code.events import (
    CodeError,
    CodeEvent,
    CodeResult,
    EventOmitted,
    RunBroken,
    StderrText,
    StdoutText,
)

MAX_RESULTS = 8
MAX_RESULT_BYTES = 4 << 20
"""So many results of code are kept, and none that is larger."""
MAX_KEPT_BYTES = 8 << 20
"""All text and images of the results of a call."""
_MAX_LENIENT_BYTES = 512 << 10
_MAX_STREAM_BYTES = 2 * MAX_OUTPUT_BYTES
"""Everything that a run sends: results too, and what is left out of them."""
_PAGE = 100
_KERNEL_ENDED = CodeError(
    "KernelEnded",
    "the kernel ended while it ran the code: its memory may be exhausted. Variables are lost",
    "",
)


class _Made(Struct, frozen=True, rename="camel"):
    sandbox_id: str = field(name="sandboxID")
    template_id: str = field(name="templateID", default="")
    envd_access_token: str | None = None
    traffic_access_token: str | None = None
    domain: str | None = None


class _Listed(Struct, frozen=True, rename="camel"):
    sandbox_id: str = field(name="sandboxID")
    template_id: str = field(name="templateID")
    state: str
    started_at: datetime
    end_at: datetime
    metadata: Mapping[str, str] = {}


class _ForkError(Struct, frozen=True):
    message: str = ""


class _Forked(Struct, frozen=True):
    sandbox: _Made | None = None
    error: _ForkError | None = None


class _Snapshot(Struct, frozen=True):
    snapshot_id: str = field(name="snapshotID")
    names: tuple[str, ...] = ()


class ClientAddresses(Struct, frozen=True):
    """Where a client reaches Paddock."""

    api: str
    """URL of E2B's API."""
    gateway: str
    """URL of the gateways."""
    public: str
    """URL of the gateways as the client reaches them."""


class HttpSandboxes:
    """The sandboxes of one API key."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        addresses: ClientAddresses,
        headers: Mapping[str, str],
    ) -> None:
        """`headers`: the API key, and the address of the client if another process has it."""
        self._session = session
        self._addresses = addresses
        self._api = HttpCalls(session, addresses.api, headers)
        self._envd = EnvdCalls(session, addresses.gateway)
        self.run_command = self._envd.run
        self.read_file = self._envd.read_file
        self.write_file = self._envd.write_file
        self.list_files = self._envd.list_files

    async def create(self, wanted: WantedSandbox) -> OpenSandbox:
        """Create a sandbox."""
        headers = {"Idempotency-Key": wanted.idempotency_key} if wanted.idempotency_key else None
        body = {
            "templateID": wanted.template,
            "timeout": wanted.seconds,
            "metadata": wanted.metadata,
            "envVars": wanted.env,
            "autoPause": True,
            "autoResume": {"enabled": True},
        }
        return _opened(await self._api.json("POST", "/v2/sandboxes", _Made, body, headers=headers))

    async def connect(self, sandbox_id: str, *, seconds: int) -> OpenSandbox:
        """Resume a sandbox if it is paused, and extend its timeout."""
        path = f"/v2{_path(sandbox_id)}/connect"
        return _opened(await self._api.json("POST", path, _Made, {"timeout": seconds}))

    async def find(self, metadata: Mapping[str, str], *, state: str = "") -> list[KnownSandbox]:
        """Return the sandboxes with these metadata, oldest first."""
        pairs = "&".join(f"{quote(quote(k))}={quote(quote(v))}" for k, v in metadata.items())
        query: dict[str, Any] = {"limit": _PAGE, "metadata": pairs, "order": "asc"}
        if state:
            query["state"] = state
        path = f"/v2/sandboxes?{urlencode(query)}"
        listed = await self._api.json("GET", path, tuple[_Listed, ...])
        return [
            KnownSandbox(
                item.sandbox_id,
                item.template_id,
                item.state,
                item.started_at,
                item.end_at,
                item.metadata,
            )
            for item in listed
        ]

    async def pause(self, sandbox_id: str) -> None:
        """Pause a sandbox; one that is paused stays so."""
        try:
            await self._api.json("POST", f"{_path(sandbox_id)}/pause", type(None), {})
        except ConflictError:
            shown = await self._api.json("GET", _path(sandbox_id), _Listed)
            if shown.state != "paused":
                raise

    async def kill(self, sandbox_id: str) -> None:
        """Kill a sandbox."""
        await self._api.json("DELETE", _path(sandbox_id), type(None))

    async def fork(self, sandbox_id: str, *, count: int, seconds: int) -> tuple[list[str], str]:
        """Clone a running sandbox; return the ids, and why others could not be created."""
        body = {"count": count, "timeout": seconds}
        path = f"{_path(sandbox_id)}/fork"
        results = await self._api.json("POST", path, tuple[_Forked, ...], body)
        problems = [item.error.message for item in results if item.error is not None]
        made = [item.sandbox.sandbox_id for item in results if item.sandbox is not None]
        return made, problems[0] if problems else ""

    async def snapshot(self, sandbox_id: str, *, name: str | None) -> StoredSnapshot:
        """Store the state of a sandbox."""
        body = {"name": name} if name else {}
        stored = await self._api.json("POST", f"{_path(sandbox_id)}/snapshots", _Snapshot, body)
        return StoredSnapshot(stored.snapshot_id, stored.names)

    async def run_code(
        self, box: OpenSandbox, run: CodeRun, outcome: CodeOutcome, out: OutputTail, err: OutputTail
    ) -> None:
        """Run code and fill `outcome`; `Interrupted` if it was stopped."""
        headers = sandbox_headers(box, INTERPRETER_PORT)
        interpreter = CodeInterpreter(
            self._session,
            self._addresses.gateway,
            headers,
            max_event_bytes=MAX_RESULT_BYTES,
            max_lenient_bytes=_MAX_LENIENT_BYTES,
            max_stream_bytes=_MAX_STREAM_BYTES,
        )
        events = interpreter.run(run.code, language=run.language, timeout_seconds=run.seconds)
        try:
            # Closing the stream interrupts the code.
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, StdoutText):
                        out.add(event.text.encode())
                    elif isinstance(event, StderrText):
                        err.add(event.text.encode())
                    else:
                        _add(outcome, event)
                    if out.received + err.received > MAX_OUTPUT_BYTES:
                        raise _printed_too_much(MAX_OUTPUT_BYTES)
        except DeadlineExceededError as error:
            raise Interrupted(error.message) from error
        except TooLargeError as error:
            raise _printed_too_much(_MAX_STREAM_BYTES) from error

    def url(self, box: OpenSandbox, port: int) -> str:
        """Return the URL of a port of a sandbox."""
        return sandbox_url(self._addresses.public, box.sandbox_id, port, box.domain)


def _add(outcome: CodeOutcome, event: CodeEvent | EventOmitted) -> None:
    if isinstance(event, EventOmitted):
        outcome.left_out += 1
    elif isinstance(event, CodeResult):
        _add_value(outcome, event)
    elif isinstance(event, CodeError):
        outcome.fault = event
    elif isinstance(event, RunBroken):
        outcome.fault = outcome.fault or _KERNEL_ENDED


def _add_value(outcome: CodeOutcome, value: CodeResult) -> None:
    """Keep what a tool returns of a result: its text, and its image if there is room."""
    text = value.text or value.markdown or value.html or value.latex or value.svg
    image = value.image()
    room = MAX_KEPT_BYTES - outcome.kept_bytes
    size = min(len(text or ""), LIMIT_BYTES) + (len(image.base64) if image else 0)
    if len(outcome.values) >= MAX_RESULTS or size > room:
        outcome.left_out += 1
        return
    outcome.kept_bytes += size
    text = None if text is None else end_of(text)
    png, jpeg = (value.png, None) if value.png else (None, value.jpeg)
    outcome.values.append(
        CodeResult(is_main_result=value.is_main_result, text=text, png=png, jpeg=jpeg)
    )


def _printed_too_much(limit: int) -> Interrupted:
    return Interrupted(
        f"interrupted after {limit >> 20} MiB of output; write large output to a file"
    )


def _path(sandbox_id: str) -> str:
    return f"/sandboxes/{quote(sandbox_id, safe='')}"


def _opened(made: _Made) -> OpenSandbox:
    return OpenSandbox(
        sandbox_id=made.sandbox_id,
        template=made.template_id,
        access_token=made.envd_access_token or "",
        traffic_token=made.traffic_access_token or "",
        domain=made.domain or "",
    )
