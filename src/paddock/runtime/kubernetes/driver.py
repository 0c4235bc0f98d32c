"""The `kubernetes` driver: sandbox operations as writes to a cluster and requests to envd.

The driver is stateless. The current state is read from pods (`pods.watch`) and volume claims, the
desired state from the blueprint. So a new leader continues where the previous one stopped.
"""

import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import datetime

from paddock.kit.clock import Clock
from paddock.kit.errors import (
    ConflictError,
    DeadlineExceededError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from paddock.resources.kinds.pods import Pod, VolumeClaim
from paddock.resources.kinds.template import ImagePullPolicy
from paddock.resources.meta import Resource, with_meta
from paddock.runtime import rates
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.cluster import (
    ApiClient,
    BlueprintLookup,
    Cluster,
    PodCache,
    VolumeClaimCache,
)
from paddock.runtime.kubernetes.envd_client import PodEnvdClient, read_usage
from paddock.runtime.kubernetes.network.policies import NetworkPolicies
from paddock.runtime.kubernetes.node_agents import NodeAgents
from paddock.runtime.kubernetes.pods import status
from paddock.runtime.kubernetes.pods.factory import PodFactory
from paddock.runtime.kubernetes.pods.image_update import ImageUpdater
from paddock.runtime.kubernetes.pods.render import PodSettings
from paddock.runtime.kubernetes.pods.watch import CREATE_SECONDS, PodWatch, instance_of
from paddock.runtime.port import (
    AgentConfig,
    Blueprint,
    Capabilities,
    EgressPolicy,
    ImagePull,
    Instance,
    InstanceState,
    LogLine,
    ReadyImage,
    RegistryCredentials,
    Runtime,
    RuntimeEvent,
    StoredCheckpoint,
    Usage,
)

_NO_MEMORY = "the memory of a pod cannot be stored"
_NO_UPDATE = "this process has no access to the API server"
_NO_RATES = "Kubernetes does not limit it; the cluster's network or storage may"
_NO_SNAPSHOT = (
    "the files of a pod cannot be stored; a pause with Stop and a volume claim keeps them"
)


class KubernetesRuntime:
    """A `Runtime` whose sandboxes are pods."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        pods: PodCache,
        claims: VolumeClaimCache,
        envd_client: PodEnvdClient,
        node_agents: NodeAgents,
        settings: PodSettings,
        control_token: Callable[[str], str],
        blueprint_of: BlueprintLookup,
        clock: Clock,
        server: ApiClient | None = None,
    ) -> None:
        self._images = ImageUpdater(server) if server is not None else None
        self._cluster = cluster
        self._pod_cache = pods
        self._claims = claims
        self._envd_client = envd_client
        self._node_agents = node_agents
        self._blueprint_of = blueprint_of
        self._clock = clock
        self._watch = PodWatch(pods)
        self._factory = PodFactory(cluster, pods, settings, control_token)
        self.policies = NetworkPolicies(
            cluster,
            pods,
            system_namespace=settings.system_namespace,
            clock=clock,
            namespace=settings.namespace or None,
        )

    @property
    def name(self) -> str:
        return "kubernetes"

    async def capabilities(self) -> Capabilities:
        can_freeze = self._node_agents.are_installed
        reasons = {
            "can_checkpoint": _NO_MEMORY,
            "can_snapshot_files": _NO_SNAPSHOT,
            "can_stop": "only sandboxes whose template has volumeClaimTemplates keep their files",
            "can_limit_pids": "the kubelet's limit applies (podPidsLimit)",
            **dict.fromkeys(
                ("can_limit_bandwidth", "can_limit_io", "can_limit_cached_writes"), _NO_RATES
            ),
            "can_pull_images": "the kubelet of each pod pulls",
            "can_filter_egress": "by address; the cluster's network must enforce NetworkPolicies",
        }
        if not can_freeze:
            reasons["can_freeze"] = "the node DaemonSet is not installed"
        if self._images is None:
            reasons["can_update_image"] = _NO_UPDATE
        return Capabilities(
            can_freeze=can_freeze,
            can_stop=True,
            can_limit_cpu=True,
            can_limit_memory=True,
            can_limit_disk=True,
            can_filter_egress=True,
            can_update_image=self._images is not None,
            reasons=reasons,
        )

    # ---- create --------------------------------------------------------------------------

    async def ensure_image(
        self,
        reference: str,
        *,
        team: str,
        policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT,
        credentials: tuple[RegistryCredentials, ...] = (),
    ) -> ReadyImage:
        """Return at once: the kubelet of each pod pulls, with the pull secrets of the pod."""
        return ReadyImage(reference=reference)

    async def image_pulls(self) -> tuple[ImagePull, ...]:
        return ()

    async def need_images(self, references: frozenset[str]) -> None:
        """Do nothing: kubelets remove images."""

    async def create(self, blueprint: Blueprint) -> Instance:
        if blueprint.checkpoint_id is not None:
            raise UnsupportedError(
                f"sandbox {blueprint.name} cannot start from a checkpoint: {_NO_MEMORY}",
                hint="use an image that has what the sandbox needs",
            )
        if any(getattr(blueprint.limits, name) for name in (*rates.NETWORK, *rates.DISK)):
            raise UnsupportedError(
                f"sandbox {blueprint.name} limits bandwidth or disk I/O: {_NO_RATES}",
                hint="leave the rates out of the resources of its template",
            )
        pod = self._watch.get(blueprint.uid)
        if pod is None or pod.is_deleting:
            await self.policies.ensure(blueprint.egress, blueprint.namespace)
            await self._factory.create_claims(blueprint)
            pod = await self._factory.create_pod(blueprint, incarnation=blueprint.incarnation)
        return await self._watch.wait_running(blueprint.uid)

    async def start(self, uid: str) -> Instance:
        """Wait for the ready command. The sidecar runs the start and ready commands itself."""
        pod = self._watch.require(uid)
        wanted = self._blueprint_of(uid)
        allowed = wanted.ready_timeout_seconds if wanted is not None else CREATE_SECONDS
        # A long ready command must not block a worker; the pod's age decides about the timeout.
        seconds = min(allowed, CREATE_SECONDS)
        _, former = status.replaced_container(pod)
        problem = await self._envd_client.wait_ready(
            uid, pod.status.pod_ip, seconds=seconds, former=former
        )
        if problem is not None:
            if trouble := status.envd_wait_reason(self._watch.get(uid) or pod):
                problem = f"{problem}; {trouble}"
            started_at = status.started_at(pod) or self._clock.now()
            if (self._clock.now() - started_at).total_seconds() >= allowed + CREATE_SECONDS:
                raise DeadlineExceededError(f"{problem}; it was not ready within {allowed:g} s")
            raise UnavailableError(problem, retry_after_seconds=1.0)
        if wanted is not None:
            await self._envd_client.configure(uid, pod.status.pod_ip, wanted.agent)
        return instance_of(uid, self._watch.require(uid))

    async def configure(self, uid: str, agent: AgentConfig) -> None:
        await self._envd_client.configure(uid, self._watch.require(uid).status.pod_ip, agent)

    async def update_image(self, uid: str, image: str) -> Instance:
        if self._images is None:
            raise UnsupportedError(f"the image of sandbox {uid} cannot be updated: {_NO_UPDATE}")
        pod = self._watch.require(uid)
        if status.image(pod) != image:
            if instance_of(uid, pod).state is not InstanceState.RUNNING:
                raise ConflictError(
                    f"sandbox {uid} is not running: its image cannot be updated now"
                )
            main = await self._envd_client.main_container_id(pod.status.pod_ip)
            pod = await self._images.begin(pod, image, main=main)
            self._pod_cache.observe(pod)
        try:
            await self._watch.wait_running(uid)
        except InvalidError as error:
            why = await self._images.last_warning(pod)
            raise InvalidError(f"{error.message}: {why}" if why else error.message) from error
        return await self.start(uid)

    # ---- pause ---------------------------------------------------------------------------

    async def freeze(self, uid: str) -> Instance:
        pod = self._watch.require(uid)
        await self._node_agents.freeze(pod, frozen=True)
        return instance_of(uid, await self._mark_frozen(pod, frozen=True))

    async def thaw(self, uid: str) -> Instance:
        pod = self._watch.require(uid)
        await self._node_agents.freeze(pod, frozen=False)
        return instance_of(uid, await self._mark_frozen(pod, frozen=False))

    async def _mark_frozen(self, pod: Pod, *, frozen: bool) -> Pod:
        if (names.ANNOTATION_FROZEN in pod.metadata.annotations) is frozen:
            return pod
        # A kubelet writes status at any time, so the cached pod may be outdated.
        current = await self._current(pod)
        marks = {
            name: text
            for name, text in current.metadata.annotations.items()
            if name != names.ANNOTATION_FROZEN
        }
        if frozen:
            marks[names.ANNOTATION_FROZEN] = "true"
        return await self._write(with_meta(current, annotations=marks))

    async def _current(self, pod: Pod) -> Pod:
        current = await self._cluster.get(Pod, pod.key)
        if current.metadata.uid != pod.metadata.uid:
            raise NotFoundError(f"pod {pod.key} was replaced by another")
        return current

    async def _write(self, pod: Pod) -> Pod:
        written = await self._cluster.update(pod)
        self._pod_cache.observe(written)
        return written

    async def stop(self, uid: str) -> Instance:
        claims = self._claims.by_index("uid", uid)
        if not claims:
            raise UnsupportedError(
                f"sandbox {uid} has no volume claim: its files would be lost if it were stopped",
                hint="add volumeClaimTemplates to its template, or pause with Freeze",
            )
        pod = self._watch.get(uid)
        incarnation = (
            status.incarnation(pod) if pod is not None else _stopped_incarnation(claims) or 1
        )
        # The annotation is written first: from here on a missing pod means paused, not lost.
        for claim in claims:
            if claim.metadata.annotations.get(names.ANNOTATION_STOPPED) != str(incarnation):
                current = await self._cluster.get(VolumeClaim, claim.key)
                marks = {**current.metadata.annotations, names.ANNOTATION_STOPPED: str(incarnation)}
                self._claims.observe(
                    await self._cluster.update(with_meta(current, annotations=marks))
                )
        if pod is not None:
            await self._delete(pod)
        return Instance(uid=uid, state=InstanceState.STOPPED, incarnation=incarnation)

    async def restore(self, uid: str) -> Instance:
        pod = self._watch.get(uid)
        if pod is not None and not pod.is_deleting:
            instance = instance_of(uid, pod)
            if instance.state is InstanceState.FROZEN:
                raise ConflictError(f"sandbox {uid} is frozen: thaw it instead of restoring it")
        else:
            incarnation = _stopped_incarnation(self._claims.by_index("uid", uid))
            blueprint = self._blueprint_of(uid)
            if incarnation is None or blueprint is None:
                raise NotFoundError(f"there is no stopped sandbox {uid}")
            await self.policies.ensure(blueprint.egress, blueprint.namespace)
            await self._factory.create_pod(blueprint, incarnation=incarnation + 1)
        await self._watch.wait_running(uid)
        return await self.start(uid)

    async def hibernate(self, uid: str) -> Instance:
        raise UnsupportedError(_NO_MEMORY, hint="pause with Freeze, or with Stop and a volume")

    async def snapshot(
        self, uid: str, checkpoint_id: str, *, memory: bool, keep_running: bool
    ) -> StoredCheckpoint:
        raise UnsupportedError(_NO_SNAPSHOT)

    async def fork(self, uid: str, children: tuple[Blueprint, ...]) -> tuple[Instance | str, ...]:
        raise UnsupportedError(_NO_MEMORY)

    async def delete_checkpoint(self, checkpoint_id: str) -> None:
        """Do nothing: pods have no checkpoints."""

    async def checkpoints(self) -> tuple[StoredCheckpoint, ...]:
        return ()

    # ---- destroy -------------------------------------------------------------------------

    async def destroy(self, uid: str) -> None:
        if (pod := self._watch.get(uid)) is not None:
            if not pod.is_deleting:
                await self._delete(pod)
            if names.ANNOTATION_FROZEN in pod.metadata.annotations:
                # With cgroup v1 not even SIGKILL ends a frozen process.
                with contextlib.suppress(NotFoundError, UnsupportedError):
                    await self._node_agents.freeze(pod, frozen=False)
        for claim in self._claims.by_index("uid", uid):
            if status.is_owned(claim, uid) and not claim.is_deleting:
                await self._delete(claim)

    async def _delete(self, obj: Resource) -> None:
        try:
            gone = await self._cluster.delete(type(obj), obj.key, uid=obj.metadata.uid)
        except (NotFoundError, ConflictError):
            # Already gone, or replaced by another object of that name.
            return
        if isinstance(gone, Pod):
            self._pod_cache.observe(gone)

    # ---- read ----------------------------------------------------------------------------

    async def inspect(self, uid: str) -> Instance | None:
        pod = self._watch.get(uid)
        if pod is not None and not pod.is_deleting:
            return instance_of(uid, pod)
        incarnation = _stopped_incarnation(self._claims.by_index("uid", uid))
        if incarnation is not None:
            return Instance(uid=uid, state=InstanceState.STOPPED, incarnation=incarnation)
        return None if pod is None else instance_of(uid, pod)

    async def instances(self) -> tuple[Instance, ...]:
        found = {uid: instance_of(uid, pod) for uid, pod in self._watch.all().items()}
        for claim in self._claims.all():
            uid = claim.metadata.labels.get(names.LABEL_UID, "")
            incarnation = _stopped_incarnation((claim,))
            if uid and incarnation is not None and uid not in found and status.is_owned(claim, uid):
                found[uid] = Instance(uid=uid, state=InstanceState.STOPPED, incarnation=incarnation)
        return tuple(found.values())

    async def set_egress(self, uid: str, policy: EgressPolicy) -> None:
        pod = self._watch.require(uid)
        await self.policies.ensure(policy, pod.metadata.namespace)
        wanted = self.policies.name(policy)
        if pod.metadata.labels.get(names.LABEL_EGRESS) != wanted:
            current = await self._current(pod)
            labels = {**current.metadata.labels, names.LABEL_EGRESS: wanted}
            await self._write(with_meta(current, labels=labels))

    async def usage(self, uid: str) -> Usage:
        pod = self._watch.require(uid)
        found = await self._envd_client.metrics(uid, pod.status.pod_ip)
        return read_usage(found, self._clock.now())

    async def logs(
        self, uid: str, *, since: datetime | None = None, limit: int = 1000
    ) -> tuple[LogLine, ...]:
        pod = self._watch.require(uid)
        if names.ANNOTATION_FROZEN in pod.metadata.annotations:
            raise ConflictError(f"sandbox {uid} is frozen, including its envd: thaw it first")
        return await self._envd_client.logs(uid, pod.status.pod_ip, since=since, limit=limit)

    def watch(self) -> AsyncIterator[RuntimeEvent]:
        return self._watch.watch()


def _stopped_incarnation(claims: tuple[VolumeClaim, ...]) -> int | None:
    marks = [claim.metadata.annotations.get(names.ANNOTATION_STOPPED, "") for claim in claims]
    lives = [int(mark) for mark in marks if mark.isdigit()]
    return max(lives) if lives and len(lives) == len(claims) else None


_: type[Runtime] = KubernetesRuntime
