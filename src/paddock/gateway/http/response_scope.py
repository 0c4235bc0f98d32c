"""Response heads of sandboxes that share the browser's origin with the API. Pure.

Some headers apply to the whole origin, or to paths outside of the sandbox's own: they are dropped,
and cookies are limited to the prefix of the sandbox.
"""

import re

from paddock.gateway.http.response_heads import ResponseHead, with_lines

_ORIGIN_WIDE = frozenset(
    (
        b"service-worker-allowed",
        b"clear-site-data",
        b"strict-transport-security",
        b"alt-svc",
        b"nel",
        b"report-to",
        b"expect-ct",
        b"public-key-pins",
        b"public-key-pins-report-only",
        b"use-as-dictionary",
        b"set-cookie2",
    )
)
_COOKIE = b"set-cookie"
_CONTENT_TYPE = b"content-type"
_ISOLATED = b"Content-Security-Policy: sandbox\r\n"
_ACTIVE_TYPE = re.compile(rb"html|xml|svg", re.IGNORECASE)


def scoped(head: ResponseHead, prefix: str) -> ResponseHead:
    """Return the head as a browser may receive it below this prefix of the API's origin.

    With an empty prefix the URL is one of the API's own: cookies are dropped, and a document gets
    an origin of its own.
    """
    lines: list[bytes] = []
    is_document = True
    for line in head.lines:
        name, _, value = line.partition(b":")
        lowered = name.lower()
        if lowered in _ORIGIN_WIDE:
            continue
        if lowered == _COOKIE:
            if prefix:
                lines.append(_scoped_cookie(name, value, prefix.encode("latin-1")))
            continue
        if lowered == _CONTENT_TYPE:
            is_document = _ACTIVE_TYPE.search(value) is not None
        lines.append(line)
    if not prefix and is_document and head.status >= 200:
        lines.append(_ISOLATED)
    return head if lines == head.lines else with_lines(head, lines)


def _scoped_cookie(name: bytes, value: bytes, prefix: bytes) -> bytes:
    """Return a Set-Cookie line without Domain, whose Path is below the prefix."""
    pair, *attributes = value.rstrip(b"\r\n").split(b";")
    path = b"/"
    kept: list[bytes] = []
    for attribute in attributes:
        key, _, given = attribute.partition(b"=")
        lowered = key.strip(b" \t").lower()
        if lowered == b"path":
            # As in browsers: the last one counts, and one that is not absolute means none.
            given = given.strip(b" \t")
            path = given if given.startswith(b"/") else b"/"
        elif lowered != b"domain":
            kept.append(attribute)
    if not (path == prefix or path.startswith(prefix + b"/")):
        path = prefix + path
    return b";".join((name + b":" + pair, *kept, b" Path=" + path)) + b"\r\n"
