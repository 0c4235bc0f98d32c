"""Network ranges that tests may use for sandboxes on this machine."""

from collections.abc import Iterable
from ipaddress import ip_address, ip_network

from paddock.runtime.local.net.dns.upstream import host_servers
from paddock.runtime.local.net.settings import FabricSettings


def usable_numbers(numbers: Iterable[int], servers: Iterable[str] | None = None) -> list[int]:
    """Exclude fabrics whose range contains a name server: a node refuses to hide it."""
    found = [ip_address(text) for text in (host_servers() if servers is None else servers)]
    subnets = {number: ip_network(FabricSettings.numbered(number, "").subnet) for number in numbers}
    return [
        number
        for number, subnet in subnets.items()
        if not any(server in subnet for server in found)
    ]
