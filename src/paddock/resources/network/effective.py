"""The network policy in effect for a sandbox, and the policy that a request asks for. Pure."""

from collections.abc import Collection

from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import NetworkPolicy
from paddock.resources.network.ceiling import INTERNET, PUBLIC_TRAFFIC, intersect
from paddock.resources.network.destinations import destinations


def owner_of(sandbox: Sandbox) -> str:
    """Return the team whose policy applies to a sandbox."""
    claim = sandbox.spec.claim
    return claim.owner if claim is not None else sandbox.metadata.namespace


def effective_network(
    sandbox: Sandbox, template: NetworkPolicy, ceiling: NetworkPolicy | None
) -> NetworkPolicy:
    """Return the policy in effect, given that of the template and of team and installation.

    Only an operator's request can exceed the template (`claim.networkOpened`).
    """
    own, claim = sandbox.spec.network, sandbox.spec.claim
    if own is None:
        policy = template
    elif claim is not None and claim.network_opened:
        policy = own
    else:
        policy = intersect(own, template)
    return policy if ceiling is None else intersect(policy, ceiling)


def requested_network(
    base: NetworkPolicy, asked: NetworkPolicy, opens: Collection[str] = ()
) -> NetworkPolicy:
    """Return the policy for a request on top of the policy that applies without one.

    A request adds rules; it replaces the base only where it closes the internet, or names what it
    opens. `opens` as in `exceeding`.
    """
    wanted = destinations(asked)
    internet = base.allow_internet_access
    allow_out, deny_out = _joined(base.allow_out, asked.allow_out), base.deny_out
    if not wanted.is_open:
        internet, allow_out, deny_out = asked.allow_internet_access, asked.allow_out, asked.deny_out
    elif INTERNET in opens and not destinations(base).is_open:
        internet, allow_out, deny_out = True, asked.allow_out, asked.deny_out
    else:
        deny_out = _joined(base.deny_out, asked.deny_out)
    return NetworkPolicy(
        allow_internet_access=internet,
        allow_out=allow_out,
        deny_out=deny_out,
        dns_servers=asked.dns_servers or base.dns_servers,
        allow_private_networks=base.allow_private_networks,
        allow_public_traffic=asked.allow_public_traffic
        and (base.allow_public_traffic or PUBLIC_TRAFFIC in opens),
        mask_request_host=asked.mask_request_host or base.mask_request_host,
    )


def _joined(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*one, *other)))
