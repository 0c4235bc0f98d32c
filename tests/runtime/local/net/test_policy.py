"""Compilation and validation of policies, against an independent model."""

from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.kit.errors import InvalidError
from paddock.runtime.local.net.policy import (
    LINK_LOCAL,
    NEVER,
    PRIVATE,
    EgressRules,
    compile_policy,
    is_admissible,
)
from paddock.runtime.port import EgressPolicy

pytestmark = pytest.mark.timeout(120)


def problems(policy: EgressPolicy, root: str = "") -> dict[str, str]:
    with pytest.raises(InvalidError) as caught:
        compile_policy(policy, root=root)
    return {problem.path: problem.message for problem in caught.value.problems}


def allows(rules: EgressRules, address: IPv4Address) -> bool:
    """Evaluate an address in the order of the firewall's chain."""
    if any(address in network for network in NEVER):
        return False
    if any(address in network for network in PRIVATE) and not rules.reaches_private:
        return False
    if any(address in network for network in rules.allowed):
        return True
    if address in LINK_LOCAL or any(address in network for network in rules.denied):
        return False
    return rules.is_open


def test_the_default_policy_allows_the_internet():
    assert compile_policy(EgressPolicy()) == EgressRules(is_open=True)


@pytest.mark.parametrize(
    "policy",
    [EgressPolicy(allow_internet=False), EgressPolicy(deny_out=("0.0.0.0/0", "::/0", "1.2.3.4"))],
)
def test_denying_everything_equals_no_internet(policy: EgressPolicy):
    assert compile_policy(policy) == EgressRules(is_open=False)


def test_adjacent_networks_are_merged():
    assert not compile_policy(EgressPolicy(deny_out=("0.0.0.0/1", "128.0.0.0/1"))).is_open
    opened = EgressPolicy(allow_internet=False, allow_out=("0.0.0.0/1", "128.0.0.0/1"))
    assert compile_policy(opened) == EgressRules(is_open=True)


def test_all_invalid_fields_are_reported_together():
    policy = EgressPolicy(
        allow_out=("1.2.3.4", "10.0.0.1/8", "exa mple.com", "2001:db8::/32", "1.2.3.4:443"),
        deny_out=("example.com", "300.1.1.1", "1.2.3.0/33", ""),
        dns_servers=("8.8.8.8", "one.one", "127.0.0.1", "10.0.0.1", "::ffff:127.0.0.1", "fe80::1"),
    )
    found = problems(policy, root="network")

    assert set(found) == {
        *(f"network.allow_out[{at}]" for at in (1, 2, 3, 4)),
        *(f"network.deny_out[{at}]" for at in (0, 1, 2, 3)),
        *(f"network.dns_servers[{at}]" for at in (1, 2, 3, 4, 5)),
    }
    assert "did you mean 10.0.0.0/8?" in found["network.allow_out[1]"]
    assert "domains can only be allowed" in found["network.deny_out[0]"]


def test_domains_need_a_closed_internet():
    assert set(problems(EgressPolicy(allow_out=("example.com",)))) == {"allow_out"}
    assert compile_policy(EgressPolicy(allow_out=("a.b",), deny_out=("0.0.0.0/0",))).domains
    assert compile_policy(EgressPolicy(allow_out=("a.b",), allow_internet=False)).domains


@pytest.mark.parametrize(
    "name",
    ["*", "*.", "a.*.com", "**.com", "*a.com", ".com", "a..b", "-a.com", "a-.com",
     "a" * 64 + ".com",
     "http://a.com", "a.com/x", "a.com:443", "user@a.com", "1.2.3", "a.1", "\n", "a\0b.com"],
)  # fmt: skip
def test_invalid_domains_are_rejected(name: str):
    assert set(problems(EgressPolicy(allow_internet=False, allow_out=(name,)))) == {"allow_out[0]"}


def test_names_match_exactly_or_below_a_wildcard():
    rules = compile_policy(
        EgressPolicy(
            allow_internet=False, allow_out=("Example.COM.", "*.mirror.example", "bücher.example")
        )
    )
    allowed = ["example.com", "files.mirror.example", "a.b.mirror.example", "xn--bcher-kva.example"]
    refused = [
        "www.example.com",
        "mirror.example",
        "evilmirror.example",
        "example.com.evil.org",
        "",
        "com",
    ]

    assert all(rules.resolves(name) for name in allowed)
    assert not any(rules.resolves(name) for name in refused)


def test_too_many_entries_are_rejected():
    many = tuple(f"192.0.{n >> 8}.{n & 255}" for n in range(1001))
    assert set(problems(EgressPolicy(deny_out=many))) == {"deny_out"}
    assert set(problems(EgressPolicy(dns_servers=("8.8.8.8",) * 9))) == {"dns_servers"}


def test_private_name_servers_need_allow_private():
    assert compile_policy(EgressPolicy(dns_servers=("10.0.0.1",), allow_private=True))
    assert problems(EgressPolicy(dns_servers=("127.0.0.1",), allow_private=True))
    assert problems(EgressPolicy(dns_servers=("169.254.169.254",), allow_private=True))


networks = st.builds(
    lambda address, bits: str(IPv4Network((address, bits), strict=False)),
    st.integers(0, 2**32 - 1),
    st.integers(0, 32),
)
addresses = st.builds(IPv4Address, st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("allow_private", [False, True])
@pytest.mark.parametrize(
    "server",
    [
        "64:ff9b::7f00:1",  # NAT64 of 127.0.0.1
        "64:ff9b::a9fe:a9fe",  # NAT64 of 169.254.169.254
        "64:ff9b:1::808:808",  # NAT64 with a prefix of the operator
        "2002:7f00:1::1",  # 6to4 of 127.0.0.1
        "2002:a9fe:a9fe::1",
        "2001:0:808:808::1",  # Teredo
        "::7f00:1",  # IPv4-compatible
        "::808:808",
        "::ffff:0:7f00:1",  # IPv4-translated
        "::ffff:8.8.8.8",
        "2606:4700::5efe:7f00:1",  # ISATAP of 127.0.0.1
        "2606:4700::200:5efe:a9fe:a9fe",
        "fec0::1",  # site-local
        "100::1",  # discard only
        "5f00::1",  # segment routing
        "4000::1",  # not assigned
        "ff0e::1",
        "::",
        "::1",
    ],
)
def test_a_dns_server_that_may_lead_to_this_machine_is_refused(server, allow_private):
    assert problems(EgressPolicy(dns_servers=(server,), allow_private=allow_private))


@pytest.mark.parametrize("server", ["64:ff9b::a00:1", "2002:a00:1::1", "fd00::53", "2001:db8::1"])
def test_a_dns_server_in_a_private_network_needs_allow_private(server):
    assert problems(EgressPolicy(dns_servers=(server,)))
    assert compile_policy(EgressPolicy(dns_servers=(server,), allow_private=True))


@pytest.mark.parametrize(
    "server",
    ["2001:4860:4860::8888", "2606:4700:4700::1111", "64:ff9b::808:808", "2002:808:808::1"],
)
def test_a_public_dns_server_is_accepted(server):
    assert compile_policy(EgressPolicy(dns_servers=(server,))).dns_servers == (server,)


@given(st.lists(networks, max_size=8), st.lists(networks, max_size=8), st.booleans(), st.booleans(),
       st.data())  # fmt: skip
def test_compiled_rules_match_the_model(
    allowed: list[str], denied: list[str], internet: bool, private: bool, data: st.DataObject
):
    policy = EgressPolicy(
        allow_internet=internet,
        allow_out=tuple(allowed),
        deny_out=tuple(denied),
        allow_private=private,
    )
    rules = compile_policy(policy)
    edges = [IPv4Network(one)[at] for one in (*allowed, *denied) for at in (0, -1)]
    address = data.draw(st.one_of(addresses, st.sampled_from(edges)) if edges else addresses)

    def inside(entries: list[str]) -> bool:
        return any(address in IPv4Network(entry) for entry in entries)

    closed = NEVER if private else (*NEVER, *PRIVATE)
    if any(address in network for network in closed):
        expected = False
    elif address in LINK_LOCAL:
        expected = any(
            address in IPv4Network(entry) and IPv4Network(entry).subnet_of(LINK_LOCAL)
            for entry in allowed
        )
    elif inside(allowed):
        expected = True
    else:
        expected = internet and not inside(denied)
    assert allows(rules, address) is expected


@given(st.lists(networks, max_size=12), st.booleans())
def test_networks_of_one_list_never_overlap(entries: list[str], internet: bool):
    rules = compile_policy(
        EgressPolicy(
            allow_internet=internet, allow_out=tuple(entries), deny_out=tuple(reversed(entries))
        )
    )
    for kind in (rules.allowed, rules.denied):
        for at, one in enumerate(kind):
            assert not any(one.overlaps(other) for other in kind[at + 1 :])


@given(st.lists(st.text(max_size=30), max_size=5), st.lists(st.text(max_size=30), max_size=5))
def test_any_text_is_either_a_policy_or_an_error_with_paths(allowed: list[str], denied: list[str]):
    policy = EgressPolicy(
        allow_internet=False, allow_out=tuple(allowed), deny_out=tuple(denied), dns_servers=()
    )
    found, names = [], frozenset[str]()
    try:
        rules = compile_policy(policy)
        names = rules.domains | rules.wildcards
    except InvalidError as error:
        found = [problem.path for problem in error.problems] or ["no path"]

    assert all(path.startswith(("allow_out[", "deny_out[")) for path in found)
    assert all(name.isascii() and not set(name) & set(" {}\"';\n") for name in names)


@given(addresses)
def test_private_addresses_are_never_admitted(address: IPv4Address):
    if is_admissible(address, reaches_private=False):
        assert not any(address in network for network in (*PRIVATE, *NEVER))
