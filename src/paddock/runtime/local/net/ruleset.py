"""The firewall as nftables text: one table, and the set elements of each sandbox. Pure functions.

The table coexists with the other tables of the machine and filters only packets of the fabric's
links. Its sets are hash tables keyed by the sandbox's address, so the cost of a packet does not
grow with the number of sandboxes. Networks need interval sets, whose updates get slower with their
size; so networks are keyed by a class number, and sandboxes with the same networks share a class.
The class is in the packet's mark while a new flow is evaluated, and is cleared afterwards.

A flow is evaluated when it is new. Its conntrack mark then records the version of the sandbox's
policy, so that later packets need one lookup. A change of policy assigns a new mark: the next
packet of every flow, in either direction, is evaluated again, and denied flows are reset. The marks
of a sandbox are kept in `known`, so packets for a former owner of the address are dropped.
"""

import hashlib
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, collapse_addresses

from msgspec import Struct

from paddock.runtime.local.net.addresses import AddressPlan, AddressSlot
from paddock.runtime.local.net.policy import LINK_LOCAL, NEVER, PRIVATE, EgressRules

Element = tuple[str, str]
"""The name of a set and one of its elements, as text."""

REBUILT = (
    "members",
    "current",
    "known",
    "policy_mark",
    "class",
    "open",
    "insiders",
    "allowed",
    "denied",
)
"""Sets that `rebuild` fills. `resolved`, `flows` and `queries` are filled at run time."""
_MAPS = frozenset({"policy_mark", "class"})


class RulesetSettings(Struct, frozen=True, kw_only=True):
    """Parameters of the table's text."""

    table: str
    dns_port: int
    max_flows: int
    """Maximum connections of a sandbox: the machine's conntrack table is shared."""
    max_queries_per_second: int
    host_ports: tuple[int, ...] = ()
    """TCP ports of this machine that sandboxes may reach on the gateway's address."""
    private_networks: tuple[IPv4Network, ...] = ()
    """Private networks that every sandbox may reach."""


def fingerprint(plan: AddressPlan, settings: RulesetSettings) -> str:
    """Return the name of a marker chain that identifies this version of the table."""
    text = "\n".join(_body(plan, settings))
    return f"made_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def create_table(plan: AddressPlan, settings: RulesetSettings) -> list[str]:
    """Return the commands that replace the table."""
    name = f"inet {settings.table}"
    body = [*_body(plan, settings), f"chain {fingerprint(plan, settings)} {{ }}"]
    return [f"add table {name}", f"delete table {name}", f"table {name} {{", *body, "}"]


def elements_of(
    slot: AddressSlot, rules: EgressRules, marks: Sequence[int], class_number: int
) -> frozenset[Element]:
    """Return the elements of one attached sandbox; those of its class may be shared."""
    ip = str(slot.ip)
    found: set[Element] = {
        ("members", f'"{slot.link}" . {ip}'),
        ("current", f"{ip} . {marks[-1]:#x}"),
        ("policy_mark", f"{ip} : {marks[-1]:#x}"),
    }
    found.update(("known", f"{ip} . {mark:#x}") for mark in marks)
    if rules.allowed or rules.denied:
        found.add(("class", f"{ip} : {class_number:#x}"))
    found.update(("allowed", f"{class_number:#x} . {network}") for network in rules.allowed)
    found.update(("denied", f"{class_number:#x} . {network}") for network in rules.denied)
    if rules.is_open:
        found.add(("open", ip))
    if rules.reaches_private:
        found.add(("insiders", ip))
    return frozenset(found)


def change(table: str, gone: Iterable[Element], new: Iterable[Element]) -> list[str]:
    """Return the commands that delete and add elements."""
    return [*_elements("delete", table, gone), *_elements("add", table, new)]


def rebuild(table: str, elements: Iterable[Element]) -> list[str]:
    """Return the commands that replace the content of the sets."""
    flush = [f"flush {'map' if one in _MAPS else 'set'} inet {table} {one}" for one in REBUILT]
    return [*flush, *_elements("add", table, elements)]


def admit(table: str, ip: str, answers: Iterable[tuple[str, int]]) -> list[str]:
    """Return the commands that admit addresses for some seconds; timeouts are restarted."""
    commands: list[str] = []
    for address, seconds in answers:
        element = f"element inet {table} resolved {{ {ip} . {address}"
        # `add` alone keeps an old timeout; `delete` alone fails if the element is missing.
        commands += [
            f"add {element} timeout {seconds}s }}",
            f"delete {element} }}",
            f"add {element} timeout {seconds}s }}",
        ]
    return commands


def revoke(table: str, ip: str, addresses: Iterable[str]) -> list[str]:
    """Return the commands that revoke admitted addresses, expired or not."""
    commands: list[str] = []
    for address in addresses:
        element = f"element inet {table} resolved {{ {ip} . {address}"
        commands += [f"add {element} timeout 1s }}", f"delete {element} }}"]
    return commands


def _elements(verb: str, table: str, elements: Iterable[Element]) -> list[str]:
    grouped: dict[str, list[str]] = {}
    for name, value in sorted(elements):
        grouped.setdefault(name, []).append(value)
    return [
        f"{verb} element inet {table} {name} {{ {', '.join(values)} }}"
        for name, values in grouped.items()
    ]


def _constants(name: str, kind: str, elements: Iterable[str]) -> str:
    """Return a set whose elements do not change while the table exists."""
    listed = ", ".join(elements)
    filled = f" elements = {{ {listed} }};" if listed else ""
    return f"set {name} {{ type {kind};{filled} }}"


def _body(plan: AddressPlan, settings: RulesetSettings) -> list[str]:
    ours = f'"{plan.link_prefix}*"'
    gateway = plan.gateway
    rate = settings.max_queries_per_second
    limit = f"{rate}/second burst {rate} packets"
    ports = f"{{ 53, {settings.dns_port} }}"
    to_resolver = (
        f"meta l4proto {{ tcp, udp }} th dport 53 dnat ip to {gateway}:{settings.dns_port}"
    )
    asking = f"ip daddr {gateway} meta l4proto {{ tcp, udp }} th dport {settings.dns_port}"
    never = ", ".join(str(one) for one in (*NEVER, plan.subnet) if one.version == 4)
    private = ", ".join(str(one) for one in PRIVATE)
    service = f"ip daddr {gateway} tcp dport @host_ports"
    opened = collapse_addresses(settings.private_networks)
    remember = "ct mark set ip {side} map @policy_mark accept"
    return [
        "set members { type ifname . ipv4_addr; }",
        "set current { type ipv4_addr . mark; }",
        "set known { type ipv4_addr . mark; }",
        "map policy_mark { type ipv4_addr : mark; }",
        "set open { type ipv4_addr; }",
        "set insiders { type ipv4_addr; }",
        "map class { type ipv4_addr : mark; }",
        "set allowed { type mark . ipv4_addr; flags interval; }",
        "set denied { type mark . ipv4_addr; flags interval; }",
        "set resolved { type ipv4_addr . ipv4_addr; flags timeout; }",
        "set flows { type ipv4_addr; size 65536; flags dynamic; }",
        "set queries { type ipv4_addr; size 65536; flags dynamic,timeout; timeout 10s; }",
        f"set never {{ type ipv4_addr; flags interval; elements = {{ {never} }}; }}",
        f"set private {{ type ipv4_addr; flags interval; elements = {{ {private} }}; }}",
        _constants("host_ports", "inet_service", map(str, sorted(settings.host_ports))),
        _constants("sites", "ipv4_addr; flags interval", map(str, opened)),
        # A reset ends connections that were allowed before. Unlike ICMP errors, resets are not
        # rate-limited by the kernel.
        "chain refuse {",
        "  meta l4proto tcp reject with tcp reset",
        "  ip protocol != tcp reject with icmp type admin-prohibited",
        "  drop",
        "}",
        # Before connection tracking: spoofed packets create no state.
        "chain arrive { type filter hook prerouting priority raw; policy accept;",
        f"  iifname {ours} meta nfproto != ipv4 drop",
        f"  iifname {ours} iifname . ip saddr != @members drop",
        f'  iifname != {ours} iifname != "lo" ip saddr {plan.subnet} drop',
        "}",
        # Before any DNAT: a published port of this machine counts as this machine.
        "chain screen { type filter hook prerouting priority mangle; policy accept;",
        f"  iifname {ours} ct state new jump newcomer",
        "}",
        "chain newcomer {",
        f"  add @flows {{ ip saddr ct count over {settings.max_flows} }} drop",
        f"  ip daddr {gateway} meta l4proto {{ tcp, udp }} th dport {ports} return",
        f"  {service} goto service",
        "  fib daddr type { local, broadcast, anycast, multicast } goto refuse",
        "}",
        # A service of this machine. The mark lets the flow pass if DNAT forwards it to a container.
        "chain service {",
        "  ip saddr . ct mark @current accept",
        "  meta mark set ip saddr map @class",
        f"  meta mark . ip daddr @allowed meta mark set 0 {remember.format(side='saddr')}",
        f"  ip saddr . ip daddr @resolved meta mark set 0 {remember.format(side='saddr')}",
        "  meta mark . ip daddr @denied goto refuse",
        "  meta mark set 0",
        f"  ip saddr @open {remember.format(side='saddr')}",
        "  goto refuse",
        "}",
        "chain names { type nat hook prerouting priority dstnat; policy accept;",
        f"  iifname != {ours} accept",
        f"  ip daddr {gateway} {to_resolver}",
        "  ip saddr @open accept",
        "  meta l4proto != { tcp, udp } accept",
        "  th dport != 53 accept",
        "  meta mark set ip saddr map @class",
        "  meta mark . ip daddr @allowed meta mark set 0 accept",
        "  meta mark set 0",
        # Queries of a closed sandbox to other resolvers are redirected to ours.
        f"  {to_resolver}",
        "}",
        "chain local { type filter hook input priority filter - 10; policy accept;",
        f"  iifname != {ours} accept",
        "  meta nfproto != ipv4 drop",
        # Every packet counts, also those of established flows: the resolver is shared.
        f"  {asking} add @queries {{ ip saddr limit rate over {limit} }} drop",
        f"  {asking} accept",
        # Every packet, so that a change of policy ends established flows.
        f"  ct direction original {service} goto service",
        "  ct state established,related accept",
        "  goto refuse",
        "}",
        "chain pass { type filter hook forward priority filter - 10; policy accept;",
        f"  iifname {ours} goto leave",
        f"  oifname {ours} goto enter",
        "}",
        "chain leave {",
        f"  oifname {ours} goto refuse",
        "  meta nfproto != ipv4 drop",
        "  ct state invalid drop",
        "  ip saddr . ct mark @current accept",
        "  ip daddr @never goto refuse",
        "  ip daddr @private ip daddr != @sites ip saddr != @insiders goto refuse",
        "  meta mark set ip saddr map @class",
        f"  meta mark . ip daddr @allowed meta mark set 0 {remember.format(side='saddr')}",
        f"  ip daddr {LINK_LOCAL} goto refuse",
        f"  ip saddr . ip daddr @resolved meta mark set 0 {remember.format(side='saddr')}",
        "  meta mark . ip daddr @denied goto refuse",
        "  meta mark set 0",
        f"  ip saddr @open {remember.format(side='saddr')}",
        "  goto refuse",
        "}",
        # The same evaluation for replies: else one-way streams would survive a policy change.
        "chain enter {",
        "  meta nfproto != ipv4 drop",
        "  ct state != { established, related } drop",
        "  ip daddr . ct mark @current accept",
        "  ip daddr . ct mark != @known drop",
        "  ip saddr @never drop",
        "  ip saddr @private ip saddr != @sites ip daddr != @insiders drop",
        "  meta mark set ip daddr map @class",
        f"  meta mark . ip saddr @allowed meta mark set 0 {remember.format(side='daddr')}",
        f"  ip saddr {LINK_LOCAL} drop",
        f"  ip daddr . ip saddr @resolved meta mark set 0 {remember.format(side='daddr')}",
        "  meta mark . ip saddr @denied drop",
        "  meta mark set 0",
        f"  ip daddr @open {remember.format(side='daddr')}",
        "  drop",
        "}",
        "chain translate { type nat hook postrouting priority srcnat; policy accept;",
        f'  ip saddr {plan.subnet} oifname != {ours} oifname != "lo" masquerade',
        "}",
    ]
