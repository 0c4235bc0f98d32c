"""Request heads as they are forwarded: own lines of this hop, the rest unchanged.

Pure; parsing is in `request_heads`.
"""

from paddock.gateway.http.request_heads import RequestHead


def write_request(
    head: RequestHead,
    *,
    target: str,
    host: str,
    client: str,
    scheme: str,
    trusted: bool,
    traffic_token: str | None = None,
) -> bytes:
    """Return the head that the sandbox receives; another gateway also gets the traffic token."""
    line = f"{head.method} {target} HTTP/1.1\r\n".encode("latin-1")
    if traffic_token is not None:
        line += f"E2b-Traffic-Access-Token: {traffic_token}\r\n".encode("latin-1")
    return line + write_lines(head, host=host, client=client, scheme=scheme, trusted=trusted)


def write_lines(head: RequestHead, *, host: str, client: str, scheme: str, trusted: bool) -> bytes:
    """Return everything after the request line of the head that the sandbox receives."""
    forwarded = client.encode()
    proto = scheme.encode()
    if trusted:
        if head.forwarded_for:
            forwarded = head.forwarded_for + b", " + forwarded
        proto = head.forwarded_proto or proto
    hosts = f"Host: {host}\r\nX-Forwarded-Host: {head.host}\r\n".encode("latin-1")
    end = b"\r\n"
    if head.framing.is_chunked:
        end = b"Transfer-Encoding: chunked\r\n\r\n"
    if head.upgrade is not None:
        end = b"Connection: Upgrade\r\nUpgrade: " + head.upgrade + b"\r\n" + end
    return b"%b%bX-Forwarded-For: %b\r\nX-Forwarded-Proto: %b\r\n%b" % (
        hosts,
        head.passed,
        forwarded,
        proto,
        end,
    )
