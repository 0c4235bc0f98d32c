"""Conversion of templates, builds and their logs to E2B's response bodies. Pure."""

from collections.abc import Iterable
from datetime import datetime

from msgspec import UNSET

from paddock.api.e2b.templates.schemas import (
    BuildLogBody,
    BuildReasonBody,
    BuildStatusBody,
    TemplateBody,
    TemplateBuildBody,
    TemplateDetail,
)
from paddock.api.e2b.to_e2b import ENVD_VERSION, NEVER, cpu_count, disk_mb, memory_mb
from paddock.builds.log_files import BuildLogEntry
from paddock.manager.templates.build_state import READY, BuildState, status_of
from paddock.manager.templates.names import aliases_of, names_of
from paddock.manager.templates.queries import TemplateView
from paddock.resources.kinds.template import LABEL_BUILT, SandboxTemplate
from paddock.resources.kinds.template_build import TemplateBuild

NO_BUILD = "00000000-0000-0000-0000-000000000000"
"""The id of the build of a template without a ready one."""


def template(view: TemplateView) -> TemplateBody:
    """Return the body of a template.

    The resources are those of the ready build that its name stands for; the status is that of the
    latest build.
    """
    item, current, latest = view.template, view.default, view.latest
    is_declared = LABEL_BUILT not in item.metadata.labels
    has_spec = is_declared or current is not None
    resources = item.spec.resources
    if current is not None and item.status.build != current.metadata.name:
        resources = current.spec.resources
    return TemplateBody(
        template_id=item.metadata.name,
        build_id=_build_id(item, current, is_declared=is_declared),
        cpu_count=cpu_count(resources) if has_spec else 0,
        memory_mb=memory_mb(resources) if has_spec else 0,
        disk_size_mb=disk_mb(resources) if has_spec else 0,
        public=item.spec.public,
        aliases=aliases_of(item),
        names=names_of(item),
        created_at=_created(item),
        updated_at=_updated(view),
        build_count=len(view.builds) + (1 if is_declared else 0),
        envd_version=ENVD_VERSION,
        build_status=status_of(latest) if latest else READY,
        description=item.spec.description,
    )


def detail(view: TemplateView) -> TemplateDetail:
    """Return the body of a template with its builds. A declared one counts as one build."""
    item = view.template
    builds = sorted(view.builds.values(), key=_started, reverse=True)
    shown = [_build(build) for build in builds]
    if LABEL_BUILT not in item.metadata.labels:
        shown.append(_declared(item))
    return TemplateDetail(
        template_id=item.metadata.name,
        public=item.spec.public,
        aliases=aliases_of(item),
        names=names_of(item),
        created_at=_created(item),
        updated_at=_updated(view),
        builds=tuple(shown),
    )


def status(state: BuildState) -> BuildStatusBody:
    """Return the body of the status of a build."""
    reason = UNSET
    if state.reason is not None:
        reason = BuildReasonBody(
            message=state.reason.message,
            step=state.reason.step or UNSET,
            log_entries=log_entries(state.reason.entries),
        )
    return BuildStatusBody(
        template_id=state.build.spec.template_name,
        build_id=state.build.metadata.name,
        status=state.status,
        log_entries=log_entries(state.entries),
        reason=reason,
    )


def log_entries(entries: Iterable[BuildLogEntry]) -> tuple[BuildLogBody, ...]:
    """Return the bodies of entries of a log."""
    return tuple(
        BuildLogBody(
            timestamp=entry.timestamp,
            message=entry.message,
            level=entry.level,
            step=entry.step or UNSET,
        )
        for entry in entries
    )


def _build_id(item: SandboxTemplate, current: TemplateBuild | None, *, is_declared: bool) -> str:
    if current is not None:
        return current.metadata.name
    return item.metadata.uid if is_declared else NO_BUILD


def _build(build: TemplateBuild) -> TemplateBuildBody:
    resources, ended = build.spec.resources, build.status.completion_time
    return TemplateBuildBody(
        build_id=build.metadata.name,
        status=status_of(build),
        created_at=_started(build)[0],
        updated_at=ended or build.status.start_time or _started(build)[0],
        finished_at=ended or UNSET,
        cpu_count=cpu_count(resources),
        memory_mb=memory_mb(resources),
        disk_size_mb=disk_mb(resources),
        envd_version=ENVD_VERSION,
        tags=build.spec.tags,
    )


def _declared(item: SandboxTemplate) -> TemplateBuildBody:
    return TemplateBuildBody(
        build_id=item.metadata.uid,
        status=READY,
        created_at=_created(item),
        updated_at=_created(item),
        cpu_count=cpu_count(item.spec.resources),
        memory_mb=memory_mb(item.spec.resources),
        disk_size_mb=disk_mb(item.spec.resources),
        envd_version=ENVD_VERSION,
    )


def _created(item: SandboxTemplate) -> datetime:
    return item.metadata.creation_timestamp or NEVER


def _started(build: TemplateBuild) -> tuple[datetime, str]:
    return (build.metadata.creation_timestamp or NEVER, build.metadata.name)


def _updated(view: TemplateView) -> datetime:
    ended = [build.status.completion_time for build in view.builds.values()]
    return max([item for item in ended if item is not None], default=_created(view.template))
