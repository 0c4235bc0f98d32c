"""The firewall's sets, kept equal to what the fabric holds.

Knows which element of the kernel's sets stands for which sandboxes: some stand for several, and go
with the last. Where the kernel turns out to differ (somebody flushed the ruleset), everything is
put right in one transaction. What the elements mean is `ruleset`'s business.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address
from typing import Any

from paddock.kit.logs import fields
from paddock.runtime.local.net import ruleset
from paddock.runtime.local.net.addresses import AddressPlan, Slot
from paddock.runtime.local.net.nft import Firewall, NftError
from paddock.runtime.local.net.policy import EgressRules
from paddock.runtime.local.net.records import Record
from paddock.runtime.local.net.settings import FabricSettings

log = logging.getLogger(__name__)


class Held:
    """One sandbox in memory."""

    def __init__(self, record: Record, slot: Slot, rules: EgressRules) -> None:
        self.record = record
        self.slot = slot
        self.rules = rules
        self.is_attached = False
        self.is_reserved = False
        """Its address and its rules hold; only the link is missing."""
        self.is_leaving = False
        self.elements: frozenset[ruleset.Element] = frozenset()
        """What the kernel's sets hold for it."""
        self.admitted: dict[str, tuple[float, str]] = {}
        """Addresses let through by name: until when (monotonic), and which name."""

    @property
    def ip(self) -> str:
        """Its address."""
        return str(self.slot.ip)


class Wall:
    """The table of one fabric."""

    def __init__(
        self, firewall: Firewall, plan: AddressPlan, settings: FabricSettings, held: dict[str, Held]
    ) -> None:
        self._firewall = firewall
        self._plan = plan
        self._settings = settings
        self._table = settings.table
        self._held = held
        """Every sandbox by address: the fabric's own table, looked at when rebuilding."""
        self._rules = ruleset.RulesetSettings(
            table=settings.table,
            dns_port=settings.dns_port,
            max_flows=settings.max_flows,
            max_queries_per_second=settings.max_queries_per_second,
        )
        self._uses: Counter[ruleset.Element] = Counter()
        """How many sandboxes stand behind each element."""
        self._classes: dict[tuple[object, object], int] = {}
        self._last_class = 0

    def rebuild(self) -> None:
        """Make the kernel's table what it should be, in one transaction."""
        name = ruleset.fingerprint(self._plan, self._rules)
        chains = (entry.get("chain") for entry in self._firewall.query("list chains"))
        is_there = any(
            chain and chain["table"] == self._table and chain["name"] == name for chain in chains
        )
        commands: list[str] = []
        if is_there:
            commands += self._recall_admitted()
        else:
            commands += ruleset.create_table(self._plan, self._rules)
            for held in self._held.values():
                held.admitted.clear()
        self._uses.clear()
        for held in self._held.values():
            is_in = (held.is_attached or held.elements) and not held.is_leaving
            held.elements = self._wanted(held) if is_in else frozenset()
            self._uses.update(held.elements)
        self._firewall.run([*commands, *ruleset.rebuild(self._table, self._uses)])

    def put(self, held: Held) -> None:
        """Make a sandbox's present rules hold; answers they do not cover are taken back."""
        stale = [
            address
            for address, (_, name) in held.admitted.items()
            if held.rules.is_open or not name or not held.rules.resolves(name)
        ]
        for address in stale:
            del held.admitted[address]
        dismissed = ruleset.dismiss(self._table, held.ip, stale)
        self._run(self._exchange(held, self._wanted(held)) + dismissed)

    def remove(self, leaving: Iterable[Held]) -> None:
        """Take sandboxes out: nothing passes their links any more."""
        commands: list[str] = []
        for held in leaving:
            commands += self._exchange(held, frozenset())
            commands += ruleset.dismiss(self._table, held.ip, held.admitted)
            held.admitted.clear()
        self._run(commands)

    def admit(self, held: Held, name: str, answers: Sequence[tuple[IPv4Address, int]]) -> None:
        """Let a sandbox reach what a name resolved to, as many addresses as it may have."""
        now = time.monotonic()
        low, high = self._settings.min_answer_seconds, self._settings.max_answer_seconds
        held.admitted = {one: seen for one, seen in held.admitted.items() if seen[0] > now}
        timed: dict[str, int] = {}
        for address, ttl in answers:
            key = str(address)
            if key not in held.admitted and len(held.admitted) >= self._settings.max_addresses:
                break
            timed[key] = max(low, min(ttl, high), timed.get(key, 0))
            held.admitted[key] = (now + timed[key], name)
        commands = ruleset.admit(self._table, held.ip, timed.items())
        try:
            self._firewall.run(commands)
        except NftError:
            self.rebuild()
            self._firewall.run(commands)

    def destroy(self) -> None:
        """Remove the table."""
        self._firewall.run([f"add table inet {self._table}", f"delete table inet {self._table}"])

    def _recall_admitted(self) -> list[str]:
        """Learn from the kernel which answers are still let through; their names are lost."""
        now = time.monotonic()
        stray: list[str] = []
        for ip, address, seconds in _admitted(
            self._firewall.query(f"list set inet {self._table} resolved")
        ):
            held = self._held.get(ip)
            if held is None:
                stray += ruleset.dismiss(self._table, ip, [address])
            else:
                held.admitted.setdefault(address, (now + seconds, ""))
        return stray

    def _wanted(self, held: Held) -> frozenset[ruleset.Element]:
        rules = held.rules
        return ruleset.elements_of(held.slot, rules, held.record.marks, self._class_of(rules))

    def _class_of(self, rules: EgressRules) -> int:
        """Number the networks of a policy; the same ones get the same number while in use."""
        if len(self._classes) > 2 * len(self._held) + 100:
            used = {(one.rules.allowed, one.rules.denied) for one in self._held.values()}
            self._classes = {key: n for key, n in self._classes.items() if key in used}
        key = (rules.allowed, rules.denied)
        if key not in self._classes:
            self._last_class = self._classes[key] = self._last_class % 0xFFFFFFFF + 1
        return self._classes[key]

    def _exchange(self, held: Held, wanted: frozenset[ruleset.Element]) -> list[str]:
        """Account for one sandbox's new elements; give the commands for those nobody else has."""
        gone, new = held.elements - wanted, wanted - held.elements
        dropped = [one for one in gone if self._uses[one] == 1]
        added = [one for one in new if not self._uses[one]]
        self._uses.subtract(gone)
        self._uses.update(new)
        for one in dropped:
            del self._uses[one]
        held.elements = wanted
        return ruleset.change(self._table, dropped, added)

    def _run(self, commands: list[str]) -> None:
        try:
            self._firewall.run(commands)
        except NftError as error:
            log.warning("firewall differed, rebuilding it", extra=fields(error=str(error)))
            self.rebuild()


def _admitted(listing: Iterable[dict[str, Any]]) -> Iterable[tuple[str, str, float]]:
    for entry in listing:
        for element in entry.get("set", {}).get("elem", ()):
            details = element["elem"]
            ip, address = details["val"]["concat"]
            yield ip, address, float(details.get("expires", 0))
