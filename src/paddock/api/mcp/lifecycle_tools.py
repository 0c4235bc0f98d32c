"""The tools for the life of sandboxes: create, list, pause, resume, fork, snapshot, kill."""

from typing import Annotated, Any, Literal

from mcp.server.mcpserver import MCPServer
from pydantic import Field

from paddock.api.mcp import results
from paddock.api.mcp.tool_types import (
    ADDS,
    CHANGES_STATE,
    READS,
    REPLACES,
    Ctx,
    FindSession,
    SandboxId,
    reported,
)

MAX_FORKS = 20
_Timeout = Annotated[
    int | None,
    Field(
        ge=1,
        le=30 * 24 * 3600,
        description="It pauses so many seconds from now. Each call keeps it ten minutes longer.",
    ),
]


class LifecycleTools:
    """The tools that create, change and end sandboxes."""

    def __init__(self, find_session: FindSession) -> None:
        self._session = find_session

    async def create_sandbox(
        self,
        ctx: Ctx,
        template: Annotated[
            str | None, Field(description="A template or the id of a snapshot.")
        ] = None,
        timeout_seconds: _Timeout = None,
        env: Annotated[
            dict[str, str] | None, Field(description="Environment variables of all commands.")
        ] = None,
        metadata: Annotated[
            dict[str, str] | None, Field(description="Names and values to find it by.")
        ] = None,
    ) -> results.CreatedSandbox:
        """Create a sandbox. Not needed for the default sandbox, which is created on first use.

        The first sandbox of a session is its default. Pass the ids of others as sandbox_id.
        """
        box, is_default = await self._session(ctx).create(
            template, seconds=timeout_seconds, env=env or {}, metadata=metadata or {}
        )
        return results.CreatedSandbox(
            sandbox_id=box.sandbox_id, template=box.template, is_default=is_default
        )

    async def list_sandboxes(
        self,
        ctx: Ctx,
        state: Annotated[
            Literal["running", "paused"] | None, Field(description="Only those in this state.")
        ] = None,
        metadata: Annotated[
            dict[str, str] | None, Field(description="Only those with these metadata.")
        ] = None,
    ) -> results.SandboxList:
        """List the sandboxes that this API key may see, the 100 oldest."""
        found = await self._session(ctx).calls.find(metadata or {}, state=state or "")
        return results.SandboxList(sandboxes=[results.shown(item) for item in found])

    async def pause_sandbox(self, ctx: Ctx, sandbox_id: SandboxId = None) -> results.ChangedSandbox:
        """Pause a sandbox. Files, memory and processes are kept; the next call resumes it."""
        session = self._session(ctx)
        found = await session.resolve(sandbox_id)
        await session.calls.pause(found)
        return results.ChangedSandbox(sandbox_id=found, state="paused")

    async def resume_sandbox(
        self, ctx: Ctx, sandbox_id: SandboxId = None
    ) -> results.ChangedSandbox:
        """Resume a paused sandbox, or extend the timeout of a running one."""
        session = self._session(ctx)
        box = await session.open(await session.resolve(sandbox_id))
        return results.ChangedSandbox(sandbox_id=box.sandbox_id, state="running")

    async def fork_sandbox(
        self,
        ctx: Ctx,
        count: Annotated[int, Field(ge=1, le=MAX_FORKS, description="Number of clones.")] = 1,
        sandbox_id: SandboxId = None,
    ) -> results.ForkedSandboxes:
        """Clone a sandbox with its files, memory and processes."""
        session = self._session(ctx)
        box = await session.open(await session.resolve(sandbox_id))
        made, problem = await session.calls.fork(
            box.sandbox_id, count=count, seconds=session.idle_seconds
        )
        return results.ForkedSandboxes(sandbox_ids=made, problem=problem)

    async def snapshot_sandbox(
        self,
        ctx: Ctx,
        name: Annotated[str | None, Field(description="A name to find it by.")] = None,
        sandbox_id: SandboxId = None,
    ) -> results.CreatedSnapshot:
        """Store files, memory and processes of a sandbox, to create others from it."""
        session = self._session(ctx)
        box = await session.open(await session.resolve(sandbox_id))
        stored = await session.calls.snapshot(box.sandbox_id, name=name)
        return results.CreatedSnapshot(snapshot_id=stored.snapshot_id, names=list(stored.names))

    async def kill_sandbox(self, ctx: Ctx, sandbox_id: SandboxId = None) -> results.ChangedSandbox:
        """Kill a sandbox, running or paused. Its files are deleted."""
        session = self._session(ctx)
        found = await session.resolve(sandbox_id)
        await session.kill(found)
        return results.ChangedSandbox(sandbox_id=found, state="killed")

    def register(self, server: MCPServer[Any]) -> None:
        """Add the tools to a server."""
        server.add_tool(reported(self.create_sandbox), annotations=ADDS)
        server.add_tool(reported(self.list_sandboxes), annotations=READS)
        server.add_tool(reported(self.pause_sandbox), annotations=CHANGES_STATE)
        server.add_tool(reported(self.resume_sandbox), annotations=CHANGES_STATE)
        server.add_tool(reported(self.fork_sandbox), annotations=ADDS)
        server.add_tool(reported(self.snapshot_sandbox), annotations=ADDS)
        server.add_tool(reported(self.kill_sandbox), annotations=REPLACES)
