"""The templates, and the parts of templates, that an object contains. Pure.

Checks of templates read them all, so that none is applied unchecked.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from paddock.kit.errors import InvalidError
from paddock.resources.kinds.batch import BatchSandbox, BatchSandboxSpec
from paddock.resources.kinds.env import EnvMember, SandboxEnv
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import (
    NetworkPolicy,
    Resources,
    SandboxTemplate,
    SandboxTemplateSpec,
)
from paddock.resources.meta import Resource
from paddock.resources.strategic_merge import merged

_FREE = frozenset({"env", "image", "user", "workdir", "startCommand", "readyCommand"})
"""Fields that every runtime honours. Most patches set only these: they are not merged, because a
batch can have 100,000 patches."""


class Contained(Struct, frozen=True, kw_only=True):
    """One template that an object contains."""

    path: str
    """Where it is in the object."""
    template: SandboxTemplateSpec
    part: str = ""
    """The only field that the object contains, if it is not a whole template."""
    base: SandboxTemplateSpec | None = None
    """The template that a patch was merged into: what is wrong there is not the patch's."""

    def at(self, field: str) -> str:
        """Return the path, in the object, of a field of the template."""
        return self.path + field.removeprefix(self.part) if self.part else f"{self.path}.{field}"


def contained_templates(obj: Resource, *, cluster: str | None = None) -> Iterator[Contained]:
    """Return the templates of an object; of an environment, those of one cluster if it is given.

    Patches that cannot be merged are left out: the status of the batch reports them.
    """
    match obj:
        case SandboxTemplate():
            yield Contained(path="spec", template=obj.spec)
        case Sandbox():
            yield from _whole("spec.template", obj.spec.template)
            yield from _network("spec.network", obj.spec.network)
            yield from _resources("spec.resources", obj.spec.resources)
        case SandboxPool():
            yield from _whole("spec.template", obj.spec.template)
        case BatchSandbox():
            yield from _whole("spec.template", obj.spec.template)
            yield from _patched(obj.spec)
        case SandboxEnv():
            yield from _network("spec.overrides.networkPolicy", obj.spec.overrides.network_policy)
            for name, segment in obj.spec.clusters.items():
                if cluster in (None, name):
                    for member, content in segment.members.items():
                        yield from _member(f"spec.clusters[{name}].members[{member}]", content)
        case _:
            pass


def _whole(path: str, template: SandboxTemplateSpec | None) -> Iterator[Contained]:
    if template is not None:
        yield Contained(path=path, template=template)


def _network(path: str, network: NetworkPolicy | None) -> Iterator[Contained]:
    if network is not None:
        yield Contained(path=path, template=SandboxTemplateSpec(network=network), part="network")


def _resources(path: str, resources: Resources | None) -> Iterator[Contained]:
    if resources is not None:
        template = SandboxTemplateSpec(resources=resources)
        yield Contained(path=path, template=template, part="resources")


def _member(path: str, member: EnvMember) -> Iterator[Contained]:
    if member.spec is not None:
        yield from _whole(f"{path}.spec.template", member.spec.template)
    yield from _resources(f"{path}.config.inlineResources", member.config.inline_resources)


def _patched(spec: BatchSandboxSpec) -> Iterator[Contained]:
    base = spec.template or SandboxTemplateSpec()
    for number, patch in enumerate(spec.shard_patches):
        path = f"spec.shardPatches[{number}]"
        if patch.keys() <= _FREE:
            continue
        if (template := _merged(base, patch, path)) is not None:
            yield Contained(path=path, template=template, base=base)


def _merged(
    base: SandboxTemplateSpec, patch: Mapping[str, Any], path: str
) -> SandboxTemplateSpec | None:
    try:
        return merged(base, patch, where=path)
    except InvalidError:
        return None
