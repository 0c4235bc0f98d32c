"""Use cases of templates: list, get, publish, delete. Claims resolve them in `claims`."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from msgspec import Struct

from paddock.cache import indexes
from paddock.cache.provider import Provider
from paddock.claims.caller import Caller
from paddock.claims.template_resolver import TemplateResolver
from paddock.kit.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
)
from paddock.manager.sandboxes import paging
from paddock.manager.templates.registry import TemplateRegistry
from paddock.resources.kinds.sandbox import LABEL_TEMPLATE, Sandbox
from paddock.resources.kinds.template import LABEL_BUILT, SandboxTemplate
from paddock.resources.kinds.template_build import TemplateBuild
from paddock.resources.meta import Key
from paddock.resources.rights import SHARED_NAMESPACE
from paddock.resources.template_references import DEFAULT_TAG, parse_reference
from paddock.resources.transitions import template_tags

KIND = SandboxTemplate.PLURAL
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class TemplateView(Struct, frozen=True, kw_only=True):
    """A template with its builds."""

    template: SandboxTemplate
    builds: Mapping[str, TemplateBuild]
    """By name; empty for a template that was declared and never built."""

    @property
    def latest(self) -> TemplateBuild | None:
        """The build that was requested last."""
        return max(self.builds.values(), key=_requested_at, default=None)

    @property
    def default(self) -> TemplateBuild | None:
        """The ready build that the template stands for without a tag."""
        current = self.builds.get(self.template.status.build)
        return current or template_tags.build_of(
            self.template.status.tags, DEFAULT_TAG, self.builds
        )


class Templates:
    """Templates as callers see them: their own, and the public ones of the shared namespace."""

    def __init__(
        self, provider: Provider, resolver: TemplateResolver, registry: TemplateRegistry
    ) -> None:
        self._provider = provider
        self._resolver = resolver
        self._registry = registry

    def list(self, caller: Caller) -> tuple[SandboxTemplate, ...]:
        """Return the templates that a caller may use, sorted by key."""
        return tuple(sorted(self._offered(caller), key=lambda item: item.key))

    def _offered(self, caller: Caller) -> Iterator[SandboxTemplate]:
        return (
            template
            for template in self._provider.informer(SandboxTemplate).all()
            if not template.is_deleting
            and _is_offered(caller, template)
            and (not caller.scopes or caller.may("get", KIND, template=template.metadata.name))
        )

    def page(
        self, caller: Caller, *, limit: int, token: str | None
    ) -> tuple[tuple[SandboxTemplate, ...], str | None]:
        """Return one page of the templates, newest first, and the token of the next page."""
        found = (
            ((item.metadata.creation_timestamp or _EPOCH, f"{item.key}"), item)
            for item in self._offered(caller)
        )
        return paging.page(found, limit=limit, token=token, ascending=False)

    def view(self, template: SandboxTemplate) -> TemplateView:
        """Return a template with its builds."""
        builds = self._provider.builds_of_template(template.key)
        return TemplateView(template=template, builds=builds)

    def get(self, caller: Caller, reference: str) -> SandboxTemplate:
        """Return a template by name or alias; the caller's own first, then the shared ones."""
        wanted = parse_reference(reference)
        name = wanted.name if wanted and wanted.tag == DEFAULT_TAG else ""
        space = wanted.space if wanted else ""
        found = (
            template
            for template in self._provider.view(SandboxTemplate, indexes.TEMPLATE_ID, name)
            if not template.is_deleting
            and _is_offered(caller, template)
            and space in ("", template.metadata.namespace)
            and (not caller.scopes or caller.may("get", KIND, template=template.metadata.name))
        )

        def distance(template: SandboxTemplate) -> tuple[bool, bool, bool, Key]:
            home, is_alias = template.metadata.namespace, template.metadata.name != name
            return (home != caller.team, home != SHARED_NAMESPACE, is_alias, template.key)

        nearest = min(found, key=distance, default=None)
        if nearest is None:
            raise NotFoundError(f"template '{reference}' not found")
        return nearest

    def resolve_alias(self, caller: Caller, reference: str) -> tuple[str, bool]:
        """Return the id that a reference stands for, and whether it is public.

        Whatever a sandbox can be created from has one: templates, pools, environments, snapshots.
        A name without a tag is known as soon as a build of it is requested.
        """
        caller.require("get", KIND, template=reference)
        wanted = parse_reference(reference)
        if wanted is not None and ":" not in reference:
            registered = self._registry.named(wanted.space or caller.team, wanted.name)
            if registered is not None and _is_offered(caller, registered):
                return registered.metadata.name, registered.spec.public
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
        template = self.get(caller, reference)
        is_built = LABEL_BUILT in template.metadata.labels
        caller.require("delete", "templatebuilds" if is_built else "templates", template=reference)
        self._check_own(caller, template, reference)
        self._check_unused(template, reference)
        try:
            await self._provider.write.delete(template)
        except NotFoundError as error:
            raise NotFoundError(f"template '{reference}' not found") from error

    def _check_unused(self, template: SandboxTemplate, reference: str) -> None:
        home = template.metadata.namespace
        for pool in self._provider.pools_of_template(template.metadata.name):
            wanted = pool.spec.template_ref
            if ((wanted and wanted.namespace) or pool.metadata.namespace) != home:
                continue
            raise ConflictError(
                f"template '{reference}' is used by a pool", hint="delete the pool first"
            )
        if LABEL_BUILT not in template.metadata.labels:
            # Sandboxes of a declared template have their own copy of its specification.
            return
        for sandbox in self._provider.all(Sandbox, namespace=home):
            is_of = sandbox.metadata.labels.get(LABEL_TEMPLATE) == template.metadata.name
            if is_of and sandbox.spec.claim is not None and not sandbox.is_deleting:
                raise InvalidError(
                    f"cannot delete template '{reference}' because there are running or paused "
                    "sandboxes using it"
                )

    async def publish(self, caller: Caller, reference: str, *, public: bool) -> SandboxTemplate:
        """Make a template of the caller's own public for every team, or private again."""
        template = self.get(caller, reference)
        caller.require("patch", "templates", template=reference)
        if template.metadata.namespace == SHARED_NAMESPACE and public:
            self._check_shared(caller, reference)
        self._check_own(caller, template, reference)
        return await self._registry.set_public(template, public=public)

    def _check_own(self, caller: Caller, template: SandboxTemplate, reference: str) -> None:
        home = template.metadata.namespace
        if home != caller.team and not caller.is_operator:
            raise ForbiddenError(f"template '{reference}' belongs to another team")
        is_private = LABEL_BUILT in template.metadata.labels and not template.spec.public
        if home == SHARED_NAMESPACE and not is_private:
            self._check_shared(caller, reference)

    @staticmethod
    def _check_shared(caller: Caller, reference: str) -> None:
        if not caller.is_operator:
            raise ForbiddenError(
                f"template '{reference}' serves every team",
                hint="only an operator can change or delete shared templates",
            )


def _is_offered(caller: Caller, template: SandboxTemplate) -> bool:
    """Whether a caller's team may use a template."""
    home = template.metadata.namespace
    is_shared = home == SHARED_NAMESPACE and template.spec.public
    return home == caller.team or is_shared or caller.is_operator


def _requested_at(build: TemplateBuild) -> tuple[datetime, str]:
    return (build.metadata.creation_timestamp or _EPOCH, build.metadata.name)
