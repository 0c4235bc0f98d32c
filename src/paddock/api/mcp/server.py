"""The MCP server: its name, instructions and tools. Transports are in `stdio` and `sdk_http`."""

import logging
from typing import Any

from mcp.server.mcpserver import MCPServer

from paddock import __version__
from paddock.api.mcp.lifecycle_tools import LifecycleTools
from paddock.api.mcp.tool_types import FindSession
from paddock.api.mcp.tools import SandboxTools

USER_AGENT = "paddock-mcp"
"""The audit log shows calls of tools under this name."""
INSTRUCTIONS = """\
Run code and commands in a sandbox: a Linux machine of its own, isolated from the user's machine.
The first call creates the default sandbox of this session, and later calls use it again: files,
processes and variables are kept. It pauses when the session ends. Use fork_sandbox to try several
ways at once, and create_sandbox for another template or for work that must be kept apart.
"""


def build_server(find_session: FindSession) -> MCPServer[Any]:
    """Return a server whose tools use the session of each request."""
    # The package logs each request as information.
    logging.getLogger("mcp").setLevel(logging.WARNING)
    server: MCPServer[Any] = MCPServer(
        "paddock",
        title="Paddock sandboxes",
        version=__version__,
        instructions=INSTRUCTIONS,
        log_level="WARNING",
        subscriptions=False,
    )
    SandboxTools(find_session).register(server)
    LifecycleTools(find_session).register(server)
    return server
