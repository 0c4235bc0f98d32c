"""Instance types, and how a member's resources are resolved. Pure.

A member sets its resources inline, names an instance type, or uses its environment's default;
otherwise its template's resources apply.
"""

from collections.abc import Mapping

from msgspec import structs

from paddock.kit.errors import FieldProblem, InvalidError
from paddock.resources import quantity
from paddock.resources.default_limits import DEFAULT_CPU_MILLIS, DEFAULT_MEMORY_BYTES
from paddock.resources.kinds.env import EnvDefaults, MemberConfig
from paddock.resources.kinds.template import Resources

INSTANCE_TYPES: Mapping[str, Resources] = {
    "nano": Resources(cpu="500m", memory="256Mi"),
    "small": Resources(cpu="1", memory="512Mi"),
    "medium": Resources(cpu="2", memory="1Gi"),
    "large": Resources(cpu="4", memory="4Gi"),
    "xlarge": Resources(cpu="8", memory="16Gi"),
}


def load_instance_types(setting: str) -> Mapping[str, Resources]:
    """Return the built-in instance types and the operator's: `name=cores/memory`, by commas."""
    found = dict(INSTANCE_TYPES)
    for part in filter(None, (item.strip() for item in setting.split(","))):
        name, equals, amounts = part.partition("=")
        cpu, slash, memory = (item.strip() for item in amounts.partition("/"))
        if not (name.strip() and equals and slash):
            problem = FieldProblem("instance_types", f"{part!r} is not name=cores/memory")
            raise InvalidError(str(problem), problems=[problem], hint="for example huge=32/128Gi")
        quantity.parse(cpu, "instance_types")
        quantity.parse(memory, "instance_types")
        found[name.strip()] = Resources(cpu=cpu, memory=memory)
    return found


def resources_of(
    config: MemberConfig,
    defaults: EnvDefaults,
    template: Resources,
    *,
    instance_types: Mapping[str, Resources] = INSTANCE_TYPES,
) -> Resources:
    """Return a member's resources. `InvalidError` if its instance type is unknown."""
    multiplier = config.multiplier or defaults.multiplier
    base = config.inline_resources
    if base is None:
        name = config.instance_type or defaults.instance_type
        if name is not None:
            base = _named(name, instance_types)
    if base is None:
        base = template
    return multiplied(base, multiplier)


def _named(name: str, instance_types: Mapping[str, Resources]) -> Resources:
    if name not in instance_types:
        problem = FieldProblem(
            "config.instanceType",
            f"unknown instance type {name!r}; choose {', '.join(sorted(instance_types))}",
        )
        raise InvalidError(str(problem), problems=[problem])
    return instance_types[name]


def multiplied(shape: Resources, times: int) -> Resources:
    """Return a multiple of resources; unlimited ones stay unlimited."""
    if times == 1:
        return shape
    return structs.replace(
        shape,
        cpu=f"{quantity.millis(shape.cpu) * times}m" if shape.cpu else None,
        memory=f"{quantity.whole(shape.memory) * times}" if shape.memory else None,
        disk=f"{quantity.whole(shape.disk) * times}" if shape.disk else None,
        pids=shape.pids * times if shape.pids else None,
    )


def footprint(shape: Resources) -> tuple[int, int]:
    """Return the footprint of one sandbox: CPU in millicores, memory in bytes."""
    cpu = quantity.millis(shape.cpu) if shape.cpu else DEFAULT_CPU_MILLIS
    memory = quantity.whole(shape.memory) if shape.memory else DEFAULT_MEMORY_BYTES
    return cpu, memory
