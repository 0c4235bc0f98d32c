"""What a running sandbox is told besides its blueprint: rules for its traffic, and its claim."""

from paddock.controllers.sandbox.templates import TemplateSource
from paddock.kit.clock import Clock
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.kinds.template import NetworkPolicy
from paddock.resources.tokens import TokenSeed
from paddock.runtime.blueprint import agent_config, egress
from paddock.runtime.port import Runtime


class Applying:
    """Applies what changed; knows in memory what it applied last, and applies it again else."""

    def __init__(
        self, templates: TemplateSource, runtime: Runtime, seed: TokenSeed, clock: Clock
    ) -> None:
        self._templates = templates
        self._runtime = runtime
        self._seed = seed
        self._started = clock.now()
        self._networks: dict[str, NetworkPolicy] = {}
        """The egress policy last put into force, by uid."""
        self._configured: dict[str, str] = {}
        """The lock of the claim that envd was last configured for, by uid."""

    async def apply(self, sandbox: Sandbox) -> None:
        """Bring a running sandbox up to its spec."""
        if sandbox.status.phase is Phase.RUNNING:
            await self._apply_network(sandbox)
            await self._apply_claim(sandbox)

    def forget(self, uid: str) -> None:
        """Drop what is known of a sandbox whose life ends."""
        self._networks.pop(uid, None)
        self._configured.pop(uid, None)

    async def _apply_network(self, sandbox: Sandbox) -> None:
        """Put a changed egress policy into force."""
        uid = sandbox.metadata.uid
        policy = sandbox.spec.network
        if policy is None and uid in self._networks:
            # It was somebody's with rules of their own, and is its pool's again.
            policy = self._templates.of(sandbox).network
        if policy is not None and self._networks.get(uid) != policy:
            await self._runtime.set_egress(uid, egress(policy))
            self._networks[uid] = policy

    async def _apply_claim(self, sandbox: Sandbox) -> None:
        """Give envd its token and environment where nobody else does.

        The API's claims (they have a key) configure envd themselves, before they answer; those
        from before this process began may have been cut off between the two.
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
