"""Create the pod and volume claims of a sandbox, or adopt those it owns already."""

from collections.abc import Callable

from paddock.kit.errors import AlreadyExistsError, InvalidError, NotFoundError, UnavailableError
from paddock.resources import tokens
from paddock.resources.kinds.pods import Pod, VolumeClaim
from paddock.resources.meta import Key, Resource
from paddock.runtime.kubernetes.cluster import Cluster, PodCache
from paddock.runtime.kubernetes.pods import status
from paddock.runtime.kubernetes.pods.render import PodSettings, render, volume_claims
from paddock.runtime.port import Blueprint


class PodFactory:
    """Creates pods and volume claims."""

    def __init__(
        self,
        cluster: Cluster,
        pods: PodCache,
        settings: PodSettings,
        control_token: Callable[[str], str],
    ) -> None:
        self._cluster = cluster
        self._pod_cache = pods
        self._settings = settings
        self._control_token = control_token

    async def create_pod(self, blueprint: Blueprint, *, incarnation: int) -> Pod:
        """Create the pod of a sandbox, or adopt the existing one it owns."""
        manifest = render(
            blueprint,
            self._settings,
            control_hash=tokens.hashed(self._control_token(blueprint.uid)),
            incarnation=incarnation,
        )
        try:
            made = await self._cluster.create(manifest)
        except AlreadyExistsError:
            return await self._adopt(blueprint)
        # Store the response in the cache until the watch delivers the pod.
        pod = Pod(metadata=made.metadata)
        self._pod_cache.observe(pod)
        return pod

    async def _adopt(self, blueprint: Blueprint) -> Pod:
        """Return the existing pod of this name if the sandbox owns it."""
        try:
            pod = await self._cluster.get(Pod, Key(blueprint.namespace, blueprint.name))
        except NotFoundError as error:
            # The conflicting pod was deleted in between: retry.
            raise UnavailableError(
                f"an earlier pod {blueprint.name} was just deleted", retry_after_seconds=0.1
            ) from error
        if not status.is_owned(pod, blueprint.uid):
            if pod.is_deleting:
                raise UnavailableError(
                    f"an earlier pod {blueprint.name} is still terminating", retry_after_seconds=0.5
                )
            raise InvalidError(
                f"a pod named {blueprint.name} exists and does not belong to this sandbox",
                hint="delete that pod, or name the sandbox differently",
            )
        if pod.is_deleting:
            raise UnavailableError(
                f"the previous pod of sandbox {blueprint.name} is still terminating",
                retry_after_seconds=0.5,
            )
        self._pod_cache.observe(pod)
        return pod

    async def create_claims(self, blueprint: Blueprint) -> None:
        """Create the volume claims of a sandbox unless they exist."""
        for manifest in volume_claims(blueprint):
            if await self._create_once(manifest):
                continue
            try:
                claim = await self._cluster.get(VolumeClaim, manifest.key)
            except NotFoundError as error:
                raise UnavailableError(
                    f"an earlier volume claim {manifest.metadata.name} was just deleted",
                    retry_after_seconds=0.1,
                ) from error
            if not status.is_owned(claim, blueprint.uid):
                raise InvalidError(
                    f"a volume claim named {manifest.metadata.name} exists and does not belong "
                    f"to sandbox {blueprint.name}",
                    hint="delete that claim, or name the sandbox differently",
                )

    async def _create_once(self, obj: Resource) -> bool:
        try:
            await self._cluster.create(obj)
        except AlreadyExistsError:
            return False
        return True
