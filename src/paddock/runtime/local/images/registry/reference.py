"""References to images in registries: `[host[:port]/]repository[:tag][@sha256:…]`. Pure.

A reference without a host names an image of Docker Hub, as with other tools: `python:3.12` is
`docker.io/library/python:3.12`.
"""

import ipaddress
import re

from msgspec import Struct, structs

from paddock.kit.errors import InvalidError

DOCKER_HUB = "docker.io"
_DOCKER_HUB_ALIASES = frozenset({"index.docker.io", "registry-1.docker.io", DOCKER_HUB})
_DOCKER_HUB_SERVER = "registry-1.docker.io"
_OFFICIAL = "library/"
DEFAULT_TAG = "latest"

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LABEL = r"(?:[A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9-]*[A-Za-z0-9])"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{{1,5}})?")
_MAX_LENGTH = 255


class ImageReference(Struct, frozen=True, kw_only=True):
    """An image in a registry."""

    host: str
    """In lower case, with the port if one was given; `docker.io` for Docker Hub."""
    repository: str
    tag: str = ""
    """Empty if a digest was given without a tag."""
    digest: str = ""

    @property
    def name(self) -> str:
        """The shortest form, by which the image is stored: `python:3.12`."""
        repository = self.repository
        if self.host == DOCKER_HUB:
            short = repository.removeprefix(_OFFICIAL)
            repository = short if "/" not in short else repository
        else:
            repository = f"{self.host}/{repository}"
        tag = f":{self.tag}" if self.tag else ""
        return f"{repository}{tag}" + (f"@{self.digest}" if self.digest else "")

    def version(self, digest: str) -> "ImageReference":
        """Return the reference to one version, without the tag that leads to it now."""
        return structs.replace(self, tag="", digest=digest)

    @property
    def wanted(self) -> str:
        """What is requested of the registry: the digest, or the tag."""
        return self.digest or self.tag


def parse_reference(text: str) -> ImageReference:
    """Parse a reference. Raises `InvalidError` if it is malformed."""
    rest, at, digest = text.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise _malformed(text, "the digest must be sha256: and 64 hexadecimal digits")
    first, slash, path = rest.partition("/")
    if slash and _is_host(first):
        host, rest = first.lower(), path
    else:
        host = DOCKER_HUB
    repository, colon, tag = rest.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise _malformed(text, f"{tag!r} is not a tag")
    if host in _DOCKER_HUB_ALIASES:
        host = DOCKER_HUB
        repository = repository if "/" in repository else f"{_OFFICIAL}{repository}"
    if not _HOST.fullmatch(host) or not _has_valid_port(host):
        raise _malformed(text, f"{host!r} is not a host")
    if len(repository) > _MAX_LENGTH or not _REPOSITORY.fullmatch(repository):
        raise _malformed(text, f"{repository!r} is not the name of a repository")
    return ImageReference(
        host=host,
        repository=repository,
        tag=tag or ("" if digest else DEFAULT_TAG),
        digest=digest,
    )


def server_of(host: str) -> str:
    """Return the host that serves the API of a registry."""
    return _DOCKER_HUB_SERVER if host == DOCKER_HUB else host


def is_loopback(host: str) -> bool:
    """Whether a host, with or without a port, is this machine."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    name = name.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_host(first: str) -> bool:
    """Whether the first part of a reference is a host, by the rule of Docker."""
    return "." in first or ":" in first or first == "localhost" or first != first.lower()


def _has_valid_port(host: str) -> bool:
    _, colon, port = host.rpartition(":")
    return not colon or not port.isdigit() or 0 < int(port) < 65536


def _malformed(text: str, reason: str) -> InvalidError:
    return InvalidError(
        f"{text[:300]!r} is not a reference to an image: {reason}",
        hint="write it as [host/]name[:tag] or [host/]name@sha256:…, such as python:3.12",
    )
