"""A policy as a ceiling: for any two policies, the result allows nothing that either forbids.

The oracle is the compiler of the local runtime, whose rules the kernel enforces.
"""

from ipaddress import IPv4Address, ip_network

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from paddock.kit.errors import InvalidError
from paddock.resources.kinds.template import NetworkPolicy
from paddock.resources.network.ceiling import INTERNET, PUBLIC_TRAFFIC, exceeding, intersect
from paddock.resources.network.effective import requested_network
from paddock.runtime.blueprint import egress
from paddock.runtime.kubernetes.network.policy_render import network_policy
from paddock.runtime.local.net.policy import LINK_LOCAL, PRIVATE, EgressRules, compile_policy

NETWORKS = (
    *("0.0.0.0/0", "8.0.0.0/8", "8.8.0.0/16", "8.8.8.8", "9.9.9.9", "1.1.1.0/24", "160.0.0.0/4"),
    *("10.0.0.0/8", "10.1.0.0/16", "10.1.2.3", "169.254.0.0/16", "169.254.169.254"),
)
DOMAINS = ("pypi.org", "*.pypi.org", "files.pypi.org", "*.org", "example.com", "*.a.example.com")
ADDRESSES = tuple(
    IPv4Address(text)
    for text in (
        *("8.8.8.8", "8.8.4.4", "8.1.1.1", "9.9.9.9", "1.1.1.7", "2.2.2.2", "168.1.1.1"),
        *("10.1.2.3", "10.1.9.9", "10.200.0.1", "169.254.169.254", "169.254.1.1"),
    )
)
NAMES = ("pypi.org", "files.pypi.org", "x.files.pypi.org", "python.org", "example.com", "evil.test")
SERVERS = ("8.8.8.8", "1.1.1.1", "9.9.9.9")


def _valid(policy: NetworkPolicy) -> bool:
    try:
        compile_policy(egress(policy))
    except InvalidError:
        return False
    return True


POLICIES = st.builds(
    NetworkPolicy,
    allow_internet_access=st.booleans(),
    allow_out=st.lists(st.sampled_from((*NETWORKS, *DOMAINS)), max_size=4, unique=True).map(tuple),
    deny_out=st.lists(st.sampled_from(NETWORKS), max_size=3, unique=True).map(tuple),
    dns_servers=st.lists(st.sampled_from(SERVERS), max_size=2, unique=True).map(tuple),
    allow_private_networks=st.booleans(),
    allow_public_traffic=st.booleans(),
).filter(_valid)


def _has_no_domains(policy: NetworkPolicy) -> bool:
    return not set(policy.allow_out) & set(DOMAINS)


OPEN = NetworkPolicy()
CLOSED = NetworkPolicy(allow_internet_access=False)


def _reaches(rules: EgressRules, address: IPv4Address) -> bool:
    """Whether an address is reached without a name, by the order that the compiler documents."""
    if any(address in one for one in PRIVATE) and not rules.reaches_private:
        return False
    if any(address in one for one in rules.allowed):
        return True
    if address in LINK_LOCAL or any(address in one for one in rules.denied):
        return False
    return rules.is_open


def _reaches_by_name(rules: EgressRules, name: str, address: IPv4Address) -> bool:
    """Whether an address is reached because a name resolves to it."""
    if rules.is_open:
        return _reaches(rules, address)
    if not rules.resolves(name) or address in LINK_LOCAL:
        return _reaches(rules, address)
    return rules.reaches_private or not any(address in one for one in PRIVATE)


@settings(max_examples=300, deadline=None)
@given(POLICIES, POLICIES)
@example(
    NetworkPolicy(allow_internet_access=False, allow_out=("*.evil.test",)),
    NetworkPolicy(deny_out=("8.0.0.0/8",)),
)
@example(
    NetworkPolicy(allow_out=("169.254.169.254",), allow_private_networks=True),
    NetworkPolicy(allow_out=("160.0.0.0/4",), allow_private_networks=True),
)
def test_the_intersection_allows_nothing_that_the_ceiling_forbids(
    policy: NetworkPolicy, ceiling: NetworkPolicy
) -> None:
    result = intersect(policy, ceiling)
    got, limit = compile_policy(egress(result)), compile_policy(egress(ceiling))
    for address in ADDRESSES:
        assert not _reaches(got, address) or _reaches(limit, address), address
        for name in NAMES:
            assert not _reaches_by_name(got, name, address) or _reaches_by_name(
                limit, name, address
            ), (name, address)
    assert not (result.allow_private_networks and not ceiling.allow_private_networks)
    assert not (result.allow_public_traffic and not ceiling.allow_public_traffic)
    if ceiling.dns_servers or not limit.is_open:
        assert set(result.dns_servers) <= set(ceiling.dns_servers)
    assert all(
        _reaches(limit, IPv4Address(one))
        for one in result.dns_servers
        if one not in ceiling.dns_servers
    )


@settings(max_examples=300, deadline=None)
@given(POLICIES, POLICIES)
def test_addresses_that_both_allow_stay_allowed_and_no_others(
    policy: NetworkPolicy, ceiling: NetworkPolicy
) -> None:
    got = compile_policy(egress(intersect(policy, ceiling)))
    own, limit = compile_policy(egress(policy)), compile_policy(egress(ceiling))
    for address in ADDRESSES:
        both = _reaches(own, address) and _reaches(limit, address)
        assert _reaches(got, address) == both, address


@settings(max_examples=200, deadline=None)
@given(POLICIES, POLICIES)
def test_a_request_without_exceeding_fields_keeps_all_that_it_names(
    asked: NetworkPolicy, ceiling: NetworkPolicy
) -> None:
    assume(not exceeding(asked, ceiling))
    wanted = requested_network(ceiling, asked)
    assume(_valid(wanted))
    got = intersect(wanted, ceiling)
    rules, own = compile_policy(egress(got)), compile_policy(egress(asked))
    for address in ADDRESSES:
        if any(address in one for one in own.allowed) and ceiling.allow_private_networks:
            assert _reaches(rules, address)
    if not own.is_open:
        assert all(rules.resolves(name) for name in NAMES if own.resolves(name))


def test_a_policy_within_its_ceiling_is_returned_as_it_was_written() -> None:
    asked = NetworkPolicy(allow_internet_access=False, allow_out=("pypi.org", "8.8.8.8"))
    assert intersect(asked, OPEN) is asked or intersect(asked, OPEN) == asked
    assert intersect(OPEN, CLOSED) == CLOSED


@pytest.mark.parametrize(
    ("asked", "ceiling", "fields"),
    [
        (OPEN, CLOSED, []),
        (NetworkPolicy(allow_out=("8.8.8.8",)), CLOSED, ["network.allowOut[0]"]),
        (NetworkPolicy(allow_out=("0.0.0.0/0",)), CLOSED, ["network.allowOut[0]"]),
        (NetworkPolicy(allow_out=("0.0.0.0/0",)), OPEN, []),
        (NetworkPolicy(dns_servers=("8.8.8.8",)), CLOSED, ["network.dnsServers[0]"]),
        (NetworkPolicy(dns_servers=("8.8.8.8",)), OPEN, []),
        (
            NetworkPolicy(allow_internet_access=False, allow_out=("pypi.org", "evil.test")),
            NetworkPolicy(allow_internet_access=False, allow_out=("*.org", "pypi.org")),
            ["network.allowOut[1]"],
        ),
        (
            NetworkPolicy(allow_internet_access=False, allow_out=("evil.test",)),
            NetworkPolicy(deny_out=("8.8.8.8",)),
            ["network.allowOut[0]"],
        ),
        (NetworkPolicy(allow_out=("10.1.2.3",)), OPEN, ["network.allowOut[0]"]),
        (NetworkPolicy(allow_out=("10.1.2.3",)), NetworkPolicy(allow_out=("10.0.0.0/8",)), []),
        (
            NetworkPolicy(allow_out=("169.254.169.254",)),
            NetworkPolicy(allow_private_networks=True),
            ["network.allowOut[0]"],
        ),
    ],
)
def test_fields_that_exceed_a_ceiling_are_named(
    asked: NetworkPolicy, ceiling: NetworkPolicy, fields: list[str]
) -> None:
    assert [problem.path for problem in exceeding(asked, ceiling)] == fields


def test_a_true_set_on_purpose_exceeds_a_closed_ceiling() -> None:
    ceiling = NetworkPolicy(allow_internet_access=False, allow_public_traffic=False)
    found = exceeding(OPEN, ceiling, (INTERNET, PUBLIC_TRAFFIC))
    assert [problem.path for problem in found] == [INTERNET, PUBLIC_TRAFFIC]


def test_a_request_with_defaults_only_keeps_the_policy_of_its_source() -> None:
    source = NetworkPolicy(
        allow_internet_access=False,
        allow_out=("pypi.org",),
        dns_servers=("8.8.8.8",),
        allow_public_traffic=False,
        allow_private_networks=True,
    )
    assert requested_network(source, OPEN) == source


def _pod_reaches(policy: NetworkPolicy, address: IPv4Address) -> bool:
    manifest = network_policy(egress(policy), "default", system_namespace="paddock-system")
    blocks = [
        peer["ipBlock"]
        for rule in manifest.spec["egress"]
        if "ports" not in rule
        for peer in rule["to"]
    ]
    return any(
        address in ip_network(block["cidr"])
        and not any(address in ip_network(one) for one in block.get("except", ()))
        for block in blocks
    )


@settings(max_examples=300, deadline=None)
@given(POLICIES.filter(_has_no_domains), POLICIES.filter(_has_no_domains))
@example(NetworkPolicy(allow_out=("10.1.2.3",)), OPEN)
@example(NetworkPolicy(allow_out=("0.0.0.0/0",)), OPEN)
@example(OPEN, NetworkPolicy(deny_out=("0.0.0.0/0",)))
def test_pods_reach_nothing_that_the_ceiling_forbids(
    policy: NetworkPolicy, ceiling: NetworkPolicy
) -> None:
    result = intersect(policy, ceiling)
    for address in ADDRESSES:
        assert not _pod_reaches(result, address) or _pod_reaches(ceiling, address), address
