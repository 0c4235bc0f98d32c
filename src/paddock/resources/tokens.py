"""Tokens of sandboxes: derived from one seed, never stored, compared in constant time.

The token of a sandbox is the same across every pause and restart, because it is derived from the
seed and the id of the sandbox. Objects and routes hold only its hash. After a rotation of the seed,
the hash selects the seed of a sandbox, so that its token stays the same.
"""

import base64
import hashlib
import hmac


class TokenSeed:
    """The secret from which the tokens of all sandboxes are derived."""

    def __init__(self, secret: bytes, *previous: bytes) -> None:
        """`previous` are seeds from before a rotation; existing sandboxes may use them."""
        self.use(secret, *previous)

    def use(self, secret: bytes, *previous: bytes) -> None:
        """Replace the seeds: new tokens and signatures are made with the first one."""
        self._secret = secret
        self._previous = previous

    def access_token(self, sandbox_id: str, token_hash: str = "") -> str:
        """Return the token that envd requires; for an existing sandbox, the one with its hash."""
        return self._token("envd", sandbox_id, token_hash)

    def traffic_token(self, sandbox_id: str, token_hash: str = "") -> str:
        """Return the token that requests to ports of a private sandbox require, as above."""
        return self._token("traffic", sandbox_id, token_hash)

    def _token(self, purpose: str, sandbox_id: str, token_hash: str) -> str:
        newest = _derive(self._secret, purpose, sandbox_id)
        if not self._previous or not token_hash or matches(newest, token_hash):
            return newest
        for secret in self._previous:
            if matches(token := _derive(secret, purpose, sandbox_id), token_hash):
                return token
        return newest

    def sign(self, purpose: str, message: bytes) -> str:
        """Return the signature of an internal message, such as one to a peer."""
        return _signature(self._secret, purpose, message)

    def is_signed(self, purpose: str, message: bytes, signature: str) -> bool:
        """Whether one of the seeds signed a message. Compares in constant time.

        During a rotation, another process may have changed to the new seed earlier or later.
        """
        given = signature.encode()
        return any(
            hmac.compare_digest(each.encode(), given) for each in self.signatures(purpose, message)
        )

    def signatures(self, purpose: str, message: bytes) -> tuple[str, ...]:
        """Return the signatures of all seeds, that of the newest first."""
        secrets = (self._secret, *self._previous)
        return tuple(_signature(secret, purpose, message) for secret in secrets)

    def __repr__(self) -> str:
        return "TokenSeed(…)"


def _derive(secret: bytes, purpose: str, sandbox_id: str) -> str:
    message = f"{purpose}:{sandbox_id}".encode()
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


def _signature(secret: bytes, purpose: str, message: bytes) -> str:
    key = hmac.new(secret, f"sign:{purpose}".encode(), hashlib.sha256).digest()
    return hmac.new(key, message, hashlib.sha256).hexdigest()


def hashed(token: str) -> str:
    """Return the hash of a token, which may be stored."""
    return hashlib.sha256(token.encode()).hexdigest()


def matches(token: str, token_hash: str) -> bool:
    """Whether the token has this hash. Compares in constant time."""
    return hmac.compare_digest(hashed(token), token_hash)


def file_signature(
    token: str, *, path: str, operation: str, user: str, expiration: int | None
) -> str:
    """Return the signature of a file URL, computed as in E2B's clients."""
    text = f"{path}:{operation}:{user}:{token}"
    if expiration is not None:
        text += f":{expiration}"
    digest = hashlib.sha256(text.encode()).digest()
    return "v1_" + base64.b64encode(digest).decode().rstrip("=")


def control_tokens(seed: TokenSeed, uid: str) -> tuple[str, ...]:
    """Return the tokens for requests to the sidecar of a sandbox, one of each seed, newest first.

    A sidecar accepts the one of the seed that was in use when its pod was created.
    """
    return seed.signatures("control", uid.encode())


def node_tokens(seed: TokenSeed) -> tuple[str, ...]:
    """Return the tokens for requests to node agents, one of each seed, newest first."""
    return seed.signatures("node", b"")
