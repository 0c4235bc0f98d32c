"""The tools of MCP."""
