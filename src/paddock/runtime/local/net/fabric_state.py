"""The fabric without an event loop: what is attached, and how that is made true in the kernel.

Every method runs to its end in one thread, one at a time (`fabric` sees to that), so there are no
locks. Memory, records and kernel are changed in this order: record, firewall, links; and back in
the opposite order, so that no link ever exists without its rules.
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
from paddock.runtime.local.net import forwarding, links
from paddock.runtime.local.net.addresses import AddressPlan, Slot
from paddock.runtime.local.net.dns.upstream import host_servers
from paddock.runtime.local.net.firewall_sync import Held, Wall
from paddock.runtime.local.net.netns import socket_in
from paddock.runtime.local.net.nft import Firewall, open_firewall
from paddock.runtime.local.net.policy import CLOSED, EgressRules, compile_policy
from paddock.runtime.local.net.records import Record, Records, is_uid
from paddock.runtime.local.net.rtnetlink import Channel, NetlinkError
from paddock.runtime.local.net.settings import Attachment, FabricSettings
from paddock.runtime.port import EgressPolicy

log = logging.getLogger(__name__)

_MARKS_KEPT = 16
"""Flows that were silent over this many changes of policy are cut."""
_SO_RCVBUFFORCE = 33
_CLOSED = EgressPolicy(allow_internet=False)


class Core:
    """The state of one fabric."""

    def __init__(self, settings: FabricSettings, netns_fd: int | None) -> None:
        self.settings = settings
        self.plan = AddressPlan(settings.subnet, settings.link_prefix)
        self._netns_fd = netns_fd
        self._records = Records(settings.state_directory)
        self._locks: list[socket.socket] = []
        self._held: dict[str, Held] = {}
        self._by_ip: dict[str, Held] = {}
        self._slots: dict[int, str] = {}
        self._last_slot = secrets.randbelow(self.plan.capacity)
        self._mtu = 1500
        self._has_ipv6 = os.path.exists("/proc/net/if_inet6")
        self._channel: Channel
        self._firewall: Firewall
        self._wall: Wall

    # ── opening and closing ──────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """Take the fabric over from whoever had it, making what is missing."""
        try:
            self._take_locks()
            self._channel = Channel(self._netns_fd)
            self._firewall = open_firewall(self._netns_fd)
            self._wall = Wall(self._firewall, self.plan, self.settings, self._by_ip)
            self._refuse_overlap()
            links.put_gateway(self._channel, self.plan.gateway, self.plan.subnet)
            self._adopt()
            self.refresh_uplinks()
            self._meet_neighbours()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EACCES):
                raise UnsupportedError(
                    f"sandboxes cannot have a network here: {error}",
                    hint="run the node as root; a rootless sandbox has loopback only",
                ) from error
            if isinstance(error, OSError):
                raise UnavailableError(f"sandboxes cannot have a network: {error}") from error
            raise

    def close(self) -> None:
        """Let go of everything in this process; the kernel keeps the network as it is."""
        for name in ("_channel", "_firewall"):
            if hasattr(self, name):
                getattr(self, name).close()
        for lock in self._locks:
            lock.close()
        self._locks.clear()

    def purge(self) -> None:
        """Remove every trace: links, rules, addresses, records."""
        present = links.list_links(self._channel)
        ours = [link.index for link in present if self.plan.slot_of_link(link.name) is not None]
        self._delete(ours)
        listing = self._firewall.query("list chains")
        forwarding.leave_docker(self._firewall, listing, self.plan.link_prefix)
        self._wall.destroy()
        links.remove_gateway(self._channel, self.plan.gateway, self.plan.subnet)
        for uid in list(self._held):
            self._drop(uid)

    def listeners(self) -> tuple[socket.socket, socket.socket]:
        """Bind the resolver's sockets on the gateway's address."""
        where = (str(self.plan.gateway), self.settings.dns_port)
        datagrams = socket_in(self._netns_fd, socket.AF_INET, socket.SOCK_DGRAM)
        listener = socket_in(self._netns_fd, socket.AF_INET, socket.SOCK_STREAM)
        try:
            # Room for many sandboxes that ask all they may at once, so that none drowns another.
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

    def choose(self, uid: str, slot_number: int | None, policy: EgressPolicy | None) -> Attachment:
        """Choose a sandbox's address; nothing is in force yet (`enforce`), and it has no link."""
        if not is_uid(uid):
            raise InvalidError(f"{uid!r} is not a sandbox uid (letters, digits, `.`, `_`, `-`)")
        held = self._prepare(uid, self._held.get(uid), slot_number, policy)
        self._keep(held)
        return self._attachment(held)

    def enforce(self, uid: str) -> None:
        """Write a sandbox with an address down, and put its rules in force."""
        held = self._held[uid]
        self._records.save(held.record)
        self._wall.put(held)
        held.is_reserved = True

    def attach(
        self, uid: str, netns_fd: int, slot_number: int | None, policy: EgressPolicy | None
    ) -> Attachment:
        """Give a sandbox its address; repeating mends what is missing."""
        before = self._held.get(uid)
        if before is None or not before.is_reserved:
            self.choose(uid, slot_number, policy)
        held = self._held[uid]
        try:
            if not held.is_reserved:
                self.enforce(uid)
            self._put_link(held, netns_fd)
        except BaseException:
            if before is None:
                self._undo(held)
            raise
        held.is_reserved, held.is_attached = False, True
        return self._attachment(held)

    def set_policy(self, uid: str, policy: EgressPolicy) -> None:
        """Replace a policy; flows it denies end with their next packet."""
        held = self._require(uid)
        rules = compile_policy(policy)
        if policy == held.record.policy:
            return
        marks = (*held.record.marks, _new_mark())[-_MARKS_KEPT:]
        record = structs.replace(held.record, policy=policy, marks=marks)
        self._records.save(record)
        held.record, held.rules = record, rules
        if held.elements:
            self._wall.put(held)

    def begin_detach(self, uids: Collection[str]) -> list[int]:
        """Take sandboxes out of the firewall; give the links that are then to be deleted."""
        leaving = [self._held[uid] for uid in uids if uid in self._held]
        for held in leaving:
            held.is_leaving = True
        self._wall.remove(leaving)
        return [held.slot.index for held in leaving]

    def finish_detach(self, uids: Collection[str], *, keep_address: bool) -> None:
        """Forget sandboxes whose links are gone, or keep their records for a later life."""
        for uid in uids:
            held = self._held.get(uid)
            if held is not None and keep_address:
                held.is_attached = held.is_reserved = held.is_leaving = False
            elif held is not None:
                self._drop(uid)

    def admit(self, ip: str, name: str, answers: Sequence[tuple[IPv4Address, int]]) -> None:
        """Let a sandbox reach what a name resolved to, before it learns the answer."""
        held = self._by_ip.get(ip)
        if held is None or held.is_leaving or not held.rules.resolves(name):
            return
        self._wall.admit(held, name, answers)

    # ── what is ──────────────────────────────────────────────────────────────────────────────

    def uids(self) -> tuple[str, ...]:
        """Give every sandbox the fabric remembers."""
        return tuple(self._held)

    def rules_of(self, ip: str) -> EgressRules | None:
        """Give the rules of an address, for the resolver."""
        held = self._by_ip.get(ip)
        return None if held is None or held.is_leaving else held.rules

    def inspect(self, uid: str) -> Attachment | None:
        """Give a sandbox's place, where it has one."""
        held = self._held.get(uid)
        return None if held is None or not held.is_attached else self._attachment(held)

    def stray_links(self) -> list[int]:
        """Find links of ours that belong to no sandbox we remember."""
        taken = {held.slot.index for held in self._held.values()}
        present = links.list_links(self._channel)
        ours = (link for link in present if self.plan.slot_of_link(link.name) is not None)
        return [link.index for link in ours if link.index not in taken]

    def refresh_uplinks(self) -> None:
        """Find the links that lead out and let replies in by them."""
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
            log.info("forwarding switched on", extra=fields(links=",".join(switched)))
        self._mtu = self.settings.mtu or min([link.mtu for link in found] or [1500])

    # ── parts ────────────────────────────────────────────────────────────────────────────────

    def _take_locks(self) -> None:
        # Abstract unix names belong to a network namespace, exactly like what they guard here,
        # and vanish with their process.
        for name in (f"link {self.settings.link_prefix}", f"table {self.settings.table}"):
            lock = socket_in(self._netns_fd, socket.AF_UNIX, socket.SOCK_DGRAM)
            self._locks.append(lock)
            try:
                lock.bind(f"\0paddock fabric {name}")
            except OSError as error:
                raise ConflictError(
                    f"another node of this machine runs the network of sandboxes ({name})",
                    hint="stop it, or give this one other names and another subnet",
                ) from error

    def _refuse_overlap(self) -> None:
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
        # They may lie behind the default route, where nothing else tells of them.
        taken |= {
            f"name server {server}"
            for server in host_servers(self.settings.resolv_conf)
            if ip_address(server) in subnet and ip_address(server) != self.plan.gateway
        }
        if taken:
            raise ConflictError(
                f"{subnet} for sandboxes overlaps {', '.join(sorted(taken))} of this machine",
                hint="choose another private range as the fabric's subnet",
            )

    def _adopt(self) -> None:
        records, broken = self._records.load()
        for name in broken:
            log.warning("network record unreadable, put aside", extra=fields(file=name))
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
            if record is None:  # Its record is lost: closed until somebody says otherwise.
                record = Record(
                    uid=link.alias, slot=slot.number, policy=_CLOSED, marks=(_new_mark(),)
                )
                self._records.save(record)
                log.warning("sandbox without a network record", extra=fields(uid=record.uid))
            self._remember(record, slot).is_attached = True
        for record in by_slot.values():
            if record.slot < self.plan.capacity:
                self._remember(record, self.plan.slot(record.slot))
            else:  # From a larger range than the one we are given now, and not attached.
                self._records.forget(record.uid)
        self._delete(strays)
        self._wall.rebuild()

    def _remember(self, record: Record, slot: Slot) -> Held:
        try:
            rules = compile_policy(record.policy)
        except InvalidError as error:  # Written when more was allowed: closed is always right.
            log.warning("policy no longer valid", extra=fields(uid=record.uid, error=str(error)))
            rules = CLOSED
        held = Held(record, slot, rules)
        self._keep(held)
        return held

    def _keep(self, held: Held) -> None:
        self._held[held.record.uid] = held
        self._by_ip[held.ip] = held
        self._slots[held.slot.number] = held.record.uid

    def _meet_neighbours(self) -> None:
        listing = self._firewall.query("list chains")
        passes = forwarding.pass_docker(self._firewall, listing, self.plan.link_prefix)
        for obstacle in forwarding.obstacles(listing, self.settings.table):
            if not (passes and obstacle.hook == "forward" and obstacle.table == "filter"):
                log.warning(
                    "another firewall drops packets of sandboxes unless it is told to accept them",
                    extra=fields(chain=obstacle, accept=f"{self.plan.link_prefix}* in and out"),
                )

    def _prepare(
        self, uid: str, held: Held | None, slot_number: int | None, policy: EgressPolicy | None
    ) -> Held:
        if held is not None and held.is_leaving:
            raise ConflictError(f"sandbox {uid} is just leaving the network")
        if held is not None:
            if slot_number not in (None, held.slot.number):
                raise ConflictError(f"sandbox {uid} has slot {held.slot.number} already")
            if policy is not None and policy != held.record.policy:
                self.set_policy(uid, policy)
            if not held.is_attached:  # A new life at the same address has no old flows.
                held.record = structs.replace(held.record, marks=(_new_mark(),))
            return held
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
        record = Record(uid=uid, slot=slot.number, policy=wanted, marks=(_new_mark(),))
        return Held(record, slot, rules)

    def _put_link(self, held: Held, netns_fd: int) -> None:
        slot = held.slot
        with Channel(netns_fd) as inside:
            try:
                links.create_pair(self._channel, slot, netns_fd, mtu=self._mtu)
            except NetlinkError as error:
                if error.errno != errno.EEXIST:
                    raise
                if not _is_paired(inside, slot):
                    # Left over from a life that ended badly: its other end is somewhere else.
                    self._delete([slot.index])
                    links.create_pair(self._channel, slot, netns_fd, mtu=self._mtu)
            links.configure_outer(
                self._channel,
                slot,
                uid=held.record.uid,
                gateway=self.plan.gateway,
                has_ipv6=self._has_ipv6,
            )
            links.configure_inner(inside, slot, gateway=self.plan.gateway, has_ipv6=self._has_ipv6)
            links.settle(self._channel, slot)

    def _undo(self, held: Held) -> None:
        uid = held.record.uid
        self._delete(self.begin_detach([uid]))
        self._drop(uid)

    def _delete(self, indexes: list[int]) -> None:
        links.delete_links(self._channel, indexes, group=self.plan.group)

    def _drop(self, uid: str) -> None:
        held = self._held.pop(uid)
        self._by_ip.pop(held.ip, None)
        self._slots.pop(held.slot.number, None)
        self._records.forget(uid)

    def _require(self, uid: str) -> Held:
        held = self._held.get(uid)
        if held is None or held.is_leaving:
            raise NotFoundError(f"sandbox {uid} is not in the network")
        return held

    def _attachment(self, held: Held) -> Attachment:
        return Attachment(
            uid=held.record.uid,
            slot=held.slot.number,
            ip=held.ip,
            gateway=str(self.plan.gateway),
            link=held.slot.link,
            interface=links.INNER_NAME,
            mac=held.slot.mac.hex(":"),
            mtu=self._mtu,
        )


def _new_mark() -> int:
    return secrets.randbelow(0xFFFFFFFF) + 1


def _is_paired(inside: Channel, slot: Slot) -> bool:
    return any(
        link.index == links.INNER_INDEX and link.peer_index == slot.index
        for link in links.list_links(inside)
    )
