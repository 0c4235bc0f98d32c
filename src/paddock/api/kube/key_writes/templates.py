"""SandboxTemplates and SandboxPools of API keys. Pure.

What a template opens is bounded by the installation: no directories and networks of the machine,
images and sizes that the operator allows, the network policy of the team.
"""

from fnmatch import fnmatchcase

from msgspec import structs

from paddock.api.kube.key_writes.request import KeyLimits, KeyWrite, system_problems
from paddock.kit.errors import FieldProblem
from paddock.resources import quantity
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.template import (
    NetworkPolicy,
    Resources,
    SandboxTemplate,
    SandboxTemplateSpec,
)
from paddock.resources.meta import Resource, key_of
from paddock.resources.network.ceiling import exceeding

MIN_IDLE_AGE_SECONDS = 60
WRITABLE = frozenset((
    *("image", "resources", "env", "user", "workdir", "start_command", "ready_command"),
    *("ready_timeout_seconds", "ports", "network", "privileges", "pause_strategy", "probe"),
    *("aliases", "public", "description"),
    *("image_pull_policy", "image_pull_secrets", "image_digest"),
))  # fmt: skip
"""The fields of a template that a key may set; a field that is not listed keeps its default."""
_FOREIGN = "no API key created it: ask an operator to change it"


def template_problems(
    write: KeyWrite, old: SandboxTemplate | None, new: SandboxTemplate
) -> list[FieldProblem]:
    """Return why a template is refused."""
    if old is not None and (found := foreign_problems(old)):
        return found
    found = spec_problems("spec", new.spec, write.limits, old.spec if old is not None else None)
    if new.spec.public and not (old is not None and old.spec.public):
        found.append(
            FieldProblem("spec.public", "templates of API keys are private: set it to false")
        )
    return found


def pool_problems(write: KeyWrite, old: SandboxPool | None, new: SandboxPool) -> list[FieldProblem]:
    """Return why a pool is refused. Its quota is checked where it is written."""
    if old is not None and (found := foreign_problems(old)):
        return found
    spec, before = new.spec, old.spec if old is not None else None
    if not new.metadata.name:
        # What it needs is reserved by its name before it exists.
        return [FieldProblem("metadata.name", "is needed instead of generateName")]
    if spec.template is None:
        # The size of a referenced template could grow without a write of the pool.
        found = [FieldProblem("spec.template", "pools of API keys contain their template")]
    else:
        inline = before.template if before is not None else None
        found = spec_problems("spec.template", spec.template, write.limits, inline)
    if spec.template_ref is not None:
        found.append(FieldProblem("spec.templateRef", "set spec.template instead"))
    if (age := spec.max_idle_age_seconds) is not None and age < MIN_IDLE_AGE_SECONDS:
        found.append(FieldProblem("spec.maxIdleAgeSeconds", f"at least {MIN_IDLE_AGE_SECONDS}"))
    found += system_problems("spec.labels", spec.labels, before.labels if before else None)
    return found + system_problems(
        "spec.annotations", spec.annotations, before.annotations if before else None
    )


def foreign_problems(old: Resource) -> list[FieldProblem]:
    """Return a problem for an object that no API key created."""
    return [] if key_of(old) else [FieldProblem("metadata", _FOREIGN)]


def spec_problems(
    path: str,
    spec: SandboxTemplateSpec,
    limits: KeyLimits,
    before: SandboxTemplateSpec | None = None,
) -> list[FieldProblem]:
    """Return what a template has that API keys may not set.

    They may keep what it has: a build, for one, sets image, size and checkpoint.
    """
    found = [
        FieldProblem(f"{path}.{field.encode_name}", "API keys do not set it")
        for field in structs.fields(SandboxTemplateSpec)
        if field.name not in WRITABLE
        and getattr(spec, field.name)
        and (before is None or getattr(spec, field.name) != getattr(before, field.name))
    ]
    is_listed = any(fnmatchcase(spec.image, pattern) for pattern in limits.images)
    if not is_listed and (before is None or spec.image != before.image):
        listed = ", ".join(limits.images)
        found.append(FieldProblem(f"{path}.image", f"operators allow {listed} (claim_images)"))
    found += _network_problems(path, spec.network, limits.ceiling)
    if before is not None and spec.resources == before.resources:
        return found
    return found + _size_problems(f"{path}.resources", spec.resources, limits)


def _network_problems(
    path: str, network: NetworkPolicy, ceiling: NetworkPolicy | None
) -> list[FieldProblem]:
    found: list[FieldProblem] = []
    if network.allow_private_networks:
        found.append(FieldProblem("network.allowPrivateNetworks", "only operators set it"))
    # The default policy: the internet, and nothing private.
    for limit in (NetworkPolicy(), ceiling):
        found += exceeding(network, limit) if limit is not None else []
    return [FieldProblem(f"{path}.{item.path}", item.message) for item in dict.fromkeys(found)]


def _size_problems(path: str, size: Resources, limits: KeyLimits) -> list[FieldProblem]:
    found: list[FieldProblem] = []
    if size.cpu is not None and quantity.millis(size.cpu, f"{path}.cpu") > limits.cpu_millis:
        found.append(FieldProblem(f"{path}.cpu", f"at most {limits.cpu_millis}m"))
    for name, most in (("memory", limits.memory_bytes), ("disk", limits.disk_bytes)):
        text = getattr(size, name)
        if text is not None and quantity.whole(text, f"{path}.{name}") > most:
            found.append(FieldProblem(f"{path}.{name}", f"at most {quantity.shown_bytes(most)}"))
    if size.pids is not None and size.pids > limits.pids:
        found.append(FieldProblem(f"{path}.pids", f"at most {limits.pids}"))
    return found
