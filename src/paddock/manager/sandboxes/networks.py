"""The network policy of a claimed sandbox: change it, and show where it comes from."""

from collections.abc import Sequence

from msgspec import Struct, structs

from paddock.cache.provider import Provider
from paddock.claims.caller import Caller
from paddock.claims.network.ceilings import INSTALLATION, SANDBOX, TEMPLATE, NetworkCeilings
from paddock.claims.network.requested import requested
from paddock.kit.errors import ConflictError, NotFoundError
from paddock.manager.ports import Agent
from paddock.manager.sandboxes.queries import SandboxQueries, not_found
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import (
    NetworkPolicy,
    SandboxTemplate,
    SandboxTemplateSpec,
)
from paddock.resources.meta import Key
from paddock.resources.network.effective import effective_network, owner_of
from paddock.resources.network.link_rates import LinkRates, link_rates


class NetworkPart(Struct, frozen=True, kw_only=True):
    """One part of a sandbox's policy, and where it comes from."""

    source: str
    internet: str = ""
    """The setting of a team or of the installation."""
    policy: NetworkPolicy | None = None
    """The policy of the template or of the sandbox."""
    is_opened: bool = False
    """Whether an operator allowed it to exceed the template."""
    rates: LinkRates | None = None
    """`None` on a runtime that limits none."""


class NetworkInEffect(Struct, frozen=True, kw_only=True):
    """The intersection of the parts."""

    policy: NetworkPolicy
    rates: LinkRates | None


class SandboxNetworks:
    """Reads and changes network policies, within those of template, team and installation."""

    def __init__(
        self,
        *,
        provider: Provider,
        queries: SandboxQueries,
        agent: Agent,
        ceilings: NetworkCeilings,
        rates: LinkRates | None = None,
    ) -> None:
        self._provider = provider
        self._queries = queries
        self._agent = agent
        self.ceilings = ceilings
        self._rates = rates

    def effective(self, sandbox: Sandbox) -> NetworkPolicy:
        """Return the policy in effect."""
        template = self._template_network(sandbox) or sandbox.spec.network or NetworkPolicy()
        return effective_network(sandbox, template, self.ceilings.of(owner_of(sandbox)))

    def parts(self, caller: Caller, sandbox_id: str) -> tuple[NetworkInEffect, list[NetworkPart]]:
        """Return the policy in effect, and the parts of which it is the intersection."""
        sandbox = self._queries.find(caller, sandbox_id)
        source, internet = self.ceilings.source(owner_of(sandbox))
        parts = [
            NetworkPart(source=source, internet=internet),
            NetworkPart(source=TEMPLATE, policy=self._template_network(sandbox)),
        ]
        own, claim = sandbox.spec.network, sandbox.spec.claim
        if own is not None:
            is_opened = claim is not None and claim.network_opened
            parts.append(NetworkPart(source=SANDBOX, policy=own, is_opened=is_opened))
        rates = self._rates
        if rates is not None:
            template = self._template(sandbox)
            requested_rates = {
                TEMPLATE: link_rates(template.resources if template else None),
                SANDBOX: link_rates(sandbox.spec.resources),
            }
            parts = [
                structs.replace(
                    part, rates={INSTALLATION: rates, **requested_rates}.get(part.source)
                )
                for part in parts
            ]
            for requested_rate in requested_rates.values():
                rates = rates.limited_by(requested_rate)
        return NetworkInEffect(policy=self.effective(sandbox), rates=rates), parts

    async def change(
        self, caller: Caller, sandbox_id: str, policy: NetworkPolicy, opens: Sequence[str] = ()
    ) -> Sandbox:
        """Replace the egress policy; it applies when this returns.

        `ForbiddenError` if it names more than the template, the team or the installation allows.
        An operator may exceed the template.
        """
        caller.require("update", "sandboxes/network")
        sandbox = self._queries.find(caller, sandbox_id)
        if sandbox.spec.paused:
            raise ConflictError(f"sandbox {sandbox_id} is paused")
        self._agent.check_network(policy)
        template = self._template_network(sandbox)
        if template is None:
            raise NotFoundError(
                f"the template of sandbox {sandbox_id} was not found",
                hint="its network policy cannot be changed without its template",
            )
        before = sandbox.spec.network or template
        wanted = requested(
            caller,
            policy,
            opens,
            template=template,
            base=structs.replace(
                template,
                allow_public_traffic=before.allow_public_traffic,
                mask_request_host=before.mask_request_host,
            ),
            ceiling=self.ceilings.of(owner_of(sandbox)),
        )

        def changed(current: Sandbox) -> Sandbox:
            if current.is_deleting:
                raise not_found(sandbox_id)
            spec = current.spec
            claim = spec.claim and structs.replace(spec.claim, network_opened=wanted.is_opened)
            return structs.replace(
                current, spec=structs.replace(spec, network=wanted.policy, claim=claim)
            )

        written = await self._provider.write.mutate(
            Sandbox, sandbox.key, changed, uid=sandbox.metadata.uid, attempts=100
        )
        await self._agent.set_network(written, self.effective(written))
        return written

    def _template_network(self, sandbox: Sandbox) -> NetworkPolicy | None:
        """Return the policy of a sandbox's template; `None` if it does not exist."""
        template = self._template(sandbox)
        return template.network if template is not None else None

    def _template(self, sandbox: Sandbox) -> SandboxTemplateSpec | None:
        template, reference = sandbox.spec.template, sandbox.spec.template_ref
        if template is None and reference is not None:
            home = reference.namespace or sandbox.metadata.namespace
            found = self._provider.get(SandboxTemplate, Key(home, reference.name))
            template = found.spec if found is not None else None
        return template
