"""Use cases of templates: list, get, publish, delete. Claims resolve them in `claims`."""

from msgspec import structs

from paddock.cache.provider import Provider
from paddock.claims.caller import Caller
from paddock.claims.template_resolver import TemplateResolver, parse_reference
from paddock.kit.errors import ConflictError, ForbiddenError, NotFoundError
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.meta import Key
from paddock.resources.rights import SHARED_NAMESPACE

KIND = SandboxTemplate.PLURAL


class Templates:
    """Templates as callers see them: their own, and the public ones of the shared namespace."""

    def __init__(self, provider: Provider, resolver: TemplateResolver) -> None:
        self._provider = provider
        self._resolver = resolver

    def list(self, caller: Caller) -> tuple[SandboxTemplate, ...]:
        """Return the templates that a caller may use, sorted by key."""
        found = (
            template
            for template in self._provider.informer(SandboxTemplate).all()
            if _is_offered(caller, template)
            and (not caller.scopes or caller.may("get", KIND, template=template.metadata.name))
        )
        return tuple(sorted(found, key=lambda item: item.key))

    def get(self, caller: Caller, reference: str) -> SandboxTemplate:
        """Return a template by name or alias; the caller's own first, then the shared ones."""
        space, name = parse_reference(reference) or ("", "")
        found = (
            template
            for template in self.list(caller)
            if name in (template.metadata.name, *template.spec.aliases)
            and space in ("", template.metadata.namespace)
        )

        def distance(template: SandboxTemplate) -> tuple[bool, bool, Key]:
            home = template.metadata.namespace
            return (home != caller.team, home != SHARED_NAMESPACE, template.key)

        nearest = min(found, key=distance, default=None)
        if nearest is None:
            raise NotFoundError(f"template '{reference}' not found")
        return nearest

    def resolve_alias(self, caller: Caller, reference: str) -> tuple[str, bool]:
        """Return the id that a reference stands for, and whether it is public.

        Whatever a sandbox can be created from has one: templates, pools, environments, snapshots.
        """
        caller.require("get", KIND, template=reference)
        target = self._resolver.find(caller, reference)
        if target is None:
            raise NotFoundError(f"template '{reference}' not found")
        if target.checkpoint is not None:
            stored = target.checkpoint
            return stored.status.checkpoint_id or stored.spec.checkpoint_id, False
        return target.template_name, target.template.public

    async def delete(self, caller: Caller, reference: str) -> None:
        """Delete a snapshot or a template of the caller's own."""
        caller.require("delete", "checkpoints", template=reference)
        checkpoint = self._resolver.checkpoint(caller, reference)
        if checkpoint is not None:
            await self._provider.write.delete(checkpoint)
            return
        template = self._own(caller, reference, "delete")
        if self._provider.pools_of_template(template.metadata.name):
            raise ConflictError(
                f"template '{reference}' is used by a pool", hint="delete the pool first"
            )
        try:
            await self._provider.write.delete(template)
        except NotFoundError as error:
            raise NotFoundError(f"template '{reference}' not found") from error

    async def publish(self, caller: Caller, reference: str, *, public: bool) -> SandboxTemplate:
        """Make a template of the caller's own public for every team, or private again."""
        template = self._own(caller, reference, "patch")
        return await self._provider.write.mutate(
            SandboxTemplate,
            template.key,
            lambda item: structs.replace(item, spec=structs.replace(item.spec, public=public)),
            uid=template.metadata.uid,
        )

    def _own(self, caller: Caller, reference: str, verb: str) -> SandboxTemplate:
        template = self.get(caller, reference)
        caller.require(verb, "templates", template=reference)
        if template.metadata.namespace != caller.team and not caller.is_operator:
            raise ForbiddenError(f"template '{reference}' belongs to another team")
        if template.metadata.namespace == SHARED_NAMESPACE and not caller.is_operator:
            raise ForbiddenError(
                f"template '{reference}' serves every team",
                hint="only an operator can change or delete shared templates",
            )
        return template


def _is_offered(caller: Caller, template: SandboxTemplate) -> bool:
    """Whether a caller's team may use a template."""
    home = template.metadata.namespace
    is_shared = home == SHARED_NAMESPACE and template.spec.public
    return home == caller.team or is_shared or caller.is_operator
