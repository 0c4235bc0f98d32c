"""Tags of templates: which build a tag stands for. Pure.

Assignments are kept in order, the newest last. Of a tag, the newest assignment whose build is ready
counts: a build that is still running, or that failed, changes nothing.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime

from paddock.resources.kinds.template import LABEL_BUILT, SandboxTemplate, TemplateTag
from paddock.resources.kinds.template_build import BuildPhase, TemplateBuild
from paddock.resources.template_references import DEFAULT_TAG, is_build_id

MAX_TAGS = 256
"""Different tags of one template."""
Builds = Mapping[str, TemplateBuild]
"""The builds of one template, by name."""


def build_of(tags: Iterable[TemplateTag], tag: str, builds: Builds) -> TemplateBuild | None:
    """Return the ready build that a tag stands for; a tag may be the id of a build."""
    if is_build_id(tag):
        return _ready(builds.get(tag))
    found: TemplateBuild | None = None
    for item in tags:
        if item.tag == tag and (ready := _ready(builds.get(item.build))) is not None:
            found = ready
    return found


def assigned(
    tags: tuple[TemplateTag, ...],
    new: Iterable[str],
    build: str,
    builds: Builds,
    *,
    now: datetime,
) -> tuple[TemplateTag, ...]:
    """Return the assignments with tags added for a build, without those that cannot count again."""
    added = (TemplateTag(tag=tag, build=build, assigned_at=now) for tag in dict.fromkeys(new))
    return _pruned((*tags, *added), build, builds)


def is_superseded(tags: Iterable[TemplateTag], build: TemplateBuild, builds: Builds) -> bool:
    """Whether the default of a template was set to another ready build after a build was requested.

    `build` is ready. It need not have an assignment: one that was declared has none.
    """
    requested = build.metadata.creation_timestamp
    ready = effective(tuple(tags), {**builds, build.metadata.name: build})
    newest = next((item for item in ready if item.tag == DEFAULT_TAG), None)
    if newest is None or newest.build == build.metadata.name or requested is None:
        return False
    return newest.assigned_at > requested


def without(tags: tuple[TemplateTag, ...], removed: Collection[str]) -> tuple[TemplateTag, ...]:
    """Return the assignments without those of some tags."""
    return tuple(item for item in tags if item.tag not in removed)


def effective(tags: tuple[TemplateTag, ...], builds: Builds) -> tuple[TemplateTag, ...]:
    """Return the assignment that counts of each tag, oldest first."""
    found: dict[str, TemplateTag] = {}
    for item in tags:
        if _ready(builds.get(item.build)) is not None:
            found.pop(item.tag, None)
            found[item.tag] = item
    return tuple(found.values())


def tags_of(build: TemplateBuild) -> tuple[str, ...]:
    """Return the tags that a build was requested with."""
    return build.spec.tags or (DEFAULT_TAG,)


def share_tag(one: TemplateBuild, other: TemplateBuild) -> bool:
    """Whether two builds of a template were requested with a tag in common."""
    return not set(tags_of(one)).isdisjoint(tags_of(other))


def is_finished(build: TemplateBuild) -> bool:
    """Whether a build ended, or is to end because it was canceled."""
    return build.has_ended or bool(build.spec.canceled)


def is_startable(template: SandboxTemplate) -> bool:
    """Whether the specification of a template applies: it was declared, or a build is ready."""
    return LABEL_BUILT not in template.metadata.labels or bool(template.status.build)


def _ready(build: TemplateBuild | None) -> TemplateBuild | None:
    if build is None or build.is_deleting or build.status.phase is not BuildPhase.READY:
        return None
    return build


def _pruned(tags: tuple[TemplateTag, ...], newest: str, builds: Builds) -> tuple[TemplateTag, ...]:
    """Drop assignments before the newest ready one of their tag, and of builds that failed."""
    kept: list[TemplateTag] = []
    settled: set[str] = set()
    for item in reversed(tags):
        build = builds.get(item.build)
        is_lost = item.build != newest and (build is None or _has_failed(build))
        if item.tag in settled or is_lost:
            continue
        kept.append(item)
        if _ready(build) is not None:
            settled.add(item.tag)
    return tuple(reversed(kept))


def _has_failed(build: TemplateBuild) -> bool:
    return build.status.phase is BuildPhase.FAILED
