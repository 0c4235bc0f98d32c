"""What an operator may decide about the declarative API."""

from msgspec import Struct

MEBIBYTE = 1 << 20


class KubeApiSettings(Struct, frozen=True, kw_only=True):
    """Who may use the API, and how much of it at once."""

    tokens: tuple[str, ...] = ()
    """Bearer tokens, any of which is let in. None: nobody is, unless `allow_anonymous`."""
    allow_anonymous: bool = False
    """Let programs of this machine in without a token. Requests from elsewhere are refused."""
    max_body_bytes: int = 3 * MEBIBYTE
    """Larger bodies are refused with 413."""
    max_yaml_bytes: int = MEBIBYTE
    """YAML takes far longer to read than JSON, so less of it is taken."""
    watch_seconds: int = 1800
    """When a watch ends that names no end itself."""
    bookmark_seconds: float = 60.0
    """A watch that was silent for so long says how far it is: by that its reader knows it alive."""
