"""The tools of the Model Context Protocol (MCP), and how they are served.

`tool_types`, `tools`, `lifecycle_tools`, `results`, `server`, `stdio` and `sdk_http` need the
package `mcp` (`paddock[mcp]`). They are imported when a client comes.
"""
