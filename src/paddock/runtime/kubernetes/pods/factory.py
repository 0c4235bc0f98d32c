"""Pods and volume claims, made for a sandbox or found to be its own; never a stranger's."""

from collections.abc import Callable

from paddock.kit.errors import AlreadyExistsError, InvalidError, NotFoundError, UnavailableError
from paddock.resources import tokens
from paddock.resources.kinds.pods import Pod, VolumeClaim
from paddock.resources.meta import Key, Resource
from paddock.runtime.kubernetes.cluster import Cluster, Pods
from paddock.runtime.kubernetes.pods import status
from paddock.runtime.kubernetes.pods.render import PodSettings, render, volume_claims
from paddock.runtime.port import Blueprint


class Making:
    """Makes what a sandbox consists of on a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        pods: Pods,
        settings: PodSettings,
        control_token: Callable[[str], str],
    ) -> None:
        self._cluster = cluster
        self._picture = pods
        self._settings = settings
        self._control_token = control_token

    async def pod(self, blueprint: Blueprint, *, incarnation: int) -> Pod:
        """Make a sandbox's pod, or take over the one that was made for it."""
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
        # What the server answered is shown until the watch has caught up.
        pod = Pod(metadata=made.metadata)
        self._picture.observe(pod)
        return pod

    async def _adopt(self, blueprint: Blueprint) -> Pod:
        """Take over a pod of this name if it was made for this very sandbox."""
        try:
            pod = await self._cluster.get(Pod, Key(blueprint.namespace, blueprint.name))
        except NotFoundError as error:
            # Not the sandbox is missing: what stood in its way is.
            raise UnavailableError(
                f"an earlier pod {blueprint.name} has just gone", retry_after_seconds=0.1
            ) from error
        if not status.is_owned(pod, blueprint.uid):
            if pod.is_deleting:
                raise UnavailableError(
                    f"an earlier pod {blueprint.name} is still ending", retry_after_seconds=0.5
                )
            raise InvalidError(
                f"a pod named {blueprint.name} is there and does not belong to this sandbox",
                hint="delete that pod, or name the sandbox differently",
            )
        if pod.is_deleting:
            raise UnavailableError(
                f"the former pod of sandbox {blueprint.name} is still ending",
                retry_after_seconds=0.5,
            )
        self._picture.observe(pod)
        return pod

    async def claims(self, blueprint: Blueprint) -> None:
        """Make a sandbox's volume claims, where they are not there yet."""
        for manifest in volume_claims(blueprint):
            if await self._create_once(manifest):
                continue
            try:
                claim = await self._cluster.get(VolumeClaim, manifest.key)
            except NotFoundError as error:
                raise UnavailableError(
                    f"an earlier volume claim {manifest.metadata.name} has just gone",
                    retry_after_seconds=0.1,
                ) from error
            if not status.is_owned(claim, blueprint.uid):
                raise InvalidError(
                    f"a volume claim named {manifest.metadata.name} is there and does not belong "
                    f"to sandbox {blueprint.name}",
                    hint="delete that claim, or name the sandbox differently",
                )

    async def _create_once(self, obj: Resource) -> bool:
        try:
            await self._cluster.create(obj)
        except AlreadyExistsError:
            return False
        return True
