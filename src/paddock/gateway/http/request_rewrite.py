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
    extra: bytes = b"",
) -> bytes:
    """Return the head that is forwarded; `extra`: lines for the API or another gateway."""
    line = f"{head.method} {target} HTTP/1.1\r\n".encode("latin-1")
    lines = write_lines(head, host=host, client=client, scheme=scheme, trusted=trusted)
    return line + extra + lines


def client_address(head: RequestHead, *, client: str, trusted: bool) -> str:
    """Return the address of the client: the last one that a trusted proxy in front appended."""
    if not trusted or not head.forwarded_for:
        return client
    return head.forwarded_for.rpartition(b",")[2].strip().decode("latin-1") or client


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
