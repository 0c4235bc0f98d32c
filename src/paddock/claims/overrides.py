"""Another image or size for one claim: what may be wished for, and whether stock can become so.

The same for clients of the API and for SandboxClaims. A warm sandbox is given its image by the
controllers, who see it in what the claim wrote, and its size by whoever claimed it; where the
runtime can do neither, one is made so instead.
"""

from fnmatch import fnmatchcase

from msgspec import structs

from paddock.cache.provider import Provider
from paddock.claims.ports import ClaimAgent
from paddock.claims.quota.ledger import DEFAULT_CPU_MILLIS, DEFAULT_MEMORY_BYTES
from paddock.kit.errors import FieldProblem, ForbiddenError, InvalidError
from paddock.resources import quantity
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import Resources, SandboxTemplateSpec
from paddock.resources.transitions.claim import Fit

_KEEPS_IMAGE = "sandboxes in stock keep their image in this runtime"
_KEEPS_SIZE = "sandboxes in stock cannot be given that size in this runtime"


class ClaimOverrides:
    """Says what a claim may have, and gives a claimed sandbox its size."""

    def __init__(
        self,
        agent: ClaimAgent,
        provider: Provider,
        *,
        images: tuple[str, ...] = (),
        memory_bytes: int = 0,
    ) -> None:
        self._agent = agent
        self._provider = provider
        self._images = images
        """Patterns of images that claims may name."""
        self._memory_bytes = memory_bytes
        """So much memory claims may ask for, where their template gives less."""

    def check_image(self, image: str) -> None:
        """Raise `ForbiddenError` for an image that is not among those to choose from."""
        if not any(fnmatchcase(image, pattern) for pattern in self._images):
            raise ForbiddenError(
                f"image {image!r} is none that clients may choose here",
                hint="use a template of that image; operators list images in claim_images",
            )

    def fit(
        self, template: SandboxTemplateSpec, *, image: str = "", resources: Resources | None = None
    ) -> Fit:
        """Fill a wish up from its template; `InvalidError` where it is for more than is allowed."""
        if image:
            self.check_image(image)
        base = template.resources
        size = base if resources is None else self._sized(base, resources)
        made_of = structs.replace(template, image=image) if image else template
        can_update = self._agent.can_update_image() if image else False
        obstacle = ""
        if image and not can_update:
            obstacle = _KEEPS_IMAGE
        elif size != base and not self._agent.can_resize(base, size):
            obstacle = _KEEPS_SIZE
        return Fit(
            template=made_of,
            size=size,
            resources=None if size == base else size,
            image=image if can_update else None,
            obstacle=obstacle,
        )

    def can_resize(self, sandbox: Sandbox, template: SandboxTemplateSpec) -> bool:
        """Say whether a sandbox that was in stock can be given the size that its claim wrote."""
        wished = sandbox.spec.resources
        return wished is not None and self._agent.can_resize(template.resources, wished)

    async def resize(self, sandbox: Sandbox, template: SandboxTemplateSpec) -> None:
        """Give a sandbox the size that its claim wrote, and record that it has it."""
        await self._agent.resize(sandbox, template)

        def sized(current: Sandbox) -> Sandbox:
            size = current.spec.resources or template.resources
            return structs.replace(current, status=structs.replace(current.status, resources=size))

        await self._provider.write.mutate(
            Sandbox, sandbox.key, sized, uid=sandbox.metadata.uid, is_status=True
        )

    def _sized(self, base: Resources, wished: Resources) -> Resources:
        """Give the whole size; no more than is allowed, and never nothing."""
        if wished.cpu is not None:
            ceiling = quantity.millis(base.cpu) if base.cpu else DEFAULT_CPU_MILLIS
            if not 0 < quantity.millis(wished.cpu) <= ceiling:
                problem = FieldProblem("resources.cpu", f"more than 0 and at most {ceiling}m")
                raise InvalidError(str(problem), problems=[problem])
        if wished.memory is not None:
            usual = quantity.whole(base.memory) if base.memory else DEFAULT_MEMORY_BYTES
            if not 0 < quantity.whole(wished.memory) <= (ceiling := max(usual, self._memory_bytes)):
                problem = FieldProblem(
                    "resources.memory", f"more than 0 and at most {ceiling} bytes"
                )
                raise InvalidError(str(problem), problems=[problem])
        return Resources(
            cpu=wished.cpu or base.cpu,
            memory=wished.memory or base.memory,
            disk=wished.disk or base.disk,
            pids=wished.pids or base.pids,
        )
