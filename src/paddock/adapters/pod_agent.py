"""The manager's agent for sandboxes that are pods; it uses the address in the Sandbox's status.

An API replica does not watch pods. It sends the configuration of a claim directly to envd;
controllers apply network policies, which they read from the Sandbox.
"""

from collections.abc import Awaitable, Callable
from datetime import datetime

from msgspec import structs

from paddock.kit.clock import Clock
from paddock.kit.errors import ConflictError, UnavailableError
from paddock.manager.ports import Agent
from paddock.manager.sandboxes.requests import LogEntry, UsageSample
from paddock.resources import quantity
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.kinds.template import NetworkPolicy, Resources, SandboxTemplateSpec
from paddock.resources.tokens import TokenSeed, control_tokens
from paddock.runtime import support
from paddock.runtime.blueprint import agent_config, limits
from paddock.runtime.kubernetes.envd_client import PodEnvdClient, read_usage
from paddock.runtime.kubernetes.pods.resize import Resizer
from paddock.runtime.port import OutboundConfig
from paddock.settings import Settings
from paddock.store.kubernetes.backend import KubernetesStore


class PodAgent:
    """Calls the envds of pods."""

    def __init__(
        self, envd_client: PodEnvdClient, resizer: Resizer, seed: TokenSeed, clock: Clock
    ) -> None:
        self._envd_client = envd_client
        self._resizer = resizer
        self._seed = seed
        self._clock = clock

    async def configure(self, sandbox: Sandbox, template: SandboxTemplateSpec) -> None:
        """Send envd the token, environment and identity of a claim."""
        config = agent_config(sandbox, template, self._seed)
        await self._envd_client.configure(sandbox.metadata.uid, _ip(sandbox), config)

    def can_resize(self, now: Resources, wanted: Resources) -> bool:
        """Whether the cluster can resize a running pod to this size."""
        return self._resizer.can_resize(limits(now), limits(wanted))

    async def resize(self, sandbox: Sandbox, template: SandboxTemplateSpec) -> None:
        """Resize a sandbox's pod to the size in its claim."""
        size = limits(sandbox.spec.resources or template.resources)
        await self._resizer.resize(
            sandbox.metadata.namespace,
            sandbox.metadata.name,
            size,
            before=limits(template.resources),
        )

    def can_update_image(self) -> bool:
        """Return True: every cluster can change the image of a running pod."""
        return True

    def check_network(self, policy: NetworkPolicy) -> None:
        """Raise `InvalidError` for a policy that no NetworkPolicy can express."""
        support.check_network(support.KUBERNETES, policy)

    async def set_network(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        """Do nothing: the controllers apply the policy of the Sandbox."""

    async def samples(
        self, sandbox: Sandbox, *, start: datetime | None, end: datetime | None
    ) -> tuple[UsageSample, ...]:
        """Return the current usage only: a cluster keeps the history itself."""
        found = await self._envd_client.metrics(sandbox.metadata.uid, _ip(sandbox))
        usage = read_usage(found, self._clock.now())
        # The sandbox may have been resized since envd was configured.
        size = sandbox.spec.resources
        if size is not None and size.cpu is not None:
            usage = structs.replace(usage, cpu_count=quantity.millis(size.cpu) / 1000)
        if size is not None and size.memory is not None:
            usage = structs.replace(usage, memory_total_bytes=quantity.whole(size.memory))
        return (
            UsageSample(
                at=usage.at,
                cpu_count=usage.cpu_count,
                cpu_used_percent=usage.cpu_used_percent,
                memory_used_bytes=usage.memory_used_bytes,
                memory_total_bytes=usage.memory_total_bytes,
                memory_cache_bytes=usage.memory_cache_bytes,
                disk_used_bytes=usage.disk_used_bytes,
                disk_total_bytes=usage.disk_total_bytes,
            ),
        )

    async def logs(
        self, sandbox: Sandbox, *, since: datetime | None, limit: int
    ) -> tuple[LogEntry, ...]:
        """Return the output of the start command, which the sidecar of a running sandbox keeps."""
        if sandbox.status.phase is not Phase.RUNNING:
            raise ConflictError(
                f"sandbox {sandbox.key} is {sandbox.status.phase}: "
                "its log can be read only while it runs",
                hint="connect to it first",
            )
        uid = sandbox.metadata.uid
        lines = await self._envd_client.logs(uid, _ip(sandbox), since=since, limit=limit)
        return tuple(
            LogEntry(at=line.at, level=line.level, message=line.message, fields=line.fields)
            for line in lines
        )


async def open_pod_agent(
    settings: Settings,
    store: KubernetesStore,
    seed: TokenSeed,
    clock: Clock,
    installation: OutboundConfig,
) -> tuple[PodAgent, Callable[[], Awaitable[None]]]:
    """Probe the features of the cluster; return an agent and the function that closes it."""
    envd_client = PodEnvdClient(lambda uid: control_tokens(seed, uid), installation=installation)
    resizer = Resizer(store.client, has_pod_limits=settings.pod_limits)
    await resizer.detect()
    return PodAgent(envd_client, resizer, seed, clock), envd_client.close


def _ip(sandbox: Sandbox) -> str:
    address = sandbox.status.address
    if not address.ip:
        raise UnavailableError(f"sandbox {sandbox.key} has no address", retry_after_seconds=1.0)
    return address.ip


_: type[Agent] = PodAgent
