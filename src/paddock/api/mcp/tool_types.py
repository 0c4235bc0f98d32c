"""What the tools share: types of arguments, annotations, and how errors reach the model."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeVar

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

from paddock.api.mcp.session import McpSession
from paddock.kit.errors import PaddockError, RateLimitedError, UnavailableError

P = ParamSpec("P")
R = TypeVar("R")
Ctx = Context[Any, Any]
FindSession = Callable[[Ctx], McpSession]
SandboxId = Annotated[
    str | None,
    Field(description="The sandbox. Without it, the default sandbox of this session is used."),
]

READS = ToolAnnotations(read_only_hint=True, destructive_hint=False, open_world_hint=False)
ADDS = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
CHANGES_STATE = ToolAnnotations(
    read_only_hint=False, destructive_hint=False, idempotent_hint=True, open_world_hint=False
)
REPLACES = ToolAnnotations(
    read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
)
RUNS = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=True)
"""Code may do anything that the network policy of the sandbox allows."""


def reported(tool: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Return the tool with our errors as errors that the model can read."""

    @wraps(tool)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await tool(*args, **kwargs)
        except PaddockError as error:
            raise ToolError(message_of(error)) from error

    return call


def message_of(error: PaddockError) -> str:
    """Return the message of an error with its next step."""
    parts = [error.message]
    if error.hint:
        parts.append(error.hint)
    if isinstance(error, RateLimitedError | UnavailableError) and error.retry_after_seconds:
        parts.append(f"try again in {error.retry_after_seconds:g} s")
    return "; ".join(parts)
