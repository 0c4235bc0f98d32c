"""Client of the node agents, which freeze the processes of pods.

A node agent is a pod of the optional node DaemonSet. The agent on the sandbox's node is called.
"""

from collections.abc import Callable

import aiohttp
import msgspec
from msgspec import Struct

from paddock.kit import bearer
from paddock.kit.errors import NotFoundError, UnavailableError, UnsupportedError
from paddock.resources.kinds.pods import Pod
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.cluster import PodCache

_SECONDS = 10.0


class FreezeRequest(Struct, frozen=True):
    """Body of `POST /freeze`: freeze or thaw every process of a pod, including envd."""

    pod_uid: str
    frozen: bool


class NodeAgents:
    """Finds and calls node agents."""

    def __init__(self, pods: PodCache | None, token: Callable[[], str]) -> None:
        self._pods = pods
        self._token = token
        self._opened: aiohttp.ClientSession | None = None

    @property
    def are_installed(self) -> bool:
        """Whether there is any node agent."""
        return bool(self._agents())

    def _agents(self) -> dict[str, str]:
        if self._pods is None:
            return {}
        return {
            pod.spec.node_name: pod.status.pod_ip
            for pod in self._pods.all()
            if pod.spec.node_name and pod.status.pod_ip and not pod.is_deleting
        }

    async def freeze(self, pod: Pod, *, frozen: bool) -> None:
        """Freeze or thaw the processes of a pod."""
        agents = self._agents()
        if not agents:
            raise UnsupportedError(
                "pods cannot be frozen here: the node DaemonSet is not installed",
                hint="install it (node.enabled=true in the chart, or `paddock kube install`), or "
                "pause with Stop and a volume",
            )
        ip = agents.get(pod.spec.node_name)
        if ip is None:
            raise UnavailableError(
                f"node {pod.spec.node_name} has no agent right now", retry_after_seconds=2.0
            )
        order = FreezeRequest(pod.metadata.uid, frozen)
        host = f"[{ip}]" if ":" in ip else ip
        try:
            async with self._session().post(
                f"http://{host}:{names.NODE_PORT}/freeze",
                data=msgspec.json.encode(order),
                headers=bearer.header(self._token()),
            ) as response:
                text = (await response.read()).decode(errors="replace")[:200]
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnavailableError(
                f"the agent of node {pod.spec.node_name} does not answer: {error!r}",
                retry_after_seconds=1.0,
            ) from error
        if status == 404:
            raise NotFoundError(f"node {pod.spec.node_name} does not run that pod: {text}")
        if status != 204:
            raise UnavailableError(
                f"the agent of node {pod.spec.node_name} returned {status}: {text}"
            )

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            self._opened = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SECONDS))
        return self._opened

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()
