"""Living on a machine with other people's networking: forwarding and foreign firewalls.

Packets are forwarded when the interface they come in by says so. Our links say so for themselves;
replies come in by an uplink, whose own switch (`net.ipv4.conf.<link>.forwarding`) we set, never
the machine-wide one. An uplink is a link that carries a default route, unless settings name them.

A packet that our table accepts can still be dropped by another table. Docker's forward chain drops
by default and has a chain for local additions, which we use; of any other such chain we can only
tell the operator.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from paddock.kit.errors import UnsupportedError
from paddock.runtime.local.net.links import Link, Route
from paddock.runtime.local.net.netns import entered
from paddock.runtime.local.net.nft import Firewall

_COMMENT = "paddock"


class Obstacle(Struct, frozen=True):
    """A foreign chain that drops by default where sandboxes' packets pass."""

    family: str
    table: str
    chain: str
    hook: str

    def __str__(self) -> str:
        return f"{self.family} {self.table} {self.chain} ({self.hook})"


def uplinks(
    links: Iterable[Link], routes: Iterable[Route], *, configured: Sequence[str], prefix: str
) -> tuple[Link, ...]:
    """Choose the links by which sandboxes reach the world."""
    candidates = [link for link in links if not link.name.startswith(prefix) and link.name != "lo"]
    if configured:
        return tuple(link for link in candidates if link.name in configured)
    defaults = {route.index for route in routes if route.destination.prefixlen == 0}
    return tuple(link for link in candidates if link.index in defaults)


def enable_forwarding(names: Iterable[str], netns_fd: int | None) -> tuple[str, ...]:
    """Switch forwarding on for links where it is off; give those that were switched."""
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
                    f"packets that come in by {name} cannot be forwarded to sandboxes: {error}",
                    hint=f"run `sysctl -w net.ipv4.conf.{name}.forwarding=1` on the host",
                ) from error
            switched.append(name)
    return tuple(switched)


def obstacles(listing: Iterable[dict[str, Any]], own_table: str) -> tuple[Obstacle, ...]:
    """Find foreign chains that drop by default, in the output of `list chains`."""
    found: list[Obstacle] = []
    for entry in listing:
        chain = entry.get("chain")
        if not chain or chain["table"] == own_table or chain["family"] not in ("ip", "inet"):
            continue
        if chain.get("hook") in ("forward", "input") and chain.get("policy") == "drop":
            found.append(Obstacle(chain["family"], chain["table"], chain["name"], chain["hook"]))
    return tuple(found)


def pass_docker(firewall: Firewall, listing: Iterable[dict[str, Any]], prefix: str) -> bool:
    """Let our links through Docker's forward chain, where there is one; say whether there is.

    Our own table has judged these packets already: what reaches Docker's chain was allowed.
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


def leave_docker(firewall: Firewall, listing: Iterable[dict[str, Any]], prefix: str) -> None:
    """Take our rules out of Docker's chain again."""
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
