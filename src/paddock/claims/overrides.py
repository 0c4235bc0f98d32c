"""Image and size overrides of one claim: what is allowed, and whether a warm sandbox can change.

The same rules hold for API requests and SandboxClaims. The controllers change the image of a warm
sandbox, as its claim says; the claimant changes its size. If the runtime supports neither, a
sandbox is created instead.
"""

from fnmatch import fnmatchcase

from msgspec import structs

from paddock.cache.provider import Provider
from paddock.claims.ports import ClaimAgent
from paddock.kit.errors import FieldProblem, ForbiddenError, InvalidError
from paddock.resources import quantity
from paddock.resources.default_limits import DEFAULT_CPU_MILLIS, DEFAULT_MEMORY_BYTES
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import Resources, SandboxTemplateSpec
from paddock.resources.transitions.claim import ClaimRequirements

_KEEPS_IMAGE = "this runtime cannot change the image of a warm sandbox"
_KEEPS_PULL_SECRETS = "a warm sandbox has the pull secrets of its template"
_KEEPS_SIZE = "this runtime cannot give a warm sandbox that size"


class ClaimOverrides:
    """Checks overrides of claims, and resizes claimed sandboxes."""

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
        """Patterns (fnmatch) of images that claims may name."""
        self._memory_bytes = memory_bytes
        """Claims may ask for so much memory even if their template has less."""

    def check_image(self, image: str) -> None:
        """Raise `ForbiddenError` for an image that clients may not choose."""
        if not any(fnmatchcase(image, pattern) for pattern in self._images):
            raise ForbiddenError(
                f"clients may not choose image {image!r} here",
                hint="use a template of that image; operators list images in claim_images",
            )

    def requirements(
        self, template: SandboxTemplateSpec, *, image: str = "", resources: Resources | None = None
    ) -> ClaimRequirements:
        """Complete the overrides from the template; `InvalidError` if they exceed a limit."""
        if image:
            self.check_image(image)
            _require_image(template)
        base = template.resources
        size = base if resources is None else self._sized(base, resources)
        obstacle = ""
        if image and not self._agent.can_update_image():
            obstacle = _KEEPS_IMAGE
        elif image not in ("", template.image) and template.image_pull_secrets:
            # A pod cannot lose them, and they are not for images that clients name.
            obstacle = _KEEPS_PULL_SECRETS
        elif size != base and not self._agent.can_resize(base, size):
            obstacle = _KEEPS_SIZE
        return ClaimRequirements(
            template=template,
            size=size,
            resources=None if size == base else size,
            image=image or None,
            obstacle=obstacle,
        )

    def can_resize(self, sandbox: Sandbox, template: SandboxTemplateSpec) -> bool:
        """Whether a warm sandbox can get the size that its claim wrote."""
        wanted = sandbox.spec.resources
        return wanted is not None and self._agent.can_resize(template.resources, wanted)

    async def resize(self, sandbox: Sandbox, template: SandboxTemplateSpec) -> None:
        """Resize a sandbox to what its claim wrote, and record the size in its status.

        `UnsupportedError` if its node refuses.
        """
        await self._agent.resize(sandbox, template)

        def sized(current: Sandbox) -> Sandbox:
            size = current.spec.resources or template.resources
            return structs.replace(current, status=structs.replace(current.status, resources=size))

        await self._provider.write.mutate(
            Sandbox, sandbox.key, sized, uid=sandbox.metadata.uid, is_status=True
        )

    def _sized(self, base: Resources, wanted: Resources) -> Resources:
        """Return the complete size; each amount is above 0 and within the limit."""
        if wanted.cpu is not None:
            ceiling = quantity.millis(base.cpu) if base.cpu else DEFAULT_CPU_MILLIS
            if not 0 < quantity.millis(wanted.cpu) <= ceiling:
                problem = FieldProblem("resources.cpu", f"more than 0 and at most {ceiling}m")
                raise InvalidError(str(problem), problems=[problem])
        if wanted.memory is not None:
            usual = quantity.whole(base.memory) if base.memory else DEFAULT_MEMORY_BYTES
            if not 0 < quantity.whole(wanted.memory) <= (ceiling := max(usual, self._memory_bytes)):
                problem = FieldProblem(
                    "resources.memory", f"more than 0 and at most {ceiling} bytes"
                )
                raise InvalidError(str(problem), problems=[problem])
        return structs.replace(
            base,
            cpu=wanted.cpu or base.cpu,
            memory=wanted.memory or base.memory,
            disk=wanted.disk or base.disk,
            pids=wanted.pids or base.pids,
        )


def _require_image(template: SandboxTemplateSpec) -> None:
    """Raise `InvalidError` if sandboxes of a template do not start from an image."""
    if template.restore_from is not None:
        raise InvalidError.at(
            "image", "cannot be chosen for a template that was built: it starts from its build"
        )
