"""Ports of claims: what they need of other layers. `paddock.app` hands in the adapters."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from paddock.claims.caller import Caller
from paddock.claims.requests import NewSandbox
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import NetworkPolicy, Resources, SandboxTemplateSpec
from paddock.resources.meta import Key

Take = Callable[[Key], Awaitable[Sandbox | None]]
"""Claims a warm sandbox of a pool; `None` if another claim was first."""
WARM = "warm"
COLD = "cold"
REMOTE = "remote"


class ClaimAgent(Protocol):
    """Direct access to the runtime of a sandbox, for calls that cannot wait for a reconcile."""

    async def configure(self, sandbox: Sandbox, template: SandboxTemplateSpec) -> None:
        """Send envd the token, environment and identity that a claim wrote."""
        ...

    def can_resize(self, now: Resources, wanted: Resources) -> bool:
        """Whether a warm sandbox can be resized without a restart."""
        ...

    async def resize(self, sandbox: Sandbox, template: SandboxTemplateSpec) -> None:
        """Resize a sandbox to what its claim wrote."""
        ...

    def can_update_image(self) -> bool:
        """Whether the controllers can change the image of a warm sandbox."""
        ...

    def check_network(self, policy: NetworkPolicy) -> None:
        """Raise `InvalidError` for a policy that the runtime cannot enforce."""
        ...

    async def set_network(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        """Apply a changed egress policy."""
        ...


class Announcer(Protocol):
    """Announces a change of a sandbox to gateways before the client has its reply.

    After a reply that a sandbox runs, is paused or is gone, no gateway may route by older state.
    All other changes reach gateways through their watch.
    """

    async def announce(self, sandbox: Sandbox) -> None:
        """Return once every reachable gateway of this machine has the route."""
        ...

    async def announce_end(self, sandbox: Sandbox, version: str) -> None:
        """Return once every reachable gateway has removed the route, as of that version."""
        ...


class EnvironmentSource(Protocol):
    """Serves claims on an environment."""

    async def obtain(
        self, caller: Caller, request: NewSandbox, env: Key, take: Take
    ) -> tuple[Sandbox, str]:
        """Wait in the queue of the environment; return the sandbox and its source."""
        ...
