"""Sandboxes in memory that implement the port of the tools."""

import asyncio
import itertools
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from msgspec import structs

from paddock.client.model import (
    CodeOutcome,
    CodeRun,
    FilePart,
    FoundEntry,
    Interrupted,
    KnownSandbox,
    OpenSandbox,
    ShellCommand,
    StoredSnapshot,
    WantedSandbox,
)
from paddock.client.output import OutputTail
from paddock.kit.errors import ForbiddenError, NotFoundError
from paddock.run_code.events import CodeError, CodeResult

START = datetime(2026, 1, 1, tzinfo=UTC)


class FakeSandboxes:
    """Implements `SandboxCalls`."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.boxes: dict[str, WantedSandbox] = {}
        self.state: dict[str, str] = {}
        self.timeouts: dict[str, int] = {}
        self.files: dict[str, bytes] = {}
        self.commands: list[ShellCommand] = []
        self.runs: list[CodeRun] = []
        self.output = b""
        self.errors = b""
        self.exit_code = 0
        self.interruption = ""
        self.values: list[CodeResult] = []
        self.fault: CodeError | None = None
        self.entries: list[FoundEntry] = []
        self.may_create = True
        self.traffic_token = ""
        self.latency = 0.0

    async def create(self, wanted: WantedSandbox) -> OpenSandbox:
        await asyncio.sleep(self.latency)
        if not self.may_create:
            raise ForbiddenError("the key may not create sandboxes", hint="use another key")
        for known, box in self.boxes.items():
            if wanted.idempotency_key and box.idempotency_key == wanted.idempotency_key:
                return self._opened(known)
        name = f"box{next(self._numbers)}"
        self.boxes[name] = wanted
        self.state[name] = "running"
        self.timeouts[name] = wanted.seconds
        return self._opened(name)

    async def connect(self, sandbox_id: str, *, seconds: int) -> OpenSandbox:
        self._require(sandbox_id)
        self.state[sandbox_id] = "running"
        self.timeouts[sandbox_id] = max(self.timeouts[sandbox_id], seconds)
        return self._opened(sandbox_id)

    async def find(self, metadata: Mapping[str, str], *, state: str = "") -> list[KnownSandbox]:
        return [
            KnownSandbox(
                name,
                box.template,
                self.state[name],
                START + timedelta(seconds=number),
                START + timedelta(hours=1),
                box.metadata,
            )
            for number, (name, box) in enumerate(self.boxes.items())
            if metadata.items() <= box.metadata.items() and state in ("", self.state[name])
        ]

    async def pause(self, sandbox_id: str) -> None:
        self._require(sandbox_id)
        self.state[sandbox_id] = "paused"

    async def kill(self, sandbox_id: str) -> None:
        self._require(sandbox_id)
        del self.boxes[sandbox_id], self.state[sandbox_id]

    async def fork(self, sandbox_id: str, *, count: int, seconds: int) -> tuple[list[str], str]:
        box = self._require(sandbox_id)
        made: list[str] = []
        for number in range(count):
            name = f"box{next(self._numbers)}"
            self.boxes[name] = structs.replace(box, template=f"snap{number:032x}")
            self.state[name] = "running"
            self.timeouts[name] = seconds
            made.append(name)
        return made, ""

    async def snapshot(self, sandbox_id: str, *, name: str | None) -> StoredSnapshot:
        self._require(sandbox_id)
        return StoredSnapshot("snap1", (name,) if name else ())

    async def run_command(
        self, box: OpenSandbox, command: ShellCommand, out: OutputTail, err: OutputTail
    ) -> int:
        self.commands.append(command)
        out.add(self.output)
        err.add(self.errors)
        if self.interruption:
            raise Interrupted(self.interruption)
        return self.exit_code

    async def run_code(
        self, box: OpenSandbox, run: CodeRun, outcome: CodeOutcome, out: OutputTail, err: OutputTail
    ) -> None:
        self.runs.append(run)
        out.add(self.output)
        outcome.values.extend(self.values)
        outcome.fault = self.fault
        if self.interruption:
            raise Interrupted(self.interruption)

    async def read_file(self, box: OpenSandbox, path: str, *, offset: int, limit: int) -> FilePart:
        if path not in self.files:
            raise NotFoundError(f"path not found: {path}")
        data = self.files[path]
        return FilePart(data[offset : offset + limit], len(data))

    async def write_file(self, box: OpenSandbox, path: str, data: bytes) -> None:
        self.files[path] = data

    async def list_files(self, box: OpenSandbox, path: str, *, depth: int) -> list[FoundEntry]:
        return self.entries

    def url(self, box: OpenSandbox, port: int) -> str:
        return f"http://{port}-{box.sandbox_id}.localhost/"

    def _require(self, sandbox_id: str) -> WantedSandbox:
        if sandbox_id not in self.boxes:
            raise NotFoundError(f"sandbox {sandbox_id} was not found")
        return self.boxes[sandbox_id]

    def _opened(self, name: str) -> OpenSandbox:
        return OpenSandbox(
            name, template=self.boxes[name].template, traffic_token=self.traffic_token
        )
