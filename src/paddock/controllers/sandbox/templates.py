"""Finds the template of a sandbox: inline, by reference, or of its checkpoint."""

from typing import Protocol

from msgspec import structs

from paddock.cache import indexes
from paddock.cache.writes import Writer
from paddock.engine.informer import Informer
from paddock.kit.errors import DeadlineExceededError, NotFoundError, UnavailableError
from paddock.resources.kinds.checkpoint import Checkpoint, CheckpointPhase
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec, TemplateRef
from paddock.resources.meta import Key
from paddock.resources.transitions.image_pin import pinned
from paddock.resources.transitions.template_tags import is_startable


class TemplateSource(Protocol):
    """Finds templates of sandboxes."""

    def of(self, sandbox: Sandbox) -> SandboxTemplateSpec:
        """Return the template. `NotFoundError` if it does not exist."""
        ...

    async def latest_of(self, sandbox: Sandbox) -> SandboxTemplateSpec:
        """Like `of`, but read a template from the store that is not in the cache yet."""
        ...

    def checkpoint_of(self, sandbox: Sandbox, template: SandboxTemplateSpec) -> str | None:
        """Return the runtime's id of the checkpoint to start from, or `None`."""
        ...


def resolve(
    templates: Informer[SandboxTemplate], reference: TemplateRef, namespace: str
) -> SandboxTemplateSpec:
    """Return the specification of a referenced template."""
    return find(templates, reference, namespace).spec


def find(
    templates: Informer[SandboxTemplate], reference: TemplateRef, namespace: str
) -> SandboxTemplate:
    """Return a referenced template. One of another namespace must be public."""
    home = reference.namespace or namespace
    found = templates.get(_key(reference, namespace))
    if found is None or (home != namespace and not found.spec.public):
        raise NotFoundError(
            f"SandboxTemplate {home}/{reference.name} was not found",
            hint="apply the template, or correct templateRef",
        )
    if not is_startable(found):
        raise NotFoundError(
            f"SandboxTemplate {home}/{reference.name} has no ready build",
            hint="build it with the tag default",
        )
    return found


def _key(reference: TemplateRef, namespace: str) -> Key:
    return Key(reference.namespace or namespace, reference.name)


class CachedTemplates:
    """Finds templates in informers."""

    def __init__(
        self,
        templates: Informer[SandboxTemplate],
        checkpoints: Informer[Checkpoint],
        write: Writer,
    ) -> None:
        self._templates = templates
        self._checkpoints = checkpoints
        self._write = write

    def of(self, sandbox: Sandbox) -> SandboxTemplateSpec:
        """Return the template. `NotFoundError` if it does not exist."""
        if sandbox.spec.template is not None:
            return sandbox.spec.template
        if sandbox.spec.template_ref is not None:
            namespace = sandbox.metadata.namespace
            found = find(self._templates, sandbox.spec.template_ref, namespace)
            return pinned(found.spec, found.status)
        if sandbox.spec.restore_from is not None:
            stored = self._stored(sandbox.spec.restore_from)[0].status
            if stored.template is not None and stored.network is not None:
                # It keeps what its source was denied.
                return structs.replace(stored.template, network=stored.network)
            if stored.template is not None:
                return stored.template
        raise NotFoundError(
            f"sandbox {sandbox.key} has neither a template, a templateRef, nor a restoreFrom"
        )

    async def latest_of(self, sandbox: Sandbox) -> SandboxTemplateSpec:
        """Like `of`, but read a template from the store that is not in the cache yet."""
        reference = sandbox.spec.template_ref
        try:
            return self.of(sandbox)
        except NotFoundError:
            if sandbox.spec.template is not None or reference is None:
                raise
        # Both may have been applied together, and the watch of templates may lag behind.
        try:
            await self._write.fetch(SandboxTemplate, _key(reference, sandbox.metadata.namespace))
        except DeadlineExceededError as error:
            raise UnavailableError(error.message) from error
        return self.of(sandbox)

    def checkpoint_of(self, sandbox: Sandbox, template: SandboxTemplateSpec) -> str | None:
        """Return the runtime's id of the checkpoint to start from, or `None`.

        A template may name a checkpoint of its own namespace, or one that a public template of
        the checkpoint's namespace names, too.
        """
        if sandbox.spec.restore_from is not None:
            return self._stored(sandbox.spec.restore_from)[0].metadata.uid
        wanted, home = template.restore_from, sandbox.metadata.namespace
        if wanted is None:
            return None
        found = self._stored(wanted)
        own = [item for item in found if item.metadata.namespace == home]
        public = (item for item in found if self._is_public(wanted, item.metadata.namespace))
        stored = own[0] if own else next(public, None)
        if stored is None:
            raise _not_stored(wanted)
        return stored.metadata.uid

    def _is_public(self, checkpoint_id: str, namespace: str) -> bool:
        users = self._templates.view(indexes.RESTORE_FROM, checkpoint_id)
        return any(one.metadata.namespace == namespace and one.spec.public for one in users)

    def _stored(self, checkpoint_id: str) -> tuple[Checkpoint, ...]:
        """Return the finished checkpoints with this id, at least one. Names do not count."""
        found = tuple(
            item
            for item in self._checkpoints.view(indexes.CHECKPOINT_ID, checkpoint_id)
            if item.status.phase is CheckpointPhase.SUCCEEDED
            and indexes.has_checkpoint_id(item, checkpoint_id)
        )
        if not found:
            raise _not_stored(checkpoint_id)
        return found


def _not_stored(checkpoint_id: str) -> NotFoundError:
    return NotFoundError(f"checkpoint {checkpoint_id!r} was not found or is not finished")
