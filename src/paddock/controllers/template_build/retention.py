"""Decides which layers and builds are no longer needed. Pure.

A layer is needed while a template starts from it, or a tag or one of the last builds of a template
refers to it. Others are kept for a while, because the next build may use them again.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta

from paddock.resources.kinds.checkpoint import Checkpoint, CheckpointPhase
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.kinds.template_build import LABEL_LAYER, BuildPhase, TemplateBuild
from paddock.resources.meta import Key
from paddock.resources.transitions.template_build import is_default

ANNOTATION_USED = "paddock.dev/last-used"
"""On a layer: when a build used it last, if that was long after it was stored."""
UNUSED_FOR = timedelta(days=7)
REPLACED_FOR = timedelta(minutes=10)
"""Failed layers, and those that a forced build has stored again: a build may still start from one.
"""
BUILDS_KEPT = 10
"""Builds of a template that can be rolled back to, besides those with a tag; and as many others."""
TEAM_BUILDS_KEPT = 1000
"""Builds of a team that have ended and that nothing names, of all its templates together."""
TEAM_LOG_BYTES = 256 << 20
"""Logs of ended builds of a team; beyond, those of the builds that ended first are deleted."""
LAYERS_KEPT = 1000
"""Layers of a team that are not needed; beyond, the least recently used are deleted."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def last_use(layer: Checkpoint) -> datetime:
    """Return when a layer was stored or used last."""
    stored = layer.status.completion_time or layer.metadata.creation_timestamp or _EPOCH
    try:
        used = datetime.fromisoformat(layer.metadata.annotations.get(ANNOTATION_USED, ""))
        return max(stored, used)
    except (TypeError, ValueError):
        return stored


def is_layer(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint stores a layer of a build."""
    return LABEL_LAYER in checkpoint.metadata.labels


def unneeded_builds(
    builds: Iterable[TemplateBuild], templates: Iterable[SandboxTemplate]
) -> tuple[TemplateBuild, ...]:
    """Return the builds that have ended, that nothing names, and that are not among the last.

    The last ones are those of a template, as many as a team may have at all.
    Those that a template can be rolled back to are counted apart from failed ones and those with
    other tags.
    """
    named = _named_builds(templates)
    by_template: defaultdict[tuple[Key, bool], list[TemplateBuild]] = defaultdict(list)
    for build in builds:
        if build.has_ended and not build.is_deleting and build.key not in named:
            key = Key(build.metadata.namespace, build.spec.template_name)
            is_target = build.status.phase is BuildPhase.READY and is_default(build)
            by_template[key, is_target].append(build)
    old: list[TemplateBuild] = []
    for found in by_template.values():
        found.sort(key=_end, reverse=True)
        old += found[BUILDS_KEPT:]
    kept: defaultdict[str, list[TemplateBuild]] = defaultdict(list)
    for (template, _), found in by_template.items():
        kept[template.namespace] += found[:BUILDS_KEPT]
    for found in kept.values():
        found.sort(key=_end, reverse=True)
        old += found[TEAM_BUILDS_KEPT:]
    return tuple(old)


def excess_logs(builds: Iterable[TemplateBuild], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the UIDs of ended builds whose logs a team has no more room for.

    `sizes` are the bytes of logs by UID. Logs are no reason to delete their builds.
    """
    by_team: defaultdict[str, list[TemplateBuild]] = defaultdict(list)
    for build in builds:
        if build.has_ended and build.metadata.uid in sizes:
            by_team[build.metadata.namespace].append(build)
    found: list[str] = []
    for ended in by_team.values():
        total = 0
        for build in sorted(ended, key=_end, reverse=True):
            total += sizes[build.metadata.uid]
            if total > TEAM_LOG_BYTES:
                found.append(build.metadata.uid)
    return tuple(found)


def unneeded_layers(
    checkpoints: Iterable[Checkpoint],
    templates: Iterable[SandboxTemplate],
    builds: Iterable[TemplateBuild],
    *,
    now: datetime,
) -> tuple[Checkpoint, ...]:
    """Return the layers that can be deleted."""
    templates, builds = tuple(templates), tuple(builds)
    needed = _needed(templates, builds)
    by_team: defaultdict[str, list[Checkpoint]] = defaultdict(list)
    newest: dict[tuple[str, str, str], Checkpoint] = {}
    for layer in checkpoints:
        if not is_layer(layer) or layer.is_deleting:
            continue
        by_team[layer.metadata.namespace].append(layer)
        key = _identity(layer)
        if key not in newest or last_use(newest[key]) < last_use(layer):
            newest[key] = layer
    found: list[Checkpoint] = []
    for layers in by_team.values():
        free = [layer for layer in layers if _reference(layer) not in needed]
        free.sort(key=last_use, reverse=True)
        found += [
            layer
            for position, layer in enumerate(free)
            if position >= LAYERS_KEPT or _is_old(layer, newest[_identity(layer)], now)
        ]
    return tuple(found)


def _is_old(layer: Checkpoint, newest: Checkpoint, now: datetime) -> bool:
    age = now - last_use(layer)
    if layer.status.phase is CheckpointPhase.FAILED or newest is not layer:
        return age > REPLACED_FOR
    return age > UNUSED_FOR


def _needed(
    templates: Iterable[SandboxTemplate], builds: Iterable[TemplateBuild]
) -> frozenset[tuple[str, str]]:
    """Return namespace and public id of the checkpoints that must stay."""
    found: set[tuple[str, str]] = set()
    homes: set[Key] = set()
    for template in templates:
        homes.add(template.key)
        if template.spec.restore_from:
            found.add((template.metadata.namespace, template.spec.restore_from))
    for build in builds:
        home = Key(build.metadata.namespace, build.spec.template_name)
        if home in homes and build.status.template and not build.is_deleting:
            result = build.status.template.restore_from or ""
            found.add((build.metadata.namespace, result))
    return frozenset(found)


def _named_builds(templates: Iterable[SandboxTemplate]) -> frozenset[Key]:
    return frozenset(
        Key(template.metadata.namespace, name)
        for template in templates
        for name in (template.status.build, *(tag.build for tag in template.status.tags))
        if name
    )


def _reference(layer: Checkpoint) -> tuple[str, str]:
    return (layer.metadata.namespace, layer.status.checkpoint_id or layer.spec.checkpoint_id)


def _identity(layer: Checkpoint) -> tuple[str, str, str]:
    return (layer.metadata.namespace, layer.spec.owner, layer.metadata.labels[LABEL_LAYER])


def _end(build: TemplateBuild) -> datetime:
    return build.status.completion_time or build.metadata.creation_timestamp or _EPOCH
