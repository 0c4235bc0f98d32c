"""Formats of names, labels, addresses, percentages and other strings.

Each check returns what is wrong with a text, or `None`. Patterns that a Kubernetes API server
checks too are RE2 and anchored. `constraints` assigns formats to fields.
"""

import base64
import binascii
import ipaddress
import re
import ssl
from collections.abc import Callable
from functools import lru_cache
from urllib.parse import urlsplit

from croniter import croniter

Check = Callable[[str], str | None]

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
POSITIVE_QUANTITY = (
    r"^([0-9]*[1-9][0-9]*(\.[0-9]+)?|0+\.[0-9]*[1-9][0-9]*)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
)
PERCENTAGE = r"^([1-9][0-9]?|100)%$"
ABSOLUTE_PATH = r"^/"
USER_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*[$]?$"
SANDBOX_ID = r"^[a-z0-9]+$"
HOST_NAME = r"^[-A-Za-z0-9._${}:]+$"
ALIAS = r"^[-a-z0-9A-Z_]([-a-z0-9A-Z_./:]*[-a-z0-9A-Z_])?$"

MAX_NAME = 253
MAX_LABEL = 63
MAX_CERTIFICATES = 32_768
"""Characters of a text of CA certificates: about twenty certificates."""

_DNS_LABEL = re.compile(DNS_LABEL)
_DNS_SUBDOMAIN = re.compile(DNS_SUBDOMAIN)
_LABEL_NAME = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_DOMAIN = re.compile(r"^(\*\.)?([a-z0-9]([-a-z0-9]*[a-z0-9])?\.)*[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
_URL = re.compile(r"[!#-&(-+\--\[\]-~]+")
"""Printable ASCII without space, quotes, comma and backslash."""
_PROXY_EXCEPTION = re.compile(r"[-A-Za-z0-9._:*/\[\]]{1,253}")
_SECRET_KEY = re.compile(r"^[-._a-zA-Z0-9]{1,253}$")


def dns_subdomain(text: str) -> str | None:
    """Check the name of an object."""
    if len(text) > MAX_NAME:
        return f"must be no more than {MAX_NAME} characters"
    if not _DNS_SUBDOMAIN.fullmatch(text):
        return (
            f"{shorten(text)} is not a valid name: lower case letters, digits, '-' and '.', "
            "beginning and ending with a letter or digit"
        )
    return None


def dns_label(text: str) -> str | None:
    """Check a name that must be a single DNS label."""
    if len(text) > MAX_LABEL:
        return f"must be no more than {MAX_LABEL} characters"
    if not _DNS_LABEL.fullmatch(text):
        return (
            f"{shorten(text)} is not a valid name: lower case letters, digits and '-', "
            "beginning and ending with a letter or digit"
        )
    return None


@lru_cache(maxsize=4096)
def qualified_name(text: str) -> str | None:
    """Check the key of a label or annotation: an optional domain with `/`, and a name."""
    prefix, slash, name = text.rpartition("/")
    if slash and (problem := dns_subdomain(prefix)):
        return f"prefix of {shorten(text)}: {problem}"
    if len(name) > MAX_LABEL or not _LABEL_NAME.fullmatch(name):
        return (
            f"{shorten(text)} is not a valid key: up to 63 letters, digits, '-', '_' and '.', "
            "with an optional domain and '/' before them"
        )
    return None


@lru_cache(maxsize=4096)
def label_value(text: str) -> str | None:
    """Check the value of a label."""
    if text and (len(text) > MAX_LABEL or not _LABEL_NAME.fullmatch(text)):
        return (
            f"{shorten(text)} is not a valid label value: up to 63 letters, digits, '-', '_' and "
            "'.', beginning and ending with a letter or digit"
        )
    return None


def env_name(text: str) -> str | None:
    """Check the name of an environment variable."""
    if _ENV_NAME.fullmatch(text):
        return None
    return (
        f"{shorten(text)} is not a valid variable name: letters, digits and '_', "
        "not beginning with a digit"
    )


def secret_key(text: str) -> str | None:
    """Check a key of a Secret."""
    if _SECRET_KEY.fullmatch(text):
        return None
    return f"{shorten(text)} is not a valid key: up to 253 letters, digits, '-', '_' and '.'"


def base64_text(text: str) -> str | None:
    """Check a base64 value."""
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return "is not valid base64"
    return None


def network(text: str) -> str | None:
    """Check an address or CIDR."""
    if is_network(text):
        return None
    return f"{shorten(text)} is neither an address nor a CIDR such as 10.0.0.0/8"


def network_or_domain(text: str) -> str | None:
    """Check an address, CIDR or domain."""
    if is_network(text) or (len(text) <= MAX_NAME and _DOMAIN.fullmatch(text.lower())):
        return None
    return f"{shorten(text)} is neither an address, a CIDR nor a domain such as *.example.com"


def address(text: str) -> str | None:
    """Check an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return f"{shorten(text)} is not an IP address"
    return None


def proxy_url(text: str) -> str | None:
    """Check the URL of a proxy; empty means none. Messages do not quote it: it may be secret."""
    return _url_problem(text, ("http", "https", "socks5", "socks5h"))


def web_url(text: str) -> str | None:
    """Check the URL of a web server; empty means none. Messages do not quote it."""
    return _url_problem(text, ("http", "https"))


def _url_problem(text: str, schemes: tuple[str, ...]) -> str | None:
    if not text:
        return None
    if not _URL.fullmatch(text):
        return "must be a URL without spaces, quotes, commas and backslashes"
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "must be a URL such as http://host.example:3128"
    if parts.scheme not in schemes or not host:
        return f"must be a URL with a host and the scheme {' or '.join(schemes)}"
    return None


def proxy_exception(text: str) -> str | None:
    """Check one host, domain or address that is reached without a proxy."""
    if not _PROXY_EXCEPTION.fullmatch(text):
        return f"{shorten(text)} is not a host, a domain or an address"
    return None


def certificates(text: str) -> str | None:
    """Check a text of CA certificates in PEM format; empty means none."""
    if not text:
        return None
    if "PRIVATE KEY" in text:
        return "must hold certificates only, but it holds a private key"
    # Comments between certificates may have any characters, but OpenSSL reads ASCII only.
    ascii_text = text.encode("ascii", "replace").decode()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ascii_text)
    except (ssl.SSLError, ValueError):
        return "must be certificates in PEM format"
    return None


def cron(text: str) -> str | None:
    """Check a cron expression with five fields."""
    if len(text.split()) == 5 and croniter.is_valid(text):
        return None
    return f"{shorten(text)} is not a cron expression with five fields such as '0 8 * * 1-5'"


def is_network(text: str) -> bool:
    """Whether the text is an address or a CIDR."""
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def shorten(text: str) -> str:
    """Return the text quoted, truncated to 64 characters."""
    return repr(text if len(text) <= 64 else text[:61] + "...")
