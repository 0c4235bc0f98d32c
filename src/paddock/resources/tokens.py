"""Tokens of sandboxes: derived from one seed, never stored, compared in constant time.

A sandbox's token is the same over every pause and restart, since it follows from the seed and
the sandbox's id. Objects and routes carry only its hash.
"""

import base64
import hashlib
import hmac


class TokenSeed:
    """The secret from which every sandbox's tokens follow."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def access_token(self, sandbox_id: str) -> str:
        """Return the token that envd asks for."""
        return self._derive("envd", sandbox_id)

    def traffic_token(self, sandbox_id: str) -> str:
        """Return the token that ports of a private sandbox ask for."""
        return self._derive("traffic", sandbox_id)

    def sign(self, purpose: str, message: bytes) -> str:
        """Sign a message of ours, such as one to a peer."""
        key = hmac.new(self._secret, f"sign:{purpose}".encode(), hashlib.sha256).digest()
        return hmac.new(key, message, hashlib.sha256).hexdigest()

    def _derive(self, purpose: str, sandbox_id: str) -> str:
        message = f"{purpose}:{sandbox_id}".encode()
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()

    def __repr__(self) -> str:
        return "TokenSeed(…)"


def hashed(token: str) -> str:
    """Return what may be stored of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def matches(token: str, token_hash: str) -> bool:
    """Whether a token is the one that was hashed, in constant time."""
    return hmac.compare_digest(hashed(token), token_hash)


def file_signature(
    token: str, *, path: str, operation: str, user: str, expiration: int | None
) -> str:
    """Sign a file URL as E2B's clients do."""
    text = f"{path}:{operation}:{user}:{token}"
    if expiration is not None:
        text += f":{expiration}"
    digest = hashlib.sha256(text.encode()).digest()
    return "v1_" + base64.b64encode(digest).decode().rstrip("=")


def control_token(seed: TokenSeed, uid: str) -> str:
    """Return the token that orders to a sandbox's sidecar carry."""
    return seed.sign("control", uid.encode())


def node_token(seed: TokenSeed) -> str:
    """Return the token that orders to node agents carry."""
    return seed.sign("node", b"")
