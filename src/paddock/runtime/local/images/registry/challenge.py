"""`WWW-Authenticate` headers of registries. Pure."""

import re
from collections.abc import Iterable

from msgspec import Struct

_SCHEME = re.compile(r"\s*,?\s*([A-Za-z][A-Za-z0-9_-]*)(?:\s+|$)")
_PARAMETER = re.compile(
    r"\s*,?\s*([A-Za-z_][A-Za-z0-9_-]*)\s*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^\s,\"]*))"
)
_ESCAPE = re.compile(r"\\(.)")


class Challenge(Struct, frozen=True, kw_only=True):
    """One way in which a server wants to be authenticated to."""

    scheme: str
    """In lower case: `bearer` or `basic`."""
    realm: str = ""
    service: str = ""
    scope: str = ""
    error: str = ""


def parse_challenges(headers: Iterable[str]) -> tuple[Challenge, ...]:
    """Return the challenges of all headers, in their order; malformed rests are ignored."""
    found: list[Challenge] = []
    for header in headers:
        position = 0
        while (scheme := _SCHEME.match(header, position)) is not None:
            position = scheme.end()
            parameters: dict[str, str] = {}
            while (pair := _PARAMETER.match(header, position)) is not None:
                value = pair[3] if pair[2] is None else _ESCAPE.sub(r"\1", pair[2])
                parameters.setdefault(pair[1].lower(), value)
                position = pair.end()
            found.append(
                Challenge(
                    scheme=scheme[1].lower(),
                    **{
                        name: parameters.get(name, "")
                        for name in ("realm", "service", "scope", "error")
                    },
                )
            )
    return tuple(found)
