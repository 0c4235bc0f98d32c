"""Bearer tokens in `Authorization` headers: how they are read and compared.

Comparison takes constant time. Tokens never appear in logs or error messages.
"""

import hmac

_SCHEME = "bearer "


def header(token: str) -> dict[str, str]:
    """Return the request header that carries a token."""
    return {"Authorization": f"Bearer {token}"}


def token_of(authorization: str) -> str | None:
    """Return the token in the value of an `Authorization` header, or None.

    The name of the scheme is case-insensitive (RFC 9110, section 11.1).
    """
    if authorization[: len(_SCHEME)].lower() != _SCHEME:
        return None
    return authorization[len(_SCHEME) :].strip()


def is_known(token: str | None, *known: str) -> bool:
    """Whether a token is one of the known ones. An empty known token never matches."""
    if token is None:
        return False
    given = _encoded(token)
    # Every known token is compared, so the time taken does not depend on which one matches.
    matches = [hmac.compare_digest(given, _encoded(each)) for each in known if each]
    return any(matches)


def is_authorized(authorization: str, *known: str) -> bool:
    """Whether the value of an `Authorization` header carries one of the known tokens."""
    return is_known(token_of(authorization), *known)


def _encoded(token: str) -> bytes:
    # Servers decode header bytes that are not UTF-8 to surrogates.
    return token.encode("utf-8", "surrogateescape")
