"""Settings of the declarative API."""

from msgspec import Struct

MEBIBYTE = 1 << 20


class KubeApiSettings(Struct, frozen=True, kw_only=True):
    """Authentication and limits of the declarative API."""

    tokens: tuple[str, ...] = ()
    """Accepted bearer tokens. Empty: no access."""
    max_body_bytes: int = 3 * MEBIBYTE
    """Larger bodies are refused with 413."""
    max_yaml_bytes: int = MEBIBYTE
    """YAML takes far longer to parse than JSON, so its limit is lower."""
    watch_seconds: int = 1800
    """The default timeout of a watch."""
    bookmark_seconds: float = 60.0
    """The interval of bookmarks on an idle watch, which show the client that it is alive."""
