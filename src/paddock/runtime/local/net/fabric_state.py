"""The state of the fabric, and the operations that apply it to the kernel; synchronous.

`fabric` runs the methods one at a time in one thread, so there are no locks. A sandbox is added in
the order record, firewall, links and removed in the opposite order, so that no link ever exists
without its rules.
"""

import errno
import logging
import os
import secrets
import socket
from collections.abc import Collection, Sequence
from ipaddress import IPv4Address, ip_address

from msgspec import structs

from paddock.kit.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from paddock.kit.logs import fields
from paddock.runtime.local.net import forwarding, links, shaping
from paddock.runtime.local.net.addresses import AddressPlan, AddressSlot
from paddock.runtime.local.net.dns.upstream import host_servers
from paddock.runtime.local.net.firewall_sync import FabricMember, FirewallSync
from paddock.runtime.local.net.netns import socket_in
from paddock.runtime.local.net.nft import Firewall, open_firewall
from paddock.runtime.local.net.policy import CLOSED, EgressRules, compile_policy
from paddock.runtime.local.net.records import NetworkRecord, NetworkRecords, is_uid
from paddock.runtime.local.net.rtnetlink import Channel, NetlinkError
from paddock.runtime.local.net.settings import UNLIMITED, Attachment, Bandwidth, FabricSettings
from paddock.runtime.port import EgressPolicy

log = logging.getLogger(__name__)

_MARKS_KEPT = 16
"""Flows without traffic during this many policy changes are dropped."""
_SO_RCVBUFFORCE = 33
_CLOSED = EgressPolicy(allow_internet=False)


class FabricState:
    """The members of one fabric and its kernel objects."""

    def __init__(self, settings: FabricSettings, netns_fd: int | None) -> None:
        self.settings = settings
        self.plan = AddressPlan(settings.subnet, settings.link_prefix)
        self._netns_fd = netns_fd
        self._records = NetworkRecords(settings.state_directory)
        self._locks: list[socket.socket] = []
        self._members: dict[str, FabricMember] = {}
        self._by_ip: dict[str, FabricMember] = {}
        self._slots: dict[int, str] = {}
        self._last_slot = secrets.randbelow(self.plan.capacity)
        self._mtu = 1500
        self.rates_unavailable_reason = ""
        """Why links have no limits of their rates."""
        self._has_ipv6 = os.path.exists("/proc/net/if_inet6")
        self._channel: Channel
        self._firewall: Firewall
        self._firewall_sync: FirewallSync

    # ── open and close ───────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """Set up the fabric; adopt what exists in the kernel."""
        try:
            self._acquire_locks()
            self._channel = Channel(self._netns_fd)
            self._firewall = open_firewall(self._netns_fd)
            self._firewall_sync = FirewallSync(
                self._firewall, self.plan, self.settings, self._by_ip
            )
            self._check_overlap()
            links.put_gateway(self._channel, self.plan.gateway, self.plan.subnet)
            self._adopt()
            self.refresh_uplinks()
            self._check_foreign_firewalls()
            self._check_rates()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EACCES):
                raise UnsupportedError(
                    f"the network of sandboxes cannot be set up here: {error}",
                    hint="run the node as root; a rootless sandbox has loopback only",
                ) from error
            if isinstance(error, OSError):
                raise UnavailableError(
                    f"the network of sandboxes cannot be set up: {error}"
                ) from error
            raise

    def close(self) -> None:
        """Close sockets and locks; links and rules stay in the kernel."""
        for name in ("_channel", "_firewall"):
            if hasattr(self, name):
                getattr(self, name).close()
        for lock in self._locks:
            lock.close()
        self._locks.clear()

    def purge(self) -> None:
        """Remove all links, rules, addresses and records."""
        present = links.list_links(self._channel)
        ours = [link.index for link in present if self.plan.slot_of_link(link.name) is not None]
        self._delete(ours)
        listing = self._firewall.query("list chains")
        forwarding.remove_from_docker(self._firewall, listing, self.plan.link_prefix)
        self._firewall_sync.destroy()
        links.remove_gateway(self._channel, self.plan.gateway, self.plan.subnet)
        for uid in list(self._members):
            self._forget(uid)

    def listeners(self) -> tuple[socket.socket, socket.socket]:
        """Bind the resolver's sockets on the gateway's address."""
        where = (str(self.plan.gateway), self.settings.dns_port)
        datagrams = socket_in(self._netns_fd, socket.AF_INET, socket.SOCK_DGRAM)
        listener = socket_in(self._netns_fd, socket.AF_INET, socket.SOCK_STREAM)
        try:
            # Buffer for many sandboxes with the maximum number of queries in flight.
            datagrams.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 8 << 20)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            for one in (datagrams, listener):
                one.setblocking(False)
                one.bind(where)
        except OSError as error:
            datagrams.close()
            listener.close()
            raise ConflictError(
                f"the resolver of sandboxes cannot listen on {where[0]}:{where[1]}: {error}",
                hint="choose another dns_port for this fabric",
            ) from error
        return datagrams, listener

    # ── sandboxes ────────────────────────────────────────────────────────────────────────────

    def reserve(self, uid: str, slot_number: int | None, policy: EgressPolicy | None) -> Attachment:
        """Assign an address to a sandbox; without rules (see `enforce`) and without a link."""
        if not is_uid(uid):
            raise InvalidError(f"{uid!r} is not a sandbox uid (letters, digits, `.`, `_`, `-`)")
        member = self._prepare(uid, self._members.get(uid), slot_number, policy)
        self._index(member)
        return self._attachment(member)

    def enforce(self, uid: str) -> None:
        """Save the record of a sandbox that has an address, and apply its rules."""
        member = self._members[uid]
        self._records.save(member.record)
        self._firewall_sync.put(member)
        member.is_reserved = True

    def attach(
        self,
        uid: str,
        netns_fd: int,
        slot_number: int | None,
        policy: EgressPolicy | None,
        bandwidth: Bandwidth = UNLIMITED,
    ) -> Attachment:
        """Attach a sandbox; idempotent, creates what is missing."""
        before = self._members.get(uid)
        if before is None or not before.is_reserved:
            self.reserve(uid, slot_number, policy)
        member = self._members[uid]
        try:
            if not member.is_reserved:
                self.enforce(uid)
            self._put_link(
                member, netns_fd, UNLIMITED if self.rates_unavailable_reason else bandwidth
            )
        except BaseException:
            if before is None:
                self._roll_back(member)
            raise
        member.is_reserved, member.is_attached = False, True
        return self._attachment(member)

    def set_policy(self, uid: str, policy: EgressPolicy) -> None:
        """Replace a policy; flows that it denies are reset at their next packet."""
        member = self._require(uid)
        rules = compile_policy(policy)
        if policy == member.record.policy:
            return
        marks = (*member.record.marks, _new_mark())[-_MARKS_KEPT:]
        record = structs.replace(member.record, policy=policy, marks=marks)
        self._records.save(record)
        member.record, member.rules = record, rules
        if member.elements:
            self._firewall_sync.put(member)

    def set_bandwidth(self, uid: str, pid: int, bandwidth: Bandwidth) -> None:
        """Change the rates of both ends of a link."""
        slot = self._require(uid).slot
        if self.rates_unavailable_reason:
            return
        shaping.set_rate(self._channel, slot.index, bandwidth.ingress)
        netns = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with Channel(netns) as inside:
                shaping.set_rate(inside, links.INNER_INDEX, bandwidth.egress)
        finally:
            os.close(netns)

    def begin_detach(self, uids: Collection[str]) -> list[int]:
        """Remove sandboxes from the firewall; return the indexes of the links to delete next."""
        detaching = [self._members[uid] for uid in uids if uid in self._members]
        for member in detaching:
            member.is_detaching = True
        self._firewall_sync.remove(detaching)
        return [member.slot.index for member in detaching]

    def finish_detach(self, uids: Collection[str], *, keep_address: bool) -> None:
        """Remove sandboxes whose links are deleted, or keep their records for a later `attach`."""
        for uid in uids:
            member = self._members.get(uid)
            if member is not None and keep_address:
                member.is_attached = member.is_reserved = member.is_detaching = False
            elif member is not None:
                self._forget(uid)

    def admit(self, ip: str, name: str, answers: Sequence[tuple[IPv4Address, int]]) -> None:
        """Admit the resolved addresses of a name; called before the answer is sent."""
        member = self._by_ip.get(ip)
        if member is None or member.is_detaching or not member.rules.resolves(name):
            return
        self._firewall_sync.admit(member, name, answers)

    # ── read ─────────────────────────────────────────────────────────────────────────────────

    def uids(self) -> tuple[str, ...]:
        """Return the uids of all members."""
        return tuple(self._members)

    def rules_of(self, ip: str) -> EgressRules | None:
        """Return the rules of an address, or `None`; for the resolver."""
        member = self._by_ip.get(ip)
        return None if member is None or member.is_detaching else member.rules

    def inspect(self, uid: str) -> Attachment | None:
        """Return the attachment of a sandbox, or `None`."""
        member = self._members.get(uid)
        return None if member is None or not member.is_attached else self._attachment(member)

    def stray_links(self) -> list[int]:
        """Return the indexes of fabric links that belong to no member."""
        taken = {member.slot.index for member in self._members.values()}
        present = links.list_links(self._channel)
        ours = (link for link in present if self.plan.slot_of_link(link.name) is not None)
        return [link.index for link in ours if link.index not in taken]

    def refresh_uplinks(self) -> None:
        """Find the uplinks and enable forwarding on them, for replies."""
        present = links.list_links(self._channel)
        found = forwarding.uplinks(
            present,
            links.list_routes(self._channel),
            configured=self.settings.uplinks,
            prefix=self.plan.link_prefix,
        )
        names = [link.name for link in found]
        switched = forwarding.enable_forwarding(names, self._netns_fd)
        if switched:
            log.info("forwarding enabled on uplinks", extra=fields(links=",".join(switched)))
        self._mtu = self.settings.mtu or min([link.mtu for link in found] or [1500])

    # ── internals ────────────────────────────────────────────────────────────────────────────

    def _acquire_locks(self) -> None:
        # Abstract unix socket names are per network namespace, like the links they protect, and
        # are released with their process.
        for name in (f"link {self.settings.link_prefix}", f"table {self.settings.table}"):
            lock = socket_in(self._netns_fd, socket.AF_UNIX, socket.SOCK_DGRAM)
            self._locks.append(lock)
            try:
                lock.bind(f"\0paddock fabric {name}")
            except OSError as error:
                raise ConflictError(
                    f"another node on this machine runs the network of sandboxes ({name})",
                    hint="stop it, or configure another subnet and other names for this node",
                ) from error

    def _check_overlap(self) -> None:
        subnet = self.plan.subnet
        taken = {
            str(route.destination)
            for route in links.list_routes(self._channel)
            if route.destination.prefixlen and not route.is_ours
            if route.destination.overlaps(subnet)
        }
        taken |= {
            str(network)
            for _, network in links.list_addresses(self._channel)
            if network.overlaps(subnet) and network.network_address != self.plan.gateway
        }
        # Name servers behind the default route are in neither routes nor addresses.
        taken |= {
            f"name server {server}"
            for server in host_servers(self.settings.resolv_conf)
            if ip_address(server) in subnet and ip_address(server) != self.plan.gateway
        }
        if taken:
            raise ConflictError(
                f"the subnet {subnet} overlaps {', '.join(sorted(taken))} of this machine",
                hint="choose another private range as the fabric's subnet",
            )

    def _adopt(self) -> None:
        records, broken = self._records.load()
        for name in broken:
            log.warning("network record is unreadable, renamed to .broken", extra=fields(file=name))
        by_slot = {record.slot: record for record in records.values()}
        strays: list[int] = []
        for link in links.list_links(self._channel):
            slot = self.plan.slot_of_link(link.name)
            if slot is None:
                continue
            record = by_slot.pop(slot.number, None)
            if record is None and not is_uid(link.alias):
                strays.append(link.index)
                continue
            if record is None:  # Its record is lost: no egress until a policy is set.
                record = NetworkRecord(
                    uid=link.alias, slot=slot.number, policy=_CLOSED, marks=(_new_mark(),)
                )
                self._records.save(record)
                log.warning(
                    "sandbox has no network record, egress is closed", extra=fields(uid=record.uid)
                )
            self._load_member(record, slot).is_attached = True
        for record in by_slot.values():
            if record.slot < self.plan.capacity:
                self._load_member(record, self.plan.slot(record.slot))
            else:  # Not attached, and from a larger range than the current one.
                self._records.forget(record.uid)
        self._delete(strays)
        self._firewall_sync.rebuild()

    def _load_member(self, record: NetworkRecord, slot: AddressSlot) -> FabricMember:
        try:
            rules = compile_policy(record.policy)
        except InvalidError as error:  # Written by a version that allowed more: fail closed.
            log.warning(
                "stored policy is no longer valid, egress is closed",
                extra=fields(uid=record.uid, error=str(error)),
            )
            rules = CLOSED
        member = FabricMember(record, slot, rules)
        self._index(member)
        return member

    def _index(self, member: FabricMember) -> None:
        self._members[member.record.uid] = member
        self._by_ip[member.ip] = member
        self._slots[member.slot.number] = member.record.uid

    def _check_foreign_firewalls(self) -> None:
        listing = self._firewall.query("list chains")
        passes = forwarding.allow_in_docker(self._firewall, listing, self.plan.link_prefix)
        for chain in forwarding.foreign_drop_chains(listing, self.settings.table):
            if not (passes and chain.hook == "forward" and chain.table == "filter"):
                log.warning(
                    "another firewall may drop packets of sandboxes: add rules that accept them",
                    extra=fields(chain=chain, accept=f"{self.plan.link_prefix}* in and out"),
                )

    def _prepare(
        self,
        uid: str,
        member: FabricMember | None,
        slot_number: int | None,
        policy: EgressPolicy | None,
    ) -> FabricMember:
        if member is not None and member.is_detaching:
            raise ConflictError(f"sandbox {uid} is being detached from the network")
        if member is not None:
            if slot_number not in (None, member.slot.number):
                raise ConflictError(f"sandbox {uid} has slot {member.slot.number} already")
            if policy is not None and policy != member.record.policy:
                self.set_policy(uid, policy)
            if not member.is_attached:  # A restored sandbox has no flows of before.
                member.record = structs.replace(member.record, marks=(_new_mark(),))
            return member
        wanted = policy if policy is not None else EgressPolicy()
        rules = compile_policy(wanted)
        if slot_number is None:
            slot = self.plan.free_slot(self._slots, self._last_slot)
            self._last_slot = slot.number
        elif slot_number in self._slots:
            owner = self._slots[slot_number]
            raise ConflictError(f"slot {slot_number} belongs to sandbox {owner}")
        else:
            slot = self.plan.slot(slot_number)
        record = NetworkRecord(uid=uid, slot=slot.number, policy=wanted, marks=(_new_mark(),))
        return FabricMember(record, slot, rules)

    def _put_link(self, member: FabricMember, netns_fd: int, bandwidth: Bandwidth) -> None:
        slot = member.slot
        with Channel(netns_fd) as inside:
            try:
                links.create_pair(self._channel, slot, netns_fd, mtu=self._mtu)
            except NetlinkError as error:
                if error.errno != errno.EEXIST:
                    raise
                if not _is_paired(inside, slot):
                    # Left over from a crash: its inner end is in another namespace.
                    self._delete([slot.index])
                    links.create_pair(self._channel, slot, netns_fd, mtu=self._mtu)
            links.configure_outer(
                self._channel,
                slot,
                uid=member.record.uid,
                gateway=self.plan.gateway,
                has_ipv6=self._has_ipv6,
                bits_per_second=bandwidth.ingress,
            )
            links.configure_inner(
                inside,
                slot,
                gateway=self.plan.gateway,
                has_ipv6=self._has_ipv6,
                bits_per_second=bandwidth.egress,
            )
            links.wait_running(self._channel, slot)

    def _check_rates(self) -> None:
        self.rates_unavailable_reason = shaping.unavailable_reason()
        if self.rates_unavailable_reason:
            reason = self.rates_unavailable_reason
            log.warning("bandwidth of sandboxes is not limited", extra=fields(reason=reason))

    def _roll_back(self, member: FabricMember) -> None:
        uid = member.record.uid
        self._delete(self.begin_detach([uid]))
        self._forget(uid)

    def _delete(self, indexes: list[int]) -> None:
        links.delete_links(self._channel, indexes, group=self.plan.group)

    def _forget(self, uid: str) -> None:
        member = self._members.pop(uid)
        self._by_ip.pop(member.ip, None)
        self._slots.pop(member.slot.number, None)
        self._records.forget(uid)

    def _require(self, uid: str) -> FabricMember:
        member = self._members.get(uid)
        if member is None or member.is_detaching:
            raise NotFoundError(f"sandbox {uid} is not attached to the network")
        return member

    def _attachment(self, member: FabricMember) -> Attachment:
        return Attachment(
            uid=member.record.uid,
            slot=member.slot.number,
            ip=member.ip,
            gateway=str(self.plan.gateway),
            link=member.slot.link,
            interface=links.INNER_NAME,
            mac=member.slot.mac.hex(":"),
            mtu=self._mtu,
        )


def _new_mark() -> int:
    return secrets.randbelow(0xFFFFFFFF) + 1


def _is_paired(inside: Channel, slot: AddressSlot) -> bool:
    return any(
        link.index == links.INNER_INDEX and link.peer_index == slot.index
        for link in links.list_links(inside)
    )
