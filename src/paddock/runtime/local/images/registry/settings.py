"""Which registries may be reached, and how: mirrors, plain HTTP, private addresses."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from msgspec import Struct, structs

from paddock.kit.errors import FieldProblem, InvalidError
from paddock.runtime.local.images.registry.reference import (
    DOCKER_HUB,
    ImageReference,
    is_loopback,
    server_of,
)
from paddock.runtime.port import RegistryCredentials

ANY_HOST = "*"


class RegistrySettings(Struct, frozen=True, kw_only=True):
    """How registries are reached."""

    mirrors: Mapping[str, tuple[str, ...]] = {}
    """URLs that are tried before a registry, by its host."""
    insecure: frozenset[str] = frozenset()
    """Hosts that are reached by plain HTTP; those of this machine are always."""
    private: frozenset[str] = frozenset()
    """Hosts that may have private addresses; `*` stands for all."""
    may_be_unresolved: bool = False
    """Whether a proxy may be asked for a host that only the proxy can resolve."""
    docker_config: Path | None = None
    """File with the operator's credentials."""

    def endpoints(self, reference: ImageReference) -> tuple[str, ...]:
        """Return the base URLs to try for an image: mirrors first, then its registry."""
        server = server_of(reference.host)
        return (*self.mirrors.get(reference.host, ()), f"{self.scheme(server)}://{server}")

    def for_operator(self, host: str) -> "RegistrySettings":
        """Return the settings for a registry that the operator names: it may be private."""
        return structs.replace(self, private=self.private | {host}, may_be_unresolved=True)

    def scheme(self, host: str) -> str:
        """Return how a host is reached: `http` or `https`."""
        return "http" if self.may_be_plain(host) else "https"

    def may_be_plain(self, host: str) -> bool:
        """Whether requests to a host may be sent without TLS."""
        return host in self.insecure or is_loopback(host)

    def may_be_private(self, host: str) -> bool:
        """Whether a host may have a private address."""
        return ANY_HOST in self.private or host in self.private or _name(host) in self.private


def parse_mirrors(setting: str) -> dict[str, tuple[str, ...]]:
    """Parse `docker.io=https://mirror.example,…`; several mirrors of a host keep their order."""
    found: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (part.strip() for part in setting.split(","))):
        host, equals, url = part.partition("=")
        parts = urlsplit(url)
        if not equals or parts.scheme not in ("http", "https") or not parts.netloc:
            problem = FieldProblem("registry_mirrors", f"{part!r} is not host=URL")
            raise InvalidError(
                str(problem),
                problems=[problem],
                hint=f"such as {DOCKER_HUB}=https://mirror.example",
            )
        found[host] = (*found.get(host, ()), url.rstrip("/"))
    return found


def parse_hosts(setting: str) -> frozenset[str]:
    """Parse hosts that are separated by commas."""
    return frozenset(filter(None, (part.strip().lower() for part in setting.split(","))))


def without_login(url: str) -> tuple[str, RegistryCredentials | None]:
    """Return the URL of a mirror without the user and password in it, and these."""
    parts = urlsplit(url)
    login, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None
    user, _, password = login.partition(":")
    found = RegistryCredentials(host=host, username=unquote(user), password=unquote(password))
    return urlunsplit(parts._replace(netloc=host)), found


def _name(host: str) -> str:
    """Return a host without its port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
