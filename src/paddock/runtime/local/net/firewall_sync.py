"""Keep the sets of the kernel's firewall in sync with the members of the fabric.

Set elements are reference-counted: some belong to several sandboxes and are deleted with the last.
If the kernel differs from the expected state (the ruleset was flushed), everything is rebuilt in
one transaction. `ruleset` defines the meaning of the elements.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address
from typing import Any

from paddock.kit.logs import fields
from paddock.runtime.local.net import ruleset
from paddock.runtime.local.net.addresses import AddressPlan, AddressSlot
from paddock.runtime.local.net.nft import Firewall, NftError
from paddock.runtime.local.net.policy import EgressRules
from paddock.runtime.local.net.records import NetworkRecord
from paddock.runtime.local.net.settings import FabricSettings

log = logging.getLogger(__name__)


class FabricMember:
    """The in-memory state of one sandbox of the fabric."""

    def __init__(self, record: NetworkRecord, slot: AddressSlot, rules: EgressRules) -> None:
        self.record = record
        self.slot = slot
        self.rules = rules
        self.is_attached = False
        self.is_reserved = False
        """Address and rules are in force; only the link is missing."""
        self.is_detaching = False
        self.elements: frozenset[ruleset.Element] = frozenset()
        """Its elements in the kernel's sets."""
        self.admitted: dict[str, tuple[float, str]] = {}
        """Admitted addresses: expiry (monotonic) and domain name."""

    @property
    def ip(self) -> str:
        return str(self.slot.ip)


class FirewallSync:
    """The nftables table of one fabric."""

    def __init__(
        self,
        firewall: Firewall,
        plan: AddressPlan,
        settings: FabricSettings,
        member: dict[str, FabricMember],
    ) -> None:
        self._firewall = firewall
        self._plan = plan
        self._settings = settings
        self._table = settings.table
        self._members = member
        """All members by address, shared with `FabricState`; read by `rebuild`."""
        self._rules = ruleset.RulesetSettings(
            table=settings.table,
            dns_port=settings.dns_port,
            max_flows=settings.max_flows,
            max_queries_per_second=settings.max_queries_per_second,
            host_ports=settings.host_ports,
            private_networks=settings.private_networks,
        )
        self._uses: Counter[ruleset.Element] = Counter()
        """Number of sandboxes per element."""
        self._classes: dict[tuple[object, object], int] = {}
        self._last_class = 0

    def rebuild(self) -> None:
        """Rebuild the kernel's table in one transaction."""
        name = ruleset.fingerprint(self._plan, self._rules)
        chains = (entry.get("chain") for entry in self._firewall.query("list chains"))
        is_there = any(
            chain and chain["table"] == self._table and chain["name"] == name for chain in chains
        )
        commands: list[str] = []
        if is_there:
            commands += self._load_admitted()
        else:
            commands += ruleset.create_table(self._plan, self._rules)
            for member in self._members.values():
                member.admitted.clear()
        self._uses.clear()
        for member in self._members.values():
            is_in = (member.is_attached or member.elements) and not member.is_detaching
            member.elements = self._wanted(member) if is_in else frozenset()
            self._uses.update(member.elements)
        self._firewall.run([*commands, *ruleset.rebuild(self._table, self._uses)])

    def put(self, member: FabricMember) -> None:
        """Apply a sandbox's current rules; revoke admitted addresses they do not cover."""
        stale = [
            address
            for address, (_, name) in member.admitted.items()
            if member.rules.is_open or not name or not member.rules.resolves(name)
        ]
        for address in stale:
            del member.admitted[address]
        revoked = ruleset.revoke(self._table, member.ip, stale)
        self._run(self._replace_elements(member, self._wanted(member)) + revoked)

    def remove(self, detaching: Iterable[FabricMember]) -> None:
        """Remove sandboxes: no packet passes their links afterwards."""
        commands: list[str] = []
        for member in detaching:
            commands += self._replace_elements(member, frozenset())
            commands += ruleset.revoke(self._table, member.ip, member.admitted)
            member.admitted.clear()
        self._run(commands)

    def admit(
        self, member: FabricMember, name: str, answers: Sequence[tuple[IPv4Address, int]]
    ) -> None:
        """Admit the resolved addresses of a name, up to the limit of the sandbox."""
        now = time.monotonic()
        low, high = self._settings.min_answer_seconds, self._settings.max_answer_seconds
        member.admitted = {one: seen for one, seen in member.admitted.items() if seen[0] > now}
        timed: dict[str, int] = {}
        for address, ttl in answers:
            key = str(address)
            if key not in member.admitted and len(member.admitted) >= self._settings.max_addresses:
                break
            timed[key] = max(low, min(ttl, high), timed.get(key, 0))
            member.admitted[key] = (now + timed[key], name)
        commands = ruleset.admit(self._table, member.ip, timed.items())
        try:
            self._firewall.run(commands)
        except NftError:
            self.rebuild()
            self._firewall.run(commands)

    def destroy(self) -> None:
        self._firewall.run([f"add table inet {self._table}", f"delete table inet {self._table}"])

    def _load_admitted(self) -> list[str]:
        """Load the admitted addresses from the kernel; their domain names are unknown."""
        now = time.monotonic()
        stray: list[str] = []
        for ip, address, seconds in _admitted(
            self._firewall.query(f"list set inet {self._table} resolved")
        ):
            member = self._members.get(ip)
            if member is None:
                stray += ruleset.revoke(self._table, ip, [address])
            else:
                member.admitted.setdefault(address, (now + seconds, ""))
        return stray

    def _wanted(self, member: FabricMember) -> frozenset[ruleset.Element]:
        rules = member.rules
        return ruleset.elements_of(member.slot, rules, member.record.marks, self._class_of(rules))

    def _class_of(self, rules: EgressRules) -> int:
        """Return the class number of a policy's networks; equal networks share a class."""
        if len(self._classes) > 2 * len(self._members) + 100:
            used = {(one.rules.allowed, one.rules.denied) for one in self._members.values()}
            self._classes = {key: n for key, n in self._classes.items() if key in used}
        key = (rules.allowed, rules.denied)
        if key not in self._classes:
            self._last_class = self._classes[key] = self._last_class % 0xFFFFFFFF + 1
        return self._classes[key]

    def _replace_elements(
        self, member: FabricMember, wanted: frozenset[ruleset.Element]
    ) -> list[str]:
        """Update the reference counts of one sandbox; return the commands for the kernel."""
        gone, new = member.elements - wanted, wanted - member.elements
        dropped = [one for one in gone if self._uses[one] == 1]
        added = [one for one in new if not self._uses[one]]
        self._uses.subtract(gone)
        self._uses.update(new)
        for one in dropped:
            del self._uses[one]
        member.elements = wanted
        return ruleset.change(self._table, dropped, added)

    def _run(self, commands: list[str]) -> None:
        try:
            self._firewall.run(commands)
        except NftError as error:
            log.warning(
                "firewall differs from the expected state, rebuilding it",
                extra=fields(error=str(error)),
            )
            self.rebuild()


def _admitted(listing: Iterable[dict[str, Any]]) -> Iterable[tuple[str, str, float]]:
    for entry in listing:
        for element in entry.get("set", {}).get("elem", ()):
            details = element["elem"]
            ip, address = details["val"]["concat"]
            yield ip, address, float(details.get("expires", 0))
