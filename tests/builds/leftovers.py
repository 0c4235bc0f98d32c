"""Checks that builds have left nothing: no sandbox, no layer that nobody needs, no files."""

from datetime import UTC, datetime, timedelta

from paddock.controllers.template_build.retention import REPLACED_FOR, unneeded_layers
from paddock.resources import codec
from paddock.resources.kinds.checkpoint import Checkpoint, CheckpointPhase
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.kinds.template_build import LABEL_LAYER, TemplateBuild
from paddock.resources.meta import R
from paddock.runtime.local.driver import LocalRuntime
from tests.builds.real import API, Builder
from tests.installation import Installation
from tests.runtime.local.nodes import eventually

ORPHANS_SECONDS = 100
"""The janitor needs two sweeps, half a minute apart, for what only the node has."""


async def nothing_is_left(builder: Builder) -> None:
    """No sandbox of a build is left, and each stored layer can be used again or is removed."""
    await builder.no_sandboxes()
    paddock = builder.paddock
    layers = await eventually(lambda: _settled_layers(paddock), seconds=60, pause=0.2)
    unneeded = unneeded_layers(
        layers,
        await _all(paddock, SandboxTemplate),
        await _all(paddock, TemplateBuild),
        now=datetime.now(UTC) + REPLACED_FOR + timedelta(seconds=1),
    )
    kept = [layer for layer in layers if layer not in unneeded]
    keys = [layer.metadata.labels[LABEL_LAYER] for layer in kept]
    assert len(set(keys)) == len(keys), "the cleanup keeps two layers for one step"
    node = LocalRuntime(paddock.directory / "run" / "node.sock")

    async def same() -> bool:
        stored = {layer.metadata.uid for layer in await _all(paddock, Checkpoint)}
        return {item.id for item in await node.checkpoints()} <= stored

    async def no_files() -> bool:
        """Whether the files and memories of the node are those of stored layers."""
        stored = {layer.metadata.uid for layer in await _all(paddock, Checkpoint)}
        return files_of_checkpoints(paddock) <= stored

    try:
        await eventually(same, seconds=ORPHANS_SECONDS, pause=0.5)
        await eventually(no_files, seconds=60, pause=0.5)
    finally:
        node.close()


def files_of_checkpoints(paddock: Installation) -> set[str]:
    """Return the checkpoints that have files or memory on the disk of the node."""
    storage = paddock.node_state / "storage"
    places = [path for path in storage.glob("*/checkpoints") if path.is_dir()]
    assert places, sorted(storage.iterdir())
    return {entry.name.removesuffix(".json") for place in places for entry in place.iterdir()}


async def _settled_layers(paddock: Installation) -> list[Checkpoint]:
    """Return all layers, or none while one is still being stored."""
    found = [one for one in await _all(paddock, Checkpoint) if LABEL_LAYER in one.metadata.labels]
    ends = (CheckpointPhase.SUCCEEDED, CheckpointPhase.FAILED)
    return found if all(layer.status.phase in ends for layer in found) else []


async def _all(paddock: Installation, kind: type[R]) -> list[R]:
    found = await paddock.kube("GET", f"{API}/{kind.PLURAL}")
    return [codec.from_builtins(kind, item) for item in found["items"]]
