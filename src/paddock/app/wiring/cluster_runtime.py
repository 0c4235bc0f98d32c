"""Wires the Kubernetes runtime: the driver, informers of pods and volume claims, and clients."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from msgspec import structs

from paddock.cache.provider import SYNC_SECONDS, Provider
from paddock.claims.network.ceilings import CeilingOf, no_ceiling
from paddock.controllers.sandbox.templates import CachedTemplates
from paddock.engine.informer import Filter, Informer
from paddock.kit.clock import Clock
from paddock.kit.errors import InvalidError, NotFoundError, UnavailableError
from paddock.kit.tasks import background
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.pods import Pod, VolumeClaim
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.meta import Key
from paddock.resources.network.effective import owner_of
from paddock.resources.selectors import parse_labels
from paddock.resources.tokens import TokenSeed, control_tokens, node_tokens
from paddock.runtime.blueprint import blueprint
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.driver import KubernetesRuntime
from paddock.runtime.kubernetes.envd_client import PodEnvdClient
from paddock.runtime.kubernetes.node_agents import NodeAgents
from paddock.runtime.kubernetes.pods.render import PodSettings
from paddock.runtime.outbound_settings import load_outbound
from paddock.runtime.port import Blueprint
from paddock.settings import Settings
from paddock.store.kubernetes.backend import KubernetesStore
from paddock.store.port import Store

_PREFIX = "paddock.dev/"


class ClusterRuntime:
    """The driver with the informers and clients that it uses."""

    def __init__(
        self,
        settings: Settings,
        *,
        store: Store,
        provider: Provider,
        seed: TokenSeed,
        clock: Clock,
        ceiling_of: CeilingOf = no_ceiling,
    ) -> None:
        if not settings.agent_image:
            raise InvalidError(
                "PADDOCK_AGENT_IMAGE is not set: pods need an image with envd",
                hint="build deploy/image and set PADDOCK_AGENT_IMAGE to its name",
            )
        self._provider = provider
        self._seed = seed
        self._ceiling_of = ceiling_of
        self._keys: dict[str, Key] = {}
        ours = Filter(namespace=settings.namespace or None, labels=parse_labels(names.LABEL_UID))
        self._pods = Informer(store, Pod, only=ours, transform=_lean, clock=clock)
        self._claims = Informer(
            store, VolumeClaim, indexes={"uid": _uid_of}, only=ours, clock=clock
        )
        labels = f"app.kubernetes.io/name=paddock,{names.LABEL_COMPONENT}={names.COMPONENT_NODE}"
        self._agents = Informer(
            store,
            Pod,
            only=Filter(namespace=settings.system_namespace, labels=parse_labels(labels)),
            clock=clock,
        )
        self._templates = CachedTemplates(
            provider.informer(SandboxTemplate), provider.informer(Checkpoint), provider.write
        )
        provider.informer(Sandbox).subscribe(self._observe)
        self._envd_client = PodEnvdClient(
            lambda uid: control_tokens(seed, uid), installation=load_outbound(settings).outbound
        )
        self._node_agents = NodeAgents(self._agents, lambda: node_tokens(seed)[0])
        self.driver = KubernetesRuntime(
            cluster=store,
            pods=self._pods,
            claims=self._claims,
            envd_client=self._envd_client,
            node_agents=self._node_agents,
            settings=PodSettings(
                agent_image=settings.agent_image,
                system_namespace=settings.system_namespace,
                namespace=settings.namespace,
                has_pod_limits=settings.pod_limits,
                allow_host=settings.pods_may_reach_host,
            ),
            control_token=lambda uid: control_tokens(seed, uid)[0],
            blueprint_of=self._blueprint_of,
            clock=clock,
            server=store.client if isinstance(store, KubernetesStore) else None,
        )

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        """Run the informers beside the body, which starts when all are synced."""
        informers = (self._pods, self._claims, self._agents)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._envd_client.close)
            stack.push_async_callback(self._node_agents.close)
            for informer in informers:
                name = f"informer {informer.kind.KIND}"
                await stack.enter_async_context(background(informer.run(), name=name))
            try:
                async with asyncio.timeout(SYNC_SECONDS):
                    for informer in informers:
                        await informer.wait_synced()
            except TimeoutError as error:
                raise UnavailableError(
                    f"pods and volume claims were not listed within {SYNC_SECONDS:g} s",
                    hint="check the permissions of this process's service account",
                ) from error
            yield

    def _observe(self, old: Sandbox | None, new: Sandbox | None) -> None:
        if new is not None:
            self._keys[new.metadata.uid] = new.key
        elif old is not None:
            self._keys.pop(old.metadata.uid, None)

    def _blueprint_of(self, uid: str) -> Blueprint | None:
        key = self._keys.get(uid)
        sandbox = self._provider.get(Sandbox, key) if key is not None else None
        if sandbox is None or sandbox.metadata.uid != uid:
            return None
        try:
            template = self._templates.of(sandbox)
        except NotFoundError:
            return None
        ceiling = self._ceiling_of(owner_of(sandbox))
        return blueprint(sandbox, template, self._seed, checkpoint_id=None, ceiling=ceiling)


def _uid_of(claim: VolumeClaim) -> tuple[str, ...]:
    uid = claim.metadata.labels.get(names.LABEL_UID)
    return (uid,) if uid else ()


def _lean(pod: Pod) -> Pod:
    """Drop foreign annotations, to save memory: ten thousand pods are kept."""
    annotations = {
        name: text for name, text in pod.metadata.annotations.items() if name.startswith(_PREFIX)
    }
    if len(annotations) == len(pod.metadata.annotations):
        return pod
    return structs.replace(pod, metadata=structs.replace(pod.metadata, annotations=annotations))
