"""Layers: filesystem checkpoints of builds, found again by their key.

The context that applies after a layer is stored as an annotation of its checkpoint.
"""

from datetime import timedelta

import msgspec

from paddock.cache import indexes
from paddock.cache.provider import Provider
from paddock.controllers.template_build.keys import StepContext
from paddock.controllers.template_build.retention import ANNOTATION_USED, last_use
from paddock.kit import ids
from paddock.kit.clock import Clock
from paddock.kit.errors import NotFoundError
from paddock.resources.kinds.checkpoint import Checkpoint, CheckpointPhase, CheckpointSpec, Content
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template_build import LABEL_BUILD, LABEL_LAYER, TemplateBuild
from paddock.resources.meta import Key, ObjectMeta, with_meta

ANNOTATION_CONTEXT = "paddock.dev/template-context"
"""User, working directory and variables after the layer, as JSON."""
ANNOTATION_START_CONTEXT = "paddock.dev/template-start-context"
"""The same, of the start command, where that was inherited from a base."""
STORE_SECONDS = 600.0
MARK_AFTER = timedelta(hours=12)
FILES = (Content.FILESYSTEM,)
FILES_AND_MEMORY = (Content.MEMORY, Content.FILESYSTEM)


class Layers:
    """Finds and stores the layers of builds."""

    def __init__(self, provider: Provider, clock: Clock) -> None:
        self._provider = provider
        self._clock = clock

    def find(self, build: TemplateBuild, key: str, *, only_own: bool = False) -> Checkpoint | None:
        """Return the newest layer of the team, or of this build, with this key; or None."""
        home = build.metadata.namespace
        found = [
            item
            for item in self._provider.informer(Checkpoint).view(indexes.LAYER, Key(home, key))
            if item.status.phase is CheckpointPhase.SUCCEEDED
            and not item.is_deleting
            and item.spec.owner == build.spec.owner
            and context_of(item) is not None
            and (not only_own or _is_of(build, item))
        ]
        return max(found, key=_age, default=None)

    async def mark_used(self, layer: Checkpoint) -> bool:
        """Record that a build uses a layer, so that it is kept, and return whether it exists.

        At most once in a while.
        """
        now = self._clock.now()
        if now - last_use(layer) < MARK_AFTER:
            return True

        def marked(current: Checkpoint) -> Checkpoint:
            annotations = {**current.metadata.annotations, ANNOTATION_USED: now.isoformat()}
            return with_meta(current, annotations=annotations)

        try:
            current = await self._provider.write.mutate(
                Checkpoint, layer.key, marked, uid=layer.metadata.uid, is_fresh=True
            )
        except NotFoundError:
            return False
        return not current.is_deleting

    async def store(
        self,
        build: TemplateBuild,
        sandbox: Sandbox,
        key: str,
        context: StepContext,
        *,
        contents: tuple[Content, ...] = FILES,
        start_context: StepContext | None = None,
    ) -> Checkpoint:
        """Store the sandbox as the layer with this key, and return it once it is complete."""
        annotations = {ANNOTATION_CONTEXT: msgspec.json.encode(context).decode()}
        if start_context is not None:
            annotations[ANNOTATION_START_CONTEXT] = msgspec.json.encode(start_context).decode()
        wanted = Checkpoint(
            metadata=ObjectMeta(
                generate_name="layer-",
                namespace=build.metadata.namespace,
                labels={LABEL_BUILD: build.metadata.name, LABEL_LAYER: key},
                annotations=annotations,
            ),
            spec=CheckpointSpec(
                sandbox_name=sandbox.metadata.name,
                sandbox_uid=sandbox.metadata.uid,
                persistent_contents=contents,
                owner=build.spec.owner,
                key_id=build.spec.key_id,
                checkpoint_id=ids.checkpoint_id("layer"),
            ),
        )
        created = await self._provider.write.create(wanted)
        return await self._provider.waits.checkpoint(created).wait(STORE_SECONDS, written=created)


def context_of(layer: Checkpoint) -> StepContext | None:
    """Return the context after a layer; None if it was changed to something else."""
    return _context(layer, ANNOTATION_CONTEXT)


def start_context_of(layer: Checkpoint) -> StepContext | None:
    """Return the context of an inherited start command; None if the command is of the layer."""
    return _context(layer, ANNOTATION_START_CONTEXT)


def _context(layer: Checkpoint, annotation: str) -> StepContext | None:
    text = layer.metadata.annotations.get(annotation, "")
    try:
        return msgspec.json.decode(text, type=StepContext)
    except msgspec.DecodeError:
        return None


def _is_of(build: TemplateBuild, layer: Checkpoint) -> bool:
    """Whether a build has stored a layer, and not a deleted build of the same name."""
    begun, stored = build.metadata.creation_timestamp, layer.metadata.creation_timestamp
    is_later = begun is None or stored is None or stored >= begun
    return is_later and layer.metadata.labels.get(LABEL_BUILD) == build.metadata.name


def _age(layer: Checkpoint) -> tuple[float, str]:
    end = layer.status.completion_time
    return (end.timestamp() if end else 0.0, layer.metadata.name)
