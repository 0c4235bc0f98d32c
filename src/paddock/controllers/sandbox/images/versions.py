"""Records which version of its image the first sandbox of a template has started from."""

import contextlib
from collections.abc import Callable

from msgspec import structs

from paddock.cache.writes import Writer
from paddock.engine.informer import Informer
from paddock.kit.errors import NotFoundError
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import LABEL_POOL, LABEL_TEMPLATE, Sandbox
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import Key, R
from paddock.resources.transitions.image_pin import with_digest
from paddock.runtime.blueprint import has_own_image
from paddock.runtime.port import Instance


class ImageVersions:
    """Writes `imageDigest` of templates, and of pools with a template of their own."""

    def __init__(
        self,
        templates: Informer[SandboxTemplate],
        pools: Informer[SandboxPool],
        write: Writer,
    ) -> None:
        self._templates = templates
        self._pools = pools
        self._write = write

    async def record(
        self, sandbox: Sandbox, template: SandboxTemplateSpec, instance: Instance
    ) -> None:
        """Record the version that a sandbox runs, unless its template has one already."""
        if not instance.image_digest or has_own_image(sandbox, template):
            return
        image, digest = template.image, instance.image_digest

        def of_template(found: SandboxTemplate) -> SandboxTemplate:
            status = with_digest(found.spec, found.status, image, digest)
            return structs.replace(found, status=status)

        def of_pool(found: SandboxPool) -> SandboxPool:
            if found.spec.template is None:
                return found
            status = with_digest(found.spec.template, found.status, image, digest)
            return structs.replace(found, status=status)

        owner = self._owner(sandbox)
        if isinstance(owner, SandboxTemplate):
            await self._change(owner, of_template)
        elif owner is not None:
            await self._change(owner, of_pool)

    def _owner(self, sandbox: Sandbox) -> SandboxTemplate | SandboxPool | None:
        """Return the object that new sandboxes like this one get their template from."""
        namespace, labels = sandbox.metadata.namespace, sandbox.metadata.labels
        reference = sandbox.spec.template_ref
        if reference is None and LABEL_POOL in labels:
            pool = self._pools.get(Key(namespace, labels[LABEL_POOL]))
            if pool is not None and pool.spec.template is not None:
                return pool
            reference = pool.spec.template_ref if pool is not None else None
        if reference is not None:
            return self._templates.get(Key(reference.namespace or namespace, reference.name))
        return self._templates.get(Key(namespace, labels.get(LABEL_TEMPLATE, "")))

    async def _change(self, owner: R, change: Callable[[R], R]) -> None:
        if change(owner) == owner:
            return
        with contextlib.suppress(NotFoundError):  # it was deleted meanwhile
            await self._write.mutate(
                type(owner), owner.key, change, uid=owner.metadata.uid, is_status=True
            )
