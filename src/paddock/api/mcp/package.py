"""Whether the package `mcp` is installed, and fits."""

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec

from paddock.kit.errors import UnsupportedError

_HINT = "install it into the environment of Paddock: pip install -e '.[mcp]'"


def require_package() -> None:
    """Raise `UnsupportedError` if the package is missing."""
    if find_spec("mcp") is None:
        raise UnsupportedError(
            "MCP is not available: the Python package mcp is not installed", hint=_HINT
        )


@contextmanager
def usable_package() -> Generator[None]:
    """Import within it; `UnsupportedError` if a version is installed that does not fit."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"MCP is not available: the Python package mcp does not fit: {error}", hint=_HINT
        ) from error
