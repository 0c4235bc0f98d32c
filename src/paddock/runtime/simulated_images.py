"""Images of the simulated driver: every image is there, except those that a test publishes."""

from paddock.kit.errors import ImageMissingError, NotFoundError
from paddock.resources.kinds.template import ImagePullPolicy
from paddock.runtime.port import Blueprint, ReadyImage


class SimulatedImages:
    """A registry with the images that `publish` names, and what of it the node has."""

    def __init__(self) -> None:
        self._registry: dict[str, str] = {}
        self._present: dict[str, set[str]] = {}
        """Digests by reference; the last one that was pulled is what the name means."""
        self._current: dict[str, str] = {}

    def publish(self, reference: str, digest: str) -> None:
        """Let the registry have an image; a second time, its tag moves."""
        self._registry[reference] = digest

    def ensure(self, reference: str, policy: ImagePullPolicy) -> ReadyImage:
        """Pull an image as the policy says."""
        name, _, wanted = reference.partition("@")
        current = wanted or self._current.get(name, "")
        if name not in self._registry:
            return ReadyImage(reference=reference)
        is_present = current in self._present.get(name, ())
        if not is_present and policy is ImagePullPolicy.NEVER:
            raise NotFoundError(f"image {reference!r} is not on this node")
        if not is_present or policy is ImagePullPolicy.ALWAYS:
            current = wanted or self._registry[name]
            self._present.setdefault(name, set()).add(current)
            self._current[name] = current
        return ReadyImage(reference=reference, digest=current, identity=current)

    def require(self, blueprint: Blueprint) -> str:
        """Return the digest of the image. Raises `ImageMissingError` if it must be pulled."""
        name = blueprint.image
        if name not in self._registry:
            return ""
        digest = blueprint.image_digest or self._current.get(name, "")
        if digest not in self._present.get(name, ()):
            raise ImageMissingError(f"there is no image {name} on this node")
        return digest
