"""Responses of the gateway itself. Clients parse the exact messages."""

import html

import msgspec

from paddock.gateway.http.request_heads import RequestHead

REASONS = {
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    413: b"Content Too Large",
    417: b"Expectation Failed",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
}
NOT_FOUND = "The sandbox was not found"
PORT_CLOSED = "The sandbox is running but port is not open"
PAUSED_UNANSWERED = "The sandbox was paused before it answered"
RESTARTED_UNANSWERED = "The sandbox was restarted before it answered"
ENDED_UNANSWERED = "The sandbox ended before it answered"

PREFLIGHT = (
    b"HTTP/1.1 204 No Content\r\nAccess-Control-Allow-Origin: *\r\n"
    b"Access-Control-Allow-Methods: HEAD, GET, POST, PUT, PATCH, DELETE\r\n"
    b"Access-Control-Allow-Headers: *\r\nAccess-Control-Max-Age: 7200\r\n"
    b"Access-Control-Expose-Headers: Location, Cache-Control, X-Content-Type-Options, "
    b"Connect-Content-Encoding, Connect-Protocol-Version, Grpc-Encoding, Grpc-Message, "
    b"Grpc-Status, Grpc-Status-Details-Bin\r\nVary: Origin\r\n"
)
"""The response to a browser's CORS preflight for envd; needs no token and wakes nothing."""

_PAGE = """<!doctype html><html><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;margin:15vh auto;max-width:36rem;color:#222}}
code{{background:#f2f2f2;padding:.1em .3em;border-radius:3px}}</style></head>
<body><h1>{title}</h1><p>{message}</p>{detail}</body></html>"""


def error_response(
    status: int,
    message: str,
    *,
    head: RequestHead | None = None,
    sandbox_id: str | None = None,
    port: int | None = None,
    retry_after_seconds: int | None = None,
    keep_alive: bool = False,
) -> bytes:
    """Return a complete error response: a page for browsers, JSON for programs."""
    if head is not None and head.accepts_html:
        body, kind = _page(status, message, sandbox_id, port), b"text/html; charset=utf-8"
    else:
        body, kind = _json(status, message, sandbox_id, port), b"application/json"
    lines = [
        b"HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n"
        % (status, REASONS.get(status, b"Error"), kind, len(body)),
        b"Access-Control-Allow-Origin: *\r\nCache-Control: no-store\r\n",
    ]
    if retry_after_seconds is not None:
        lines.append(b"Retry-After: %d\r\n" % retry_after_seconds)
    if not keep_alive:
        lines.append(b"Connection: close\r\n")
    lines.append(b"\r\n")
    if head is None or head.method != "HEAD":
        lines.append(body)
    return b"".join(lines)


def preflight(*, keep_alive: bool) -> bytes:
    """Return the response to a CORS preflight."""
    return PREFLIGHT + (b"\r\n" if keep_alive else b"Connection: close\r\n\r\n")


def _json(status: int, message: str, sandbox_id: str | None, port: int | None) -> bytes:
    content: dict[str, object] = {"message": message, "code": status}
    if sandbox_id is not None:
        content = {"sandboxId": sandbox_id, **content}
    if port is not None:
        content["port"] = port
    return msgspec.json.encode(content)


def _page(status: int, message: str, sandbox_id: str | None, port: int | None) -> bytes:
    detail = ""
    if sandbox_id is not None:
        detail += f"<p>Sandbox <code>{html.escape(sandbox_id)}</code>"
        detail += f", port <code>{port}</code></p>" if port is not None else "</p>"
    title = f"{status} {REASONS.get(status, b'Error').decode()}"
    return _PAGE.format(title=title, message=html.escape(message), detail=detail).encode()
