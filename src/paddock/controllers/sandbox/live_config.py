"""Applies to a running sandbox what its blueprint lacks: egress rules and the claim."""

from paddock.claims.network.ceilings import CeilingOf, no_ceiling
from paddock.controllers.sandbox.templates import TemplateSource
from paddock.kit.clock import Clock
from paddock.kit.errors import UnsupportedError
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.kinds.template import NetworkPolicy
from paddock.resources.network.effective import effective_network, owner_of
from paddock.resources.tokens import TokenSeed
from paddock.runtime.blueprint import agent_config, egress
from paddock.runtime.port import Runtime


class LiveConfig:
    """Applies changes to running sandboxes.

    What was applied last is kept in memory only; after a restart it is applied again.
    """

    def __init__(
        self,
        templates: TemplateSource,
        runtime: Runtime,
        seed: TokenSeed,
        clock: Clock,
        ceiling_of: CeilingOf = no_ceiling,
    ) -> None:
        self._templates = templates
        self._runtime = runtime
        self._seed = seed
        self._ceiling_of = ceiling_of
        self._started = clock.now()
        self._networks: dict[str, NetworkPolicy] = {}
        """The egress policy that was applied last, by uid."""
        self._configured: dict[str, str] = {}
        """The lock of the claim that envd was configured for last, by uid."""

    async def apply(self, sandbox: Sandbox) -> None:
        """Apply the spec of a running sandbox."""
        if sandbox.status.phase is Phase.RUNNING:
            await self._apply_network(sandbox)
            await self._apply_claim(sandbox)

    def forget(self, uid: str) -> None:
        """Drop the state of a sandbox whose instance ends."""
        self._networks.pop(uid, None)
        self._configured.pop(uid, None)

    async def _apply_network(self, sandbox: Sandbox) -> None:
        uid = sandbox.metadata.uid
        ceiling = self._ceiling_of(owner_of(sandbox))
        is_own = sandbox.spec.network is not None or ceiling is not None
        if not is_own and uid not in self._networks and not self._is_older(sandbox):
            # It was started with the policy of its template.
            return
        policy = effective_network(sandbox, self._templates.of(sandbox).network, ceiling)
        if self._networks.get(uid) != policy:
            try:
                await self._runtime.set_egress(uid, egress(policy))
            except UnsupportedError:
                # A node that cannot filter gives its sandboxes no network, so a ceiling holds.
                if sandbox.spec.network is not None:
                    raise
            self._networks[uid] = policy

    def _is_older(self, sandbox: Sandbox) -> bool:
        """Whether it was claimed before this process started: the settings may have changed."""
        claim = sandbox.spec.claim
        return claim is not None and claim.claim_time <= self._started

    async def _apply_claim(self, sandbox: Sandbox) -> None:
        """Configure envd with the claim's token and environment, unless the API does.

        Claims of the API (they have a key) configure envd themselves before they reply. Claims from
        before this process started are configured again: a crash may have come in between.
        """
        claim = sandbox.spec.claim
        uid = sandbox.metadata.uid
        if claim is None:
            return
        if claim.key_id and claim.claim_time > self._started:
            return
        if self._configured.get(uid) != claim.lock:
            config = agent_config(sandbox, self._templates.of(sandbox), self._seed)
            await self._runtime.configure(uid, config)
            self._configured[uid] = claim.lock
