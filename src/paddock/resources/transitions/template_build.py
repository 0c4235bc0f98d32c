"""A template after a build of it: new sandboxes start from what the build stored. Pure."""

from msgspec import structs

from paddock.resources.kinds.template import (
    NetworkPolicy,
    Privileges,
    Resources,
    SandboxTemplate,
    SandboxTemplateSpec,
)
from paddock.resources.kinds.template_build import TemplateBuild
from paddock.resources.network.ceiling import intersect

DEFAULT_TAG = "default"


def is_default(build: TemplateBuild) -> bool:
    """Whether a build replaces the specification of its template once it is ready."""
    return not build.spec.tags or DEFAULT_TAG in build.spec.tags


def with_build(template: SandboxTemplate, build: TemplateBuild) -> SandboxTemplate:
    """Return the template with what the build resulted in. Also for a rollback to it.

    Names, visibility, ports, volumes, probes, pause strategy and network policy of the template
    stay. The network policy of a base template, too, and the stricter privileges apply: a build
    removes no restriction.
    """
    built = build.status.template
    if built is None:
        return template
    spec = structs.replace(
        template.spec,
        image=built.image,
        image_digest=built.image_digest,
        restore_from=built.restore_from,
        resources=_sized(template.spec.resources, built.resources),
        env=built.env,
        user=built.user,
        workdir=built.workdir,
        start_command=built.start_command,
        ready_command=built.ready_command,
        ready_timeout_seconds=built.ready_timeout_seconds,
        privileges=_stricter(template.spec, built),
        network=_network(template.spec, built)
        if build.spec.from_template
        else template.spec.network,
    )
    return structs.replace(template, spec=spec)


def with_build_status(template: SandboxTemplate, build: TemplateBuild) -> SandboxTemplate:
    """Return the template with a status that names the build and the image below it."""
    built = build.status.template
    status = structs.replace(
        template.status,
        build=build.metadata.name,
        image=built.image if built is not None else "",
        image_digest=build.status.image_digest,
    )
    return structs.replace(template, status=status)


def restricted(base: SandboxTemplateSpec, template: SandboxTemplate) -> SandboxTemplateSpec:
    """Return what sandboxes of a build start from, with the restrictions of its template.

    They also use its proxies and mirrors, where it has any: it may reach nothing without them.
    """
    return structs.replace(
        base,
        network=_network(template.spec, base),
        privileges=_stricter(template.spec, base),
        outbound=template.spec.outbound or base.outbound,
    )


def _sized(limits: Resources, built: Resources) -> Resources:
    """Return the limits of a template with the size of a build. Other limits stay."""
    return structs.replace(
        limits,
        cpu=built.cpu or limits.cpu,
        memory=built.memory or limits.memory,
        disk=built.disk or limits.disk,
    )


def _stricter(one: SandboxTemplateSpec, other: SandboxTemplateSpec) -> Privileges:
    return (
        Privileges.LOCKED
        if Privileges.LOCKED in (one.privileges, other.privileges)
        else Privileges.SUDO
    )


def _network(limits: SandboxTemplateSpec, built: SandboxTemplateSpec) -> NetworkPolicy:
    return intersect(built.network, limits.network)
