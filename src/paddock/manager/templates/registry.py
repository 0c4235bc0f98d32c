"""The names of templates: who has one, and which template a build belongs to.

Templates, snapshots, pools and environments of a team share one name space, because a sandbox can
be created from each of them by its name.
"""

from msgspec import structs

from paddock.cache import indexes
from paddock.cache.provider import Provider
from paddock.claims.caller import Caller
from paddock.kit.errors import (
    AlreadyExistsError,
    ForbiddenError,
    NotFoundError,
    QuotaExceededError,
)
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.env import SandboxEnv
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.template import (
    LABEL_BUILT,
    Resources,
    SandboxTemplate,
    SandboxTemplateSpec,
)
from paddock.resources.kinds.template_build import TemplateBuild
from paddock.resources.meta import Key, ObjectMeta
from paddock.resources.rights import SHARED_NAMESPACE
from paddock.resources.template_references import object_name, parse_reference


class TemplateRegistry:
    """Finds and registers the templates of a team by name."""

    def __init__(self, provider: Provider, *, max_templates: int) -> None:
        """`max_templates` of a team; builds create no more."""
        self._provider = provider
        self._max_templates = max_templates

    def named(self, team: str, name: str) -> SandboxTemplate | None:
        """Return a team's template by its name or an alias."""
        found = [
            item
            for item in self._provider.view(SandboxTemplate, indexes.TEMPLATE_ID, name)
            if item.metadata.namespace == team and not item.is_deleting
        ]
        # The name of an object precedes an alias.
        return min(found, key=lambda item: (item.metadata.name != name, item.key), default=None)

    def own(self, caller: Caller, reference: str) -> SandboxTemplate:
        """Return a template of the caller's team by a reference without a tag."""
        wanted = parse_reference(reference)
        home = (wanted.space or caller.team) if wanted else caller.team
        found = self.named(home, wanted.name) if wanted else None
        if found is None or (home != caller.team and not caller.is_operator):
            raise NotFoundError(f"template '{reference}' not found")
        return found

    def build(self, caller: Caller, reference: str, build_id: str) -> TemplateBuild | None:
        """Return a build of a template, `None` if there is none.

        `ForbiddenError` if it belongs to another team: its id is random, so the caller was told.
        """
        for build in self._provider.view(TemplateBuild, indexes.NAME, build_id):
            home = build.metadata.namespace
            if not self._is_of(build, reference):
                continue
            if home != caller.team and not caller.is_operator:
                raise ForbiddenError(f"build '{build_id}' belongs to another team")
            return build
        return None

    def _is_of(self, build: TemplateBuild, reference: str) -> bool:
        home, name = build.metadata.namespace, build.spec.template_name
        if reference in (name, f"{home}/{name}"):
            return True
        template = self._provider.get(SandboxTemplate, Key(home, name))
        wanted = parse_reference(reference)
        return (
            template is not None
            and wanted is not None
            and wanted.space in ("", home)
            and wanted.name in template.spec.aliases
        )

    async def ensure(self, caller: Caller, alias: str, resources: Resources) -> SandboxTemplate:
        """Return the team's template of this name; create it if there is none."""
        found = self.named(caller.team, alias)
        if found is None:
            self.check_free(caller.team, alias)
            self._check_count(caller.team)
            found = await self._create(caller.team, alias, resources)
        self.check_rebuild(caller, found, alias)
        return found

    def _check_count(self, team: str) -> None:
        """Raise `QuotaExceededError` if a team has as many templates as builds create."""
        if len(self._provider.all(SandboxTemplate, namespace=team)) >= self._max_templates:
            raise QuotaExceededError(
                f"team '{team}' has {self._max_templates} templates, as many as the setting "
                "templates_per_team allows",
                hint="delete templates that are not needed, or raise the setting",
            )

    async def _create(self, team: str, alias: str, resources: Resources) -> SandboxTemplate:
        name = object_name(alias)
        new = SandboxTemplate(
            metadata=ObjectMeta(name=name, namespace=team, labels={LABEL_BUILT: "true"}),
            spec=SandboxTemplateSpec(
                resources=resources,
                aliases=() if name == alias else (alias,),
                public=False,
            ),
        )
        try:
            return await self._provider.write.create(new)
        except AlreadyExistsError:
            found = await self._provider.write.fetch(SandboxTemplate, new.key)
            if found is None or found.is_deleting or alias not in (name, *found.spec.aliases):
                raise AlreadyExistsError(
                    f"the name '{alias}' is used by another template",
                    hint="wait until its deletion is complete, or choose another name",
                ) from None
            return found

    def check_free(self, team: str, name: str, *, for_snapshot: bool = False) -> None:
        """Raise `AlreadyExistsError` if something else has this name."""
        key = Key(team, name)
        other = ""
        if self._provider.get(SandboxEnv, key) is not None:
            other = "an environment"
        elif self._provider.get(SandboxPool, key) is not None:
            other = "a pool"
        elif for_snapshot and self.named(team, name) is not None:
            other = "a template"
        elif not for_snapshot and self._has_snapshot(team, name):
            other = "a snapshot"
        if other:
            raise AlreadyExistsError(
                f"the name '{name}' is used by {other}", hint="choose another name"
            )

    def _has_snapshot(self, team: str, name: str) -> bool:
        found = self._provider.view(Checkpoint, indexes.CHECKPOINT_ID, name)
        return any(item.spec.owner == team and not item.is_deleting for item in found)

    def check_rebuild(self, caller: Caller, template: SandboxTemplate, alias: str) -> None:
        """Raise `ForbiddenError` unless the caller may replace this template by a build."""
        if caller.is_operator:
            return
        if template.metadata.namespace == SHARED_NAMESPACE and template.spec.public:
            raise ForbiddenError(
                f"template '{alias}' serves every team",
                hint="only an operator can build it; choose another name",
            )
        if LABEL_BUILT not in template.metadata.labels:
            caller.require("patch", "templates", template=alias)

    async def set_public(self, template: SandboxTemplate, *, public: bool) -> SandboxTemplate:
        """Make a template public for every team, or private again."""
        return await self._provider.write.mutate(
            SandboxTemplate,
            template.key,
            lambda item: structs.replace(item, spec=structs.replace(item.spec, public=public)),
            uid=template.metadata.uid,
        )
