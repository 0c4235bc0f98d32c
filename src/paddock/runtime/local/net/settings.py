"""What an operator may choose about the fabric, and what a caller learns of an attachment."""

from msgspec import Struct

from paddock.runtime.local.net.dns.server import ResolverSettings

_LAST_ABOVE = 42


class FabricSettings(Struct, frozen=True, kw_only=True):
    """Choices of one fabric. Two fabrics on one machine need all of their names different."""

    state_directory: str
    """Where the records lie; made if missing."""
    subnet: str = "10.213.0.0/16"
    """A private range nothing else uses. A /16 has room for 65 533 sandboxes."""
    link_prefix: str = "pd-"
    table: str = "paddock"
    dns_port: int = 15353
    """Where the resolver listens on the gateway's address; sandboxes ask port 53 and are led here,
    so that it never fights with a resolver of the host's own."""
    uplinks: tuple[str, ...] = ()
    """Links that lead out; empty means those with a default route."""
    mtu: int | None = None
    """`None` takes the smallest of the uplinks'."""
    resolv_conf: str = "/etc/resolv.conf"
    """Where the host's own name servers are listed."""
    max_flows: int = 4096
    """Connections a sandbox may have at once."""
    max_queries_per_second: int = 200
    """Packets a sandbox may send to the resolver, or at once after a pause; the rest is lost."""
    min_answer_seconds: int = 30
    """An address stays reachable at least this long after its name was resolved, because programs
    do not connect the instant they get an answer."""
    max_answer_seconds: int = 86400
    max_addresses: int = 2048
    """Addresses a sandbox may have let through by names at once."""
    resolver: ResolverSettings = ResolverSettings()

    @classmethod
    def numbered(cls, number: int, state_directory: str) -> "FabricSettings":
        """Give the settings of one of several fabrics on the same machine (0 to 99)."""
        if number == 0:
            return cls(state_directory=state_directory)
        # Upwards to the end of the private range, then downwards from where that began.
        second = 213 + number if number <= _LAST_ABOVE else 213 + _LAST_ABOVE - number
        return cls(
            state_directory=state_directory,
            subnet=f"10.{second}.0.0/16",
            link_prefix=f"pd{number}-",
            table=f"paddock{number}",
            dns_port=15353 + number,
        )


class Attachment(Struct, frozen=True, kw_only=True):
    """A sandbox's place in the network."""

    uid: str
    slot: int
    ip: str
    gateway: str
    link: str
    """Name of the end on the host."""
    interface: str
    """Name of the end inside."""
    mac: str
    mtu: int

    @property
    def resolv_conf(self) -> str:
        """What the sandbox's /etc/resolv.conf must say."""
        return f"nameserver {self.gateway}\noptions timeout:3 attempts:2\n"
