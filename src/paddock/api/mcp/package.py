"""Whether the package `mcp` is installed."""

from importlib.util import find_spec

from paddock.kit.errors import UnsupportedError


def require_package() -> None:
    """Raise `UnsupportedError` if the package is missing."""
    if find_spec("mcp") is None:
        raise UnsupportedError(
            "MCP is not available: the Python package mcp is not installed",
            hint="install it into the environment of Paddock: pip install 'paddock[mcp]'",
        )
