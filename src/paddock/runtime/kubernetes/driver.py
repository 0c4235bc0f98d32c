"""The `kubernetes` driver: performs sandbox operations as writes to a cluster and orders to envd.

It keeps nothing of its own: what is, is read from pods (`presence`) and volume claims; what should
be, from the blueprint (`making`). So any process that leads can go on where another stopped.
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
from paddock.resources.meta import Resource, with_meta
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.cluster import Asking, BlueprintOf, Claims, Cluster, Pods
from paddock.runtime.kubernetes.envd_client import Envds, read_usage
from paddock.runtime.kubernetes.network.policies import Policies
from paddock.runtime.kubernetes.node_agents import Nodes
from paddock.runtime.kubernetes.pods import status
from paddock.runtime.kubernetes.pods.factory import Making
from paddock.runtime.kubernetes.pods.image_update import ImageUpdates
from paddock.runtime.kubernetes.pods.render import PodSettings
from paddock.runtime.kubernetes.pods.watch import CREATE_SECONDS, Presence, instance_of
from paddock.runtime.port import (
    AgentConfig,
    Blueprint,
    Capabilities,
    EgressPolicy,
    Instance,
    InstanceState,
    LogLine,
    Runtime,
    RuntimeEvent,
    StoredCheckpoint,
    Usage,
)

_NO_MEMORY = "pods cannot store their memory"
_NO_UPDATE = "pods are not written to directly here"
_NO_SNAPSHOT = "pods cannot store their files; pause with Stop and a volume claim keeps them"


class KubernetesRuntime:
    """A `Runtime` whose sandboxes are pods."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        pods: Pods,
        claims: Claims,
        envds: Envds,
        nodes: Nodes,
        settings: PodSettings,
        control_token: Callable[[str], str],
        blueprint_of: BlueprintOf,
        clock: Clock,
        server: Asking | None = None,
    ) -> None:
        self._images = ImageUpdates(server) if server is not None else None
        self._cluster = cluster
        self._picture = pods
        self._claims = claims
        self._envds = envds
        self._nodes = nodes
        self._blueprint_of = blueprint_of
        self._clock = clock
        self._presence = Presence(pods)
        self._making = Making(cluster, pods, settings, control_token)
        self.policies = Policies(
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
        can_freeze = self._nodes.are_installed
        reasons = {
            "can_checkpoint": _NO_MEMORY,
            "can_snapshot_files": _NO_SNAPSHOT,
            "can_stop": "only sandboxes of templates with volumeClaimTemplates keep files",
            "can_limit_pids": "the kubelet's own limit holds (podPidsLimit)",
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

    # ---- making --------------------------------------------------------------------------

    async def create(self, blueprint: Blueprint) -> Instance:
        if blueprint.checkpoint_id is not None:
            raise UnsupportedError(
                f"sandbox {blueprint.name} starts from a checkpoint: {_NO_MEMORY}"
            )
        pod = self._presence.get(blueprint.uid)
        if pod is None or pod.is_deleting:
            await self.policies.ensure(blueprint.egress, blueprint.namespace)
            await self._making.claims(blueprint)
            pod = await self._making.pod(blueprint, incarnation=1)
        return await self._presence.until_answering(blueprint.uid)

    async def start(self, uid: str) -> Instance:
        """Wait for the ready command; the sidecar runs both commands by itself."""
        pod = self._presence.pod(uid)
        wanted = self._blueprint_of(uid)
        allowed = wanted.ready_timeout_seconds if wanted is not None else CREATE_SECONDS
        # A long ready command must not hold a worker; the pod's age is what counts.
        seconds = min(allowed, CREATE_SECONDS)
        _, former = status.replaced(pod)
        problem = await self._envds.wait_ready(
            uid, pod.status.pod_ip, seconds=seconds, former=former
        )
        if problem is not None:
            if trouble := status.daemon_trouble(self._presence.get(uid) or pod):
                problem = f"{problem}; {trouble}"
            began = status.began(pod) or self._clock.now()
            if (self._clock.now() - began).total_seconds() >= allowed + CREATE_SECONDS:
                raise DeadlineExceededError(f"{problem}; it had {allowed:g} s to get ready")
            raise UnavailableError(problem, retry_after_seconds=1.0)
        if wanted is not None:
            await self._envds.configure(uid, pod.status.pod_ip, wanted.agent)
        return instance_of(uid, self._presence.pod(uid))

    async def configure(self, uid: str, agent: AgentConfig) -> None:
        await self._envds.configure(uid, self._presence.pod(uid).status.pod_ip, agent)

    async def update_image(self, uid: str, image: str) -> Instance:
        if self._images is None:
            raise UnsupportedError(f"sandbox {uid} keeps its image: {_NO_UPDATE}")
        pod = self._presence.pod(uid)
        if status.image(pod) != image:
            if instance_of(uid, pod).state is not InstanceState.RUNNING:
                raise ConflictError(f"sandbox {uid} does not run: its image stays for now")
            main = await self._envds.main_of(pod.status.pod_ip)
            pod = await self._images.begin(pod, image, main=main)
            self._picture.observe(pod)
        try:
            await self._presence.until_answering(uid)
        except InvalidError as error:
            why = await self._images.why_not(pod)
            raise InvalidError(f"{error.message}: {why}" if why else error.message) from error
        return await self.start(uid)

    # ---- pausing -------------------------------------------------------------------------

    async def freeze(self, uid: str) -> Instance:
        pod = self._presence.pod(uid)
        await self._nodes.freeze(pod, frozen=True)
        return instance_of(uid, await self._mark_frozen(pod, frozen=True))

    async def thaw(self, uid: str) -> Instance:
        pod = self._presence.pod(uid)
        await self._nodes.freeze(pod, frozen=False)
        return instance_of(uid, await self._mark_frozen(pod, frozen=False))

    async def _mark_frozen(self, pod: Pod, *, frozen: bool) -> Pod:
        if (names.ANNOTATION_FROZEN in pod.metadata.annotations) is frozen:
            return pod
        # A kubelet writes status at any time, so what the picture shows may be old.
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
        self._picture.observe(written)
        return written

    async def stop(self, uid: str) -> Instance:
        claims = self._claims.by_index("uid", uid)
        if not claims:
            raise UnsupportedError(
                f"sandbox {uid} has no volume: stopping it would lose its files",
                hint="give its template volumeClaimTemplates, or pause with Freeze",
            )
        pod = self._presence.get(uid)
        life = status.incarnation(pod) if pod is not None else _stopped_life(claims) or 1
        # The mark goes first: from here on a missing pod is a pause and not a loss.
        for claim in claims:
            if claim.metadata.annotations.get(names.ANNOTATION_STOPPED) != str(life):
                current = await self._cluster.get(VolumeClaim, claim.key)
                marks = {**current.metadata.annotations, names.ANNOTATION_STOPPED: str(life)}
                self._claims.observe(
                    await self._cluster.update(with_meta(current, annotations=marks))
                )
        if pod is not None:
            await self._delete(pod)
        return Instance(uid=uid, state=InstanceState.STOPPED, incarnation=life)

    async def restore(self, uid: str) -> Instance:
        pod = self._presence.get(uid)
        if pod is not None and not pod.is_deleting:
            instance = instance_of(uid, pod)
            if instance.state is InstanceState.FROZEN:
                raise ConflictError(f"sandbox {uid} is frozen: thaw it instead of restoring it")
        else:
            life = _stopped_life(self._claims.by_index("uid", uid))
            blueprint = self._blueprint_of(uid)
            if life is None or blueprint is None:
                raise NotFoundError(f"no stopped sandbox {uid} is known")
            await self.policies.ensure(blueprint.egress, blueprint.namespace)
            await self._making.pod(blueprint, incarnation=life + 1)
        await self._presence.until_answering(uid)
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
        """There are none."""

    async def checkpoints(self) -> tuple[StoredCheckpoint, ...]:
        return ()

    # ---- ending --------------------------------------------------------------------------

    async def destroy(self, uid: str) -> None:
        if (pod := self._presence.get(uid)) is not None:
            if not pod.is_deleting:
                await self._delete(pod)
            if names.ANNOTATION_FROZEN in pod.metadata.annotations:
                # Where cgroups are of the first version not even a kill reaches the frozen.
                with contextlib.suppress(NotFoundError, UnsupportedError):
                    await self._nodes.freeze(pod, frozen=False)
        for claim in self._claims.by_index("uid", uid):
            if status.is_owned(claim, uid) and not claim.is_deleting:
                await self._delete(claim)

    async def _delete(self, obj: Resource) -> None:
        try:
            gone = await self._cluster.delete(type(obj), obj.key, uid=obj.metadata.uid)
        except (NotFoundError, ConflictError):
            # Gone already, or another of that name, which is not ours to delete.
            return
        if isinstance(gone, Pod):
            self._picture.observe(gone)

    # ---- looking -------------------------------------------------------------------------

    async def inspect(self, uid: str) -> Instance | None:
        pod = self._presence.get(uid)
        if pod is not None and not pod.is_deleting:
            return instance_of(uid, pod)
        life = _stopped_life(self._claims.by_index("uid", uid))
        if life is not None:
            return Instance(uid=uid, state=InstanceState.STOPPED, incarnation=life)
        return None if pod is None else instance_of(uid, pod)

    async def instances(self) -> tuple[Instance, ...]:
        found = {uid: instance_of(uid, pod) for uid, pod in self._presence.all().items()}
        for claim in self._claims.all():
            uid = claim.metadata.labels.get(names.LABEL_UID, "")
            life = _stopped_life((claim,))
            if uid and life is not None and uid not in found and status.is_owned(claim, uid):
                found[uid] = Instance(uid=uid, state=InstanceState.STOPPED, incarnation=life)
        return tuple(found.values())

    async def set_egress(self, uid: str, policy: EgressPolicy) -> None:
        pod = self._presence.pod(uid)
        await self.policies.ensure(policy, pod.metadata.namespace)
        wanted = self.policies.name(policy)
        if pod.metadata.labels.get(names.LABEL_EGRESS) != wanted:
            current = await self._current(pod)
            labels = {**current.metadata.labels, names.LABEL_EGRESS: wanted}
            await self._write(with_meta(current, labels=labels))

    async def usage(self, uid: str) -> Usage:
        pod = self._presence.pod(uid)
        found = await self._envds.metrics(uid, pod.status.pod_ip)
        return read_usage(found, self._clock.now())

    async def logs(
        self, uid: str, *, since: datetime | None = None, limit: int = 1000
    ) -> tuple[LogLine, ...]:
        pod = self._presence.pod(uid)
        if names.ANNOTATION_FROZEN in pod.metadata.annotations:
            raise ConflictError(f"sandbox {uid} is frozen, and its daemon with it: thaw it first")
        return await self._envds.logs(uid, pod.status.pod_ip, since=since, limit=limit)

    def watch(self) -> AsyncIterator[RuntimeEvent]:
        return self._presence.watch()


def _stopped_life(claims: tuple[VolumeClaim, ...]) -> int | None:
    marks = [claim.metadata.annotations.get(names.ANNOTATION_STOPPED, "") for claim in claims]
    lives = [int(mark) for mark in marks if mark.isdigit()]
    return max(lives) if lives and len(lives) == len(claims) else None


_: type[Runtime] = KubernetesRuntime
