"""The URL of a port of a sandbox, as a client reaches it. Pure."""

from urllib.parse import urlsplit

_LOCAL_NAME = "localhost"


def sandbox_url(base: str, sandbox_id: str, port: int, domain: str = "") -> str:
    """Return the URL; `base` is that of the gateways, as the client uses it.

    With a domain, or at localhost, each sandbox has an origin of its own. Otherwise the path names
    it: other names have no wildcard record.
    """
    parts = urlsplit(base)
    if domain:
        return f"{parts.scheme}://{port}-{sandbox_id}.{domain}/"
    if parts.hostname == _LOCAL_NAME:
        return f"{parts.scheme}://{port}-{sandbox_id}.{parts.netloc}/"
    return f"{base.rstrip('/')}/kruise/{sandbox_id}/{port}/"
