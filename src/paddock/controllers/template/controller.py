"""Reports the revision of templates: the one that their pools roll to."""

from msgspec import structs

from paddock.cache.writes import Writer
from paddock.controllers.pool.factory import revision
from paddock.engine.controller import Done, Gone, Result
from paddock.engine.informer import Informer
from paddock.kit.errors import NotFoundError
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.meta import Key
from paddock.resources.transitions.template_tags import is_startable


class TemplateController:
    """Writes `status.revision` and `status.observedGeneration`."""

    def __init__(self, templates: Informer[SandboxTemplate], write: Writer) -> None:
        self._templates = templates
        self._write = write

    async def reconcile(self, key: Key) -> Result:
        """Report the revision of one template, if it is not the one that the status has."""
        template = self._templates.get(key)
        if template is None:
            return Gone()
        if template.is_deleting or _observed(template) == template:
            return Done()
        try:
            await self._write.mutate(
                SandboxTemplate, key, _observed, uid=template.metadata.uid, is_status=True
            )
        except NotFoundError:
            return Gone()
        return Done()


def _observed(template: SandboxTemplate) -> SandboxTemplate:
    """Return the template with the status that its specification has."""
    status = structs.replace(
        template.status,
        observed_generation=template.metadata.generation,
        # What was registered for a build, and is not built, starts no sandboxes.
        revision=revision(template.spec) if is_startable(template) else "",
    )
    return structs.replace(template, status=status)
