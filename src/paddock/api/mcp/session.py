"""The sandboxes of one session of a client.

A call without `sandbox_id` uses the default sandbox of its session. It is created on first use.
The store knows it by its metadata, so it is found again by another process, and after a restart.
Each call extends its timeout; at its end it pauses. So it pauses too if a client vanishes.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import ceil

from msgspec import Struct, field

from paddock.api.mcp.port import SandboxCalls
from paddock.client.model import KnownSandbox, OpenSandbox, WantedSandbox
from paddock.kit.errors import ConflictError, InvalidError, NotFoundError
from paddock.kit.ids import is_checkpoint_id
from paddock.kit.logs import fields

log = logging.getLogger(__name__)

SESSION_KEY = "mcp-session"
"""The metadata that names the session."""
TEMPLATE_KEY = "mcp-session-template"
"""The snapshot that a default sandbox was created from, if it was."""
DEFAULT_TEMPLATE = "code-interpreter-v1"
IDLE_SECONDS = 600
"""A sandbox pauses so long after the last call."""
PAUSE_SECONDS = 15.0
"""The longest wait for the pause at the end of a session."""
MAX_SESSIONS = 10_000


class SessionMemory(Struct):
    """What a process remembers of a session. The store has the rest."""

    default_id: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SessionMemories:
    """The memories of many sessions. The one used longest ago is forgotten first."""

    def __init__(self, limit: int = MAX_SESSIONS) -> None:
        self._limit = limit
        self._known: OrderedDict[tuple[str, str], SessionMemory] = OrderedDict()

    def of(self, key_id: str, session_id: str) -> SessionMemory:
        """Return the memory of a session; other API keys do not share it."""
        name = (key_id, session_id)
        memory = self._known.get(name)
        if memory is None:
            memory = self._known[name] = SessionMemory()
            if len(self._known) > self._limit:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(name)
        return memory


class McpSession:
    """One session: resolves which sandbox a call is for."""

    def __init__(
        self,
        calls: SandboxCalls,
        session_id: str,
        memory: SessionMemory,
        *,
        template: str = DEFAULT_TEMPLATE,
        idle_seconds: int = IDLE_SECONDS,
        slot: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`session_id` is empty for clients without sessions: their calls name a sandbox.

        `slot` is entered by calls that hold what a sandbox sends; it limits how many there are.
        """
        self.slot = slot
        self.calls = calls
        self.template = template
        self.idle_seconds = idle_seconds
        self._id = session_id
        self._memory = memory

    async def open(self, sandbox_id: str | None = None, *, seconds: float = 0) -> OpenSandbox:
        """Return a running sandbox that stays for a call of so many seconds."""
        wanted = self.idle_seconds + ceil(seconds)
        if sandbox_id:
            return await self.calls.connect(sandbox_id, seconds=wanted)
        async with self._memory.lock:
            return await self._open_default(wanted)

    async def resolve(self, sandbox_id: str | None) -> str:
        """Return the id of a sandbox that exists; it is not resumed."""
        if sandbox_id:
            return sandbox_id
        async with self._memory.lock:
            if self._memory.default_id:
                return self._memory.default_id
            for found in await self._stored():
                self._memory.default_id = found
                return found
        raise ConflictError(
            "this session has no sandbox yet", hint="create_sandbox creates one, or pass sandbox_id"
        )

    async def create(
        self,
        template: str | None,
        *,
        seconds: int | None,
        env: Mapping[str, str],
        metadata: Mapping[str, str],
    ) -> tuple[OpenSandbox, bool]:
        """Create a sandbox; return whether it is the session's default: the first one is."""
        for name in (SESSION_KEY, TEMPLATE_KEY):
            if name in metadata:
                raise InvalidError.at(f"metadata.{name}", "is reserved")
        wanted = WantedSandbox(
            template=template or self.template,
            seconds=seconds or self.idle_seconds,
            env=env,
            metadata=metadata,
        )
        async with self._memory.lock:
            has_default = not self._id or self._memory.default_id or await self._stored()
            if has_default:
                return await self.calls.create(wanted), False
            made = await self.calls.create(self._as_default(wanted))
            self._memory.default_id = made.sandbox_id
            return made, True

    async def kill(self, sandbox_id: str) -> None:
        """Kill a sandbox. The next call without an id creates a new default."""
        try:
            await self.calls.kill(sandbox_id)
        finally:
            self._forget(sandbox_id)

    async def end(self) -> None:
        """Pause the default sandbox, if there is one."""
        if not self._id:
            return
        async with asyncio.timeout(PAUSE_SECONDS):
            try:
                sandbox_id = await self.resolve(None)
                await self.calls.pause(sandbox_id)
            except (ConflictError, NotFoundError) as error:
                # There is none, it is paused, or it has ended.
                log.debug("nothing was paused", extra=fields(reason=error.message))

    async def _open_default(self, seconds: int) -> OpenSandbox:
        if not self._id:
            raise InvalidError.at(
                "sandbox_id",
                "is required: this client has no session",
                hint="create_sandbox creates a sandbox and returns its id",
            )
        candidates = [self._memory.default_id] if self._memory.default_id else []
        for sandbox_id in candidates or await self._stored():
            try:
                box = await self.calls.connect(sandbox_id, seconds=seconds)
            except NotFoundError:
                self._forget(sandbox_id)
                continue
            self._memory.default_id = sandbox_id
            return box
        if candidates:
            return await self._open_default(seconds)
        return await self._create_default(seconds)

    async def _create_default(self, seconds: int) -> OpenSandbox:
        wanted = WantedSandbox(
            template=self.template,
            seconds=self.idle_seconds,
            # Two calls at once, perhaps at two processes, create one sandbox.
            idempotency_key=f"mcp-{self._id}",
        )
        made = await self.calls.create(self._as_default(wanted))
        self._memory.default_id = made.sandbox_id
        if seconds <= self.idle_seconds:
            return made
        return await self.calls.connect(made.sandbox_id, seconds=seconds)

    def _as_default(self, wanted: WantedSandbox) -> WantedSandbox:
        metadata = {**wanted.metadata, SESSION_KEY: self._id}
        if is_checkpoint_id(wanted.template):
            metadata[TEMPLATE_KEY] = wanted.template
        return WantedSandbox(
            template=wanted.template,
            seconds=wanted.seconds,
            env=wanted.env,
            metadata=metadata,
            idempotency_key=wanted.idempotency_key,
        )

    async def _stored(self) -> list[str]:
        """Return the default sandboxes of this session, oldest first."""
        if not self._id:
            return []
        found = await self.calls.find({SESSION_KEY: self._id})
        return [item.sandbox_id for item in found if not _is_clone(item)]

    def _forget(self, sandbox_id: str) -> None:
        if self._memory.default_id == sandbox_id:
            self._memory.default_id = ""


def _is_clone(item: KnownSandbox) -> bool:
    """Whether a sandbox with the metadata of a session is a clone of its default sandbox.

    A clone keeps the metadata, and its template is a snapshot that was made for it.
    """
    return is_checkpoint_id(item.template) and item.metadata.get(TEMPLATE_KEY) != item.template
