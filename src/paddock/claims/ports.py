"""What claims need of other layers and may not import: handed in by `paddock.app`."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from paddock.claims.caller import Caller
from paddock.claims.requests import NewSandbox
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import NetworkPolicy, Resources, SandboxTemplateSpec
from paddock.resources.meta import Key

Take = Callable[[Key], Awaitable[Sandbox | None]]
"""Takes a warm sandbox out of a pool; `None` where somebody else was faster."""
WARM = "warm"
COLD = "cold"
REMOTE = "remote"


class ClaimAgent(Protocol):
    """The way to what runs a sandbox, for things that cannot wait for a reconcile."""

    async def configure(self, sandbox: Sandbox, template: SandboxTemplateSpec) -> None:
        """Give envd the token, environment and identity that a claim wrote."""
        ...

    def can_resize(self, now: Resources, wanted: Resources) -> bool:
        """Say whether a sandbox in stock can be given another size without being made anew."""
        ...

    async def resize(self, sandbox: Sandbox, template: SandboxTemplateSpec) -> None:
        """Give a sandbox the size that its claim wrote."""
        ...

    def can_update_image(self) -> bool:
        """Say whether the controllers give a sandbox in stock another image as it runs."""
        ...

    async def set_network(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        """Put a changed egress policy into force."""
        ...


class Announcer(Protocol):
    """Tells gateways what becomes of a sandbox before the caller hears of it.

    Who was told that a sandbox runs, is paused or gone must not meet a gateway that thinks
    otherwise; all that nobody waits for reaches gateways by their watch.
    """

    async def announce(self, sandbox: Sandbox) -> None:
        """Return once every reachable gateway of this machine knows the route."""
        ...

    async def announce_end(self, sandbox: Sandbox, version: str) -> None:
        """Return once every reachable gateway knows that it is over, since that version."""
        ...


class EnvironmentSource(Protocol):
    """Claims addressed to an environment."""

    async def obtain(
        self, caller: Caller, request: NewSandbox, env: Key, take: Take
    ) -> tuple[Sandbox, str]:
        """Wait for this claim's turn; return the sandbox and its source."""
        ...
