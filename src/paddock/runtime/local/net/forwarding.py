"""IP forwarding on uplinks, and firewalls of other programs.

The kernel forwards a packet if forwarding is enabled on the interface it arrives on. It is enabled
on the links of sandboxes, and for replies on the uplinks (`net.ipv4.conf.<link>.forwarding`), never
machine-wide. An uplink is a link with a default route, unless the settings name the uplinks.

A packet accepted by Paddock's table can still be dropped by another table. Docker's forward chain
drops by default, and has the chain DOCKER-USER for additions, which is used here. Other such chains
are logged for the operator.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from paddock.kit.errors import UnsupportedError
from paddock.runtime.local.net.links import IpRoute, Link
from paddock.runtime.local.net.netns import entered
from paddock.runtime.local.net.nft import Firewall

_COMMENT = "paddock"


class ForeignDropChain(Struct, frozen=True):
    """A chain of another program that drops packets of sandboxes by default."""

    family: str
    table: str
    chain: str
    hook: str

    def __str__(self) -> str:
        return f"{self.family} {self.table} {self.chain} ({self.hook})"


def uplinks(
    links: Iterable[Link], routes: Iterable[IpRoute], *, configured: Sequence[str], prefix: str
) -> tuple[Link, ...]:
    """Return the links by which sandboxes reach other machines."""
    candidates = [link for link in links if not link.name.startswith(prefix) and link.name != "lo"]
    if configured:
        return tuple(link for link in candidates if link.name in configured)
    defaults = {route.index for route in routes if route.destination.prefixlen == 0}
    return tuple(link for link in candidates if link.index in defaults)


def enable_forwarding(names: Iterable[str], netns_fd: int | None) -> tuple[str, ...]:
    """Enable forwarding on links; return those on which it was disabled."""
    switched: list[str] = []
    with entered(netns_fd):
        for name in names:
            path = f"/proc/sys/net/ipv4/conf/{name}/forwarding"
            with open(path, encoding="ascii") as file:
                if file.read().strip() == "1":
                    continue
            try:
                with open(path, "w", encoding="ascii") as file:
                    file.write("1")
            except OSError as error:
                raise UnsupportedError(
                    f"cannot enable forwarding on {name}, so sandboxes get no replies: {error}",
                    hint=f"run `sysctl -w net.ipv4.conf.{name}.forwarding=1` on the host",
                ) from error
            switched.append(name)
    return tuple(switched)


def foreign_drop_chains(
    listing: Iterable[dict[str, Any]], own_table: str
) -> tuple[ForeignDropChain, ...]:
    """Return the foreign chains that drop by default, from the output of `list chains`."""
    found: list[ForeignDropChain] = []
    for entry in listing:
        chain = entry.get("chain")
        if not chain or chain["table"] == own_table or chain["family"] not in ("ip", "inet"):
            continue
        if chain.get("hook") in ("forward", "input") and chain.get("policy") == "drop":
            found.append(
                ForeignDropChain(chain["family"], chain["table"], chain["name"], chain["hook"])
            )
    return tuple(found)


def allow_in_docker(firewall: Firewall, listing: Iterable[dict[str, Any]], prefix: str) -> bool:
    """Accept packets of the fabric's links in Docker's chain; return whether it exists.

    Paddock's own table has filtered these packets already.
    """
    chains = [entry["chain"] for entry in listing if "chain" in entry]
    if not any((c["family"], c["table"], c["name"]) == _DOCKER for c in chains):
        return False
    where = " ".join(_DOCKER)
    rules = [entry["rule"] for entry in firewall.query(f"list chain {where}") if "rule" in entry]
    present = {rule.get("comment") for rule in rules}
    wanted = {f"{_COMMENT} {prefix} {side}": side for side in ("iifname", "oifname")}
    firewall.run(
        [
            f'insert rule {where} {side} "{prefix}*" counter accept comment "{comment}"'
            for comment, side in wanted.items()
            if comment not in present
        ]
    )
    return True


def remove_from_docker(firewall: Firewall, listing: Iterable[dict[str, Any]], prefix: str) -> None:
    """Remove the fabric's rules from Docker's chain."""
    chains = [entry["chain"] for entry in listing if "chain" in entry]
    if not any((c["family"], c["table"], c["name"]) == _DOCKER for c in chains):
        return
    where = " ".join(_DOCKER)
    rules = [entry["rule"] for entry in firewall.query(f"list chain {where}") if "rule" in entry]
    firewall.run(
        [
            f"delete rule {where} handle {rule['handle']}"
            for rule in rules
            if str(rule.get("comment", "")).startswith(f"{_COMMENT} {prefix} ")
        ]
    )


_DOCKER = ("ip", "filter", "DOCKER-USER")
