"""Named shapes of sandboxes, and how a member's shape is found: pure.

A member may write its limits in place, name a shape, or leave that to its environment; with none
of these it has what its template says.
"""

from collections.abc import Mapping

from msgspec import structs

from paddock.kit.errors import FieldProblem, InvalidError
from paddock.resources import quantity
from paddock.resources.kinds.env import EnvDefaults, MemberConfig
from paddock.resources.kinds.template import Resources

SHAPES: Mapping[str, Resources] = {
    "nano": Resources(cpu="500m", memory="256Mi"),
    "small": Resources(cpu="1", memory="512Mi"),
    "medium": Resources(cpu="2", memory="1Gi"),
    "large": Resources(cpu="4", memory="4Gi"),
    "xlarge": Resources(cpu="8", memory="16Gi"),
}
DEFAULT_CPU_MILLIS = 2000
DEFAULT_MEMORY_BYTES = 512 << 20
"""What a sandbox counts for whose template sets no limit."""


def known_shapes(setting: str) -> Mapping[str, Resources]:
    """Give the built-in shapes and those that an operator names: `name=cores/memory`, by commas."""
    found = dict(SHAPES)
    for part in filter(None, (item.strip() for item in setting.split(","))):
        name, equals, amounts = part.partition("=")
        cpu, slash, memory = (item.strip() for item in amounts.partition("/"))
        if not (name.strip() and equals and slash):
            problem = FieldProblem("instance_types", f"{part!r} is not name=cores/memory")
            raise InvalidError(str(problem), problems=[problem], hint="such as huge=32/128Gi")
        quantity.parse(cpu, "instance_types")
        quantity.parse(memory, "instance_types")
        found[name.strip()] = Resources(cpu=cpu, memory=memory)
    return found


def shape_of(
    config: MemberConfig,
    defaults: EnvDefaults,
    template: Resources,
    *,
    shapes: Mapping[str, Resources] = SHAPES,
) -> Resources:
    """Give a member's limits; an `InvalidError` names a shape that there is not."""
    multiplier = config.multiplier or defaults.multiplier
    base = config.inline_resources
    if base is None:
        name = config.instance_type or defaults.instance_type
        if name is not None:
            base = _named(name, shapes)
    if base is None:
        base = template
    return multiplied(base, multiplier)


def _named(name: str, shapes: Mapping[str, Resources]) -> Resources:
    if name not in shapes:
        problem = FieldProblem(
            "config.instanceType", f"there is no shape {name!r}; choose {', '.join(sorted(shapes))}"
        )
        raise InvalidError(str(problem), problems=[problem])
    return shapes[name]


def multiplied(shape: Resources, times: int) -> Resources:
    """Give so many times a shape; what it does not limit stays unlimited."""
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
    """Give what one sandbox counts for: thousandths of a core, and bytes of memory."""
    cpu = quantity.millis(shape.cpu) if shape.cpu else DEFAULT_CPU_MILLIS
    memory = quantity.whole(shape.memory) if shape.memory else DEFAULT_MEMORY_BYTES
    return cpu, memory
