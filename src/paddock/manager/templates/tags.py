"""Use cases of tags: assign, remove and list them."""

from collections.abc import Callable, Sequence

from msgspec import structs

from paddock.cache.provider import Provider
from paddock.claims.caller import Caller
from paddock.kit.clock import Clock
from paddock.kit.errors import InvalidError, NotFoundError
from paddock.manager.templates.names import parse_tags
from paddock.manager.templates.registry import TemplateRegistry
from paddock.resources.kinds.template import SandboxTemplate, TemplateTag
from paddock.resources.kinds.template_build import TemplateBuild
from paddock.resources.meta import ObjectMeta
from paddock.resources.template_references import DEFAULT_TAG, parse_reference
from paddock.resources.transitions import template_tags
from paddock.resources.transitions.template_build import with_build, with_build_status
from paddock.resources.transitions.template_tags import MAX_TAGS

RESOURCE = "templatebuilds"


class TemplateTags:
    """Tags of the caller's templates."""

    def __init__(self, provider: Provider, registry: TemplateRegistry, clock: Clock) -> None:
        self._provider = provider
        self._registry = registry
        self._clock = clock

    async def assign(
        self, caller: Caller, target: str, tags: Sequence[str]
    ) -> tuple[TemplateBuild, tuple[str, ...]]:
        """Assign tags to the build that `name[:tag]` stands for; return the build and the tags."""
        wanted = parse_reference(target.strip())
        if wanted is None:
            raise InvalidError(f"Invalid target: {target!r} is not [namespace/]name[:tag]")
        new = parse_tags(tags)
        if not new:
            raise InvalidError("at least one tag is required")
        template = self._registry.own(caller, target.strip())
        caller.require("create", RESOURCE, template=template.metadata.name)
        self._check(caller, template, new)
        builds = self._provider.builds_of_template(template.key)
        build = template_tags.build_of(template.status.tags, wanted.tag, builds)
        if build is None:
            raise NotFoundError(f"tag '{wanted.tag}' does not exist for template '{wanted.name}'")
        await self.add(template, new, build.metadata.name)
        if DEFAULT_TAG in new:
            await self._apply(template, build)
        return build, new

    async def _apply(self, template: SandboxTemplate, build: TemplateBuild) -> None:
        """Write the result of a build to its template, as its controller does for a new build."""
        await self._provider.write.mutate(
            SandboxTemplate,
            template.key,
            lambda now: with_build(now, build),
            uid=template.metadata.uid,
        )
        await self._provider.write.mutate(
            SandboxTemplate,
            template.key,
            lambda now: with_build_status(now, build),
            uid=template.metadata.uid,
            is_status=True,
        )

    async def add(self, template: SandboxTemplate, tags: Sequence[str], build: str) -> None:
        """Record that tags stand for a build from now on, or once it is ready."""

        await self._change(template, lambda now: self._assigned(now, tags, build))

    def check_room(self, team: str, alias: str, tags: Sequence[str], build: str) -> None:
        """Raise `InvalidError` if the tags of a new build are too many for its template."""
        template = self._registry.named(team, alias) or SandboxTemplate(
            metadata=ObjectMeta(name=alias, namespace=team)
        )
        self._assigned(template, tags, build)

    async def remove(self, caller: Caller, name: str, tags: Sequence[str]) -> None:
        """Remove tags from a template. Its builds stay."""
        if ":" in name:
            raise InvalidError("the name must not have a tag: list the tags to remove in 'tags'")
        removed = parse_tags(tags)
        if not removed:
            raise InvalidError("at least one tag is required")
        if DEFAULT_TAG in removed:
            raise InvalidError(f"the tag '{DEFAULT_TAG}' cannot be removed")
        template = self._registry.own(caller, name.strip())
        caller.require("delete", RESOURCE, template=template.metadata.name)
        self._check(caller, template, removed)
        await self._change(template, lambda now: template_tags.without(now.status.tags, removed))

    def list(self, caller: Caller, reference: str) -> tuple[TemplateTag, ...]:
        """Return the tags of a template with the builds that they stand for."""
        template = self._registry.own(caller, reference)
        caller.require("get", RESOURCE, template=template.metadata.name)
        builds = self._provider.builds_of_template(template.key)
        return template_tags.effective(template.status.tags, builds)

    def _check(self, caller: Caller, template: SandboxTemplate, tags: Sequence[str]) -> None:
        """Raise `ForbiddenError` unless the caller may change what these tags stand for."""
        if DEFAULT_TAG in tags or template.spec.public:
            self._registry.check_rebuild(caller, template, template.metadata.name)

    def _assigned(
        self, template: SandboxTemplate, tags: Sequence[str], build: str
    ) -> tuple[TemplateTag, ...]:
        """Return the assignments with new ones; `InvalidError` if these are too many tags."""
        builds = self._provider.builds_of_template(template.key)
        found = template_tags.assigned(
            template.status.tags, tags, build, builds, now=self._clock.now()
        )
        if len({item.tag for item in found}) > MAX_TAGS:
            raise InvalidError(f"template '{template.metadata.name}' has {MAX_TAGS} tags already")
        return found

    async def _change(
        self,
        template: SandboxTemplate,
        changed: Callable[[SandboxTemplate], tuple[TemplateTag, ...]],
    ) -> None:
        await self._provider.write.mutate(
            SandboxTemplate,
            template.key,
            lambda now: structs.replace(now, status=structs.replace(now.status, tags=changed(now))),
            uid=template.metadata.uid,
            is_status=True,
        )
