"""Resolves the source of a claim's sandboxes, and their image and size. Only reads.

`templateName` names a pool, an environment or a template; `inplaceUpdate` overrides its image and
size.
"""

from msgspec import Struct

from paddock.cache.provider import Provider
from paddock.claims.overrides import ClaimOverrides
from paddock.kit.errors import ForbiddenError, InvalidError
from paddock.resources.kinds.claim import SandboxClaim
from paddock.resources.kinds.env import SandboxEnv
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.template import Resources, SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import Key, controller_of
from paddock.resources.transitions.claim import ClaimRequirements
from paddock.resources.transitions.image_pin import pinned


class ResolvedSource(Struct, frozen=True, kw_only=True):
    """The resolved source of a claim's sandboxes."""

    exists: bool
    """Whether the name resolves to anything."""
    requirements: ClaimRequirements
    pool: SandboxPool | None = None
    env: Key | None = None
    refusal: str = ""
    """Why the claim can never be served; empty if it can."""


class SourceResolver:
    """Resolves sources of claims."""

    def __init__(self, provider: Provider, overrides: ClaimOverrides) -> None:
        self._provider = provider
        self._overrides = overrides

    def of(self, claim: SandboxClaim) -> ResolvedSource:
        """Resolve the `templateName` of a claim."""
        pool, template = self._named(claim)
        env = self._env(claim, pool)
        if env is None:
            requirements, refusal = self._requirements(claim, _made_of(pool, template))
            exists = pool is not None or template is not None
            return ResolvedSource(
                exists=exists, requirements=requirements, pool=pool, refusal=refusal
            )
        # Members have sizes of their own: overrides are checked for the member that is granted.
        reference = env.spec.template_ref
        home = reference.namespace or env.metadata.namespace
        template = self._provider.template(reference.name, namespace=home)
        requirements, refusal = self._requirements(
            claim, _made_of(None, template), in_line=True, has_size=False
        )
        return ResolvedSource(exists=True, requirements=requirements, env=env.key, refusal=refusal)

    def member(self, claim: SandboxClaim, key: Key) -> ResolvedSource:
        """Resolve one member of an environment for a claim."""
        pool = self._provider.get(SandboxPool, key)
        template = self._template_of(pool) if pool is not None else None
        requirements, refusal = self._requirements(claim, _made_of(pool, template), in_line=True)
        return ResolvedSource(
            exists=pool is not None, requirements=requirements, pool=pool, refusal=refusal
        )

    def _named(self, claim: SandboxClaim) -> tuple[SandboxPool | None, SandboxTemplate | None]:
        name, namespace = claim.spec.template_name, claim.metadata.namespace
        pool = self._provider.pool(name, namespace=namespace)
        if pool is not None:
            return pool, self._template_of(pool)
        template = self._provider.template(name, namespace=namespace)
        if template is None:
            return None, None
        owned = self._provider.pools_of_template(template.metadata.name)
        return next(
            (item for item in owned if item.metadata.namespace == namespace), None
        ), template

    def _template_of(self, pool: SandboxPool) -> SandboxTemplate | None:
        reference = pool.spec.template_ref
        if reference is None:
            return None
        return self._provider.template(reference.name, namespace=pool.metadata.namespace)

    def _env(self, claim: SandboxClaim, pool: SandboxPool | None) -> SandboxEnv | None:
        """Return the environment of that name, unless a pool that is no member has the name."""
        name, namespace = claim.spec.template_name, claim.metadata.namespace
        env = self._provider.env(name, namespace=namespace)
        owner = controller_of(pool) if pool is not None else None
        if env is None or env.is_deleting or (pool is not None and owner is None):
            return None
        return env

    def _requirements(
        self,
        claim: SandboxClaim,
        template: SandboxTemplateSpec,
        *,
        in_line: bool = False,
        has_size: bool = True,
    ) -> tuple[ClaimRequirements, str]:
        """Return image and size of the sandboxes, and why they are impossible, if they are."""
        plain = ClaimRequirements(template=template, size=template.resources)
        update = claim.spec.inplace_update
        if update is None:
            return plain, ""
        size = update.resources if has_size else None
        try:
            requirements = self._overrides.requirements(
                template,
                image=update.image or "",
                resources=Resources(cpu=size.cpu, memory=size.memory) if size else None,
            )
        except (ForbiddenError, InvalidError) as error:
            return plain, error.advice
        if requirements.obstacle and in_line:
            obstacle = f"{requirements.obstacle}, and an environment creates none for one claim"
            return requirements, obstacle
        if requirements.obstacle and not claim.spec.create_on_no_stock:
            return (
                requirements,
                f"{requirements.obstacle}, and none may be created: createOnNoStock is off",
            )
        return requirements, ""


def _made_of(pool: SandboxPool | None, template: SandboxTemplate | None) -> SandboxTemplateSpec:
    if template is not None:
        return pinned(template.spec, template.status)
    if pool is None or pool.spec.template is None:
        return SandboxTemplateSpec()
    return pinned(pool.spec.template, pool.status)
