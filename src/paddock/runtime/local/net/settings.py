"""Settings of the fabric, and the description of an attachment."""

from ipaddress import IPv4Network

from msgspec import Struct

from paddock.runtime.local.net.dns.server import ResolverSettings

_LAST_ABOVE = 42
HOST_NAME = "host.paddock.internal"
"""Name of this machine in sandboxes, if they may reach ports of it."""


class FabricSettings(Struct, frozen=True, kw_only=True):
    """Settings of one fabric. Two fabrics on one machine must differ in every name."""

    state_directory: str
    """Directory of the records; created if missing."""
    subnet: str = "10.213.0.0/16"
    """An unused private range. A /16 has room for 65 533 sandboxes."""
    link_prefix: str = "pd-"
    table: str = "paddock"
    dns_port: int = 15353
    """Port of the resolver on the gateway's address. Queries to port 53 are redirected to it, so
    that it does not conflict with a resolver of the host."""
    uplinks: tuple[str, ...] = ()
    """Uplinks; empty means the links with a default route."""
    mtu: int | None = None
    """`None` means the smallest MTU of the uplinks."""
    resolv_conf: str = "/etc/resolv.conf"
    """File with the host's name servers."""
    max_flows: int = 4096
    """Maximum number of concurrent connections of a sandbox."""
    max_queries_per_second: int = 200
    """Rate and burst limit of packets from a sandbox to the resolver; the rest is dropped."""
    min_answer_seconds: int = 30
    """Minimum time that a resolved address is admitted, because programs do not connect
    immediately after the answer."""
    max_answer_seconds: int = 86400
    max_addresses: int = 2048
    """Maximum number of addresses admitted for a sandbox by domain names."""
    host_ports: tuple[int, ...] = ()
    """TCP ports of this machine that sandboxes may reach, as `HOST_NAME` or by the gateway's
    address."""
    private_networks: tuple[IPv4Network, ...] = ()
    """Private networks that every sandbox may reach, such as the one of a proxy."""
    resolver: ResolverSettings = ResolverSettings()

    @classmethod
    def numbered(
        cls,
        number: int,
        state_directory: str,
        *,
        host_ports: tuple[int, ...] = (),
        private_networks: tuple[IPv4Network, ...] = (),
    ) -> "FabricSettings":
        """Return the settings of one of several fabrics on the same machine (0 to 99)."""
        if number == 0:
            return cls(
                state_directory=state_directory,
                host_ports=host_ports,
                private_networks=private_networks,
            )
        # Count up to the end of the private range, then down from 10.212.
        second = 213 + number if number <= _LAST_ABOVE else 213 + _LAST_ABOVE - number
        return cls(
            state_directory=state_directory,
            subnet=f"10.{second}.0.0/16",
            link_prefix=f"pd{number}-",
            table=f"paddock{number}",
            dns_port=15353 + number,
            host_ports=host_ports,
            private_networks=private_networks,
        )


class Bandwidth(Struct, frozen=True):
    """The highest rates of a link in bits per second; 0 is no limit."""

    ingress: int = 0
    """To the sandbox."""
    egress: int = 0
    """From the sandbox."""


UNLIMITED = Bandwidth()


class Attachment(Struct, frozen=True, kw_only=True):
    """The network attachment of a sandbox."""

    uid: str
    slot: int
    ip: str
    gateway: str
    link: str
    """Name of the host end of the veth pair."""
    interface: str
    """Name of the inner end."""
    mac: str
    mtu: int

    @property
    def resolv_conf(self) -> str:
        """Content of the sandbox's /etc/resolv.conf."""
        return f"nameserver {self.gateway}\noptions timeout:3 attempts:2\n"
