"""`paddock mcp`."""
