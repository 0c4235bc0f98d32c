"""Resolves a client's `templateID` to a pool, a template, a snapshot or an environment."""

from msgspec import Struct, structs

from paddock.cache import indexes
from paddock.cache.provider import Provider
from paddock.claims.caller import Caller
from paddock.kit.errors import FieldProblem, InvalidError, NotFoundError
from paddock.resources.kinds.checkpoint import Checkpoint, CheckpointPhase
from paddock.resources.kinds.env import SandboxEnv
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.template import NetworkPolicy, SandboxTemplate, SandboxTemplateSpec
from paddock.resources.kinds.template_build import LABEL_BUILD, LABEL_LAYER, TemplateBuild
from paddock.resources.meta import Key
from paddock.resources.rights import SHARED_NAMESPACE
from paddock.resources.template_advice import CODE_INTERPRETER, is_interpreter, next_step
from paddock.resources.template_references import (
    DEFAULT_TAG,
    TemplateReference,
    parse_reference,
)
from paddock.resources.transitions import template_tags
from paddock.resources.transitions.image_pin import pinned
from paddock.resources.transitions.template_build import with_build


class ClaimTarget(Struct, frozen=True, kw_only=True):
    """The source of a sandbox."""

    template: SandboxTemplateSpec
    network: NetworkPolicy | None = None
    """The network policy of a snapshot's source; `None`: that of the template."""
    pool: Key | None = None
    """The pool with warm sandboxes, if there is one."""
    template_name: str = ""
    template_key: Key | None = None
    checkpoint: Checkpoint | None = None
    env: Key | None = None
    build: str = ""
    """Name of the TemplateBuild that the template comes from."""


class TemplateResolver:
    """Looks up templates, pools, snapshots and environments in the cache."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    def resolve(self, caller: Caller, reference: str) -> ClaimTarget:
        """Return the target of a reference; `NotFoundError` if there is none."""
        if (found := self.find(caller, reference)) is not None:
            return found
        if parse_reference(reference) is None:
            problem = FieldProblem("templateID", f"{reference!r} is not [team/]name[:tag]")
            raise InvalidError(str(problem), problems=[problem])
        raise NotFoundError(
            f"template '{reference}' not found",
            hint=next_step(reference, self._names(caller), self._newest_build(caller, reference)),
        )

    def find(self, caller: Caller, reference: str) -> ClaimTarget | None:
        """Return the target of a reference, or None."""
        if (checkpoint := self.checkpoint(caller, reference)) is not None:
            return _from_checkpoint(checkpoint)
        wanted = parse_reference(reference)
        if wanted is None:
            return None
        spaces = (wanted.space,) if wanted.space else (caller.team, SHARED_NAMESPACE)
        targets = (self._in(namespace, wanted, caller) for namespace in dict.fromkeys(spaces))
        return next((found for found in targets if found is not None), None)

    def _names(self, caller: Caller) -> list[str]:
        """Return the names of templates that the caller can use without naming a team."""
        found = {
            template.metadata.name
            for template in self._provider.informer(SandboxTemplate).all()
            if template.metadata.namespace == caller.team
            or (template.metadata.namespace == SHARED_NAMESPACE and template.spec.public)
        }
        return sorted(found)

    def _newest_build(self, caller: Caller, reference: str) -> TemplateBuild | None:
        """Return the newest build of a template of the caller's, or of the code interpreter.

        The latter is private until it is ready; its progress is no secret.
        """
        wanted = parse_reference(reference)
        if wanted is None:
            return None
        home = caller.team
        named = self._named(home, wanted.name) if wanted.space in ("", home) else []
        keys = [item.key for item in named]
        if is_interpreter(reference) and wanted.space in ("", SHARED_NAMESPACE):
            keys.append(Key(SHARED_NAMESPACE, CODE_INTERPRETER))
        found = [
            build
            for key in keys
            for build in self._provider.builds_of_template(key).values()
            if not build.is_deleting and wanted.tag in (build.spec.tags or (DEFAULT_TAG,))
        ]
        return max(found, key=_requested, default=None)

    def _in(self, namespace: str, wanted: TemplateReference, caller: Caller) -> ClaimTarget | None:
        if wanted.tag != DEFAULT_TAG:
            # Only builds have tags.
            template = self._template(wanted.name, namespace, caller)
            return None if template is None else self._of_build(template, wanted.tag)
        key = Key(namespace, wanted.name)
        mine = namespace in (caller.team, SHARED_NAMESPACE) or caller.is_operator
        env = self._provider.informer(SandboxEnv).get(key) if mine else None
        if env is not None and not env.is_deleting:
            reference = env.spec.template_ref
            home = reference.namespace or namespace
            template = self._template(reference.name, home, caller)
            spec = template.spec if template else SandboxTemplateSpec()
            return ClaimTarget(template=spec, env=key, template_name=wanted.name)
        pool = self._provider.informer(SandboxPool).get(key)
        if pool is not None and not pool.is_deleting:
            return self._from_pool(pool, caller)
        template = self._template(wanted.name, namespace, caller)
        if template is None or not template_tags.is_startable(template):
            return None
        return ClaimTarget(
            template=pinned(template.spec, template.status),
            pool=self._pool_of(template),
            template_name=template.metadata.name,
            template_key=template.key,
            build=template.status.build,
        )

    def _of_build(self, template: SandboxTemplate, tag: str) -> ClaimTarget | None:
        """Return the target of a tag other than `default`, or of the id of a build.

        Warm sandboxes of the template are of its default build, so they do not serve it.
        """
        builds = self._provider.builds_of_template(template.key)
        build = template_tags.build_of(template.status.tags, tag, builds)
        if build is None or build.status.template is None:
            return None
        stored = build.status.checkpoint_id or build.status.template.restore_from
        built = with_build(template, build).spec
        return ClaimTarget(
            template=structs.replace(built, restore_from=stored),
            template_name=template.metadata.name,
            template_key=template.key,
            build=build.metadata.name,
        )

    def _from_pool(self, pool: SandboxPool, caller: Caller) -> ClaimTarget | None:
        reference = pool.spec.template_ref
        if reference is None:
            home = pool.metadata.namespace
            if home not in (caller.team, SHARED_NAMESPACE) and not caller.is_operator:
                return None
            spec = pinned(pool.spec.template or SandboxTemplateSpec(), pool.status)
            return ClaimTarget(template=spec, pool=pool.key, template_name=pool.metadata.name)
        home = reference.namespace or pool.metadata.namespace
        template = self._template(reference.name, home, caller)
        if template is None or not template_tags.is_startable(template):
            return None
        return ClaimTarget(
            template=pinned(template.spec, template.status),
            pool=pool.key,
            template_name=template.metadata.name,
            template_key=template.key,
            build=template.status.build,
        )

    def _template(self, name: str, namespace: str, caller: Caller) -> SandboxTemplate | None:
        for template in self._named(namespace, name):
            home = template.metadata.namespace
            if home == caller.team or caller.is_operator or template.spec.public:
                return template
        return None

    def _named(self, namespace: str, name: str) -> list[SandboxTemplate]:
        """Return the templates of a namespace with this name or alias."""
        return [
            template
            for template in self._provider.informer(SandboxTemplate).view(indexes.TEMPLATE_ID, name)
            if template.metadata.namespace == namespace and not template.is_deleting
        ]

    def _pool_of(self, template: SandboxTemplate) -> Key | None:
        pools = self._provider.informer(SandboxPool)
        named = pools.view(indexes.TEMPLATE_ID, template.metadata.name)
        for pool in sorted(named, key=lambda item: item.metadata.name):
            reference = pool.spec.template_ref
            home = (reference.namespace if reference else None) or pool.metadata.namespace
            if home == template.metadata.namespace and not pool.is_deleting:
                return pool.key
        return None

    def checkpoint(self, caller: Caller, reference: str) -> Checkpoint | None:
        """Return a snapshot by id or name; the newest of that name. An id precedes names.

        An operator gets another team's snapshot only if their own team has none.
        """
        name = reference.lower()
        tagged = name if ":" in name else f"{name}:default"
        informer = self._provider.informer(Checkpoint)
        found = [
            item
            for key in dict.fromkeys((reference, name, tagged))
            for item in informer.view(indexes.CHECKPOINT_ID, key)
            if (item.spec.owner == caller.team or caller.is_operator)
            and item.status.phase is CheckpointPhase.SUCCEEDED
            and not item.is_deleting
            and not belongs_to_build(item)
        ]
        exact = [item for item in found if indexes.has_checkpoint_id(item, reference)]
        own = [item for item in found if item.spec.owner == caller.team]
        return max(exact or own or found, key=_completed, default=None)


def belongs_to_build(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint stores a layer or the result of a build. It is not a snapshot."""
    labels = checkpoint.metadata.labels
    return LABEL_BUILD in labels or LABEL_LAYER in labels


def _requested(build: TemplateBuild) -> tuple[float, str]:
    moment = build.metadata.creation_timestamp
    return (moment.timestamp() if moment else 0.0, build.metadata.name)


def _completed(checkpoint: Checkpoint) -> tuple[float, str]:
    moment = checkpoint.status.completion_time
    return (moment.timestamp() if moment else 0.0, checkpoint.metadata.name)


def _from_checkpoint(checkpoint: Checkpoint) -> ClaimTarget:
    template = checkpoint.status.template or SandboxTemplateSpec()
    return ClaimTarget(
        template=template,
        network=checkpoint.status.network,
        checkpoint=checkpoint,
        template_name=checkpoint.metadata.name,
    )
