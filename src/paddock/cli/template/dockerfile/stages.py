"""Divides a Dockerfile into stages, and finds those that a target needs."""

import platform
from collections.abc import Iterable, Mapping

from e2b_dockerfile_utils import (
    DockerfileInstruction,
    DockerfileSyntaxError,
    parse_dockerfile_ast,
)

from paddock.cli.template.dockerfile.flags import parse_flags
from paddock.cli.template.dockerfile.model import Dockerfile, DockerfileError, DockerfileStage
from paddock.cli.template.dockerfile.variables import Variables
from paddock.kit.errors import InvalidError

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_NO_IMAGE = "scratch"


def parse(text: str, arguments: Mapping[str, str]) -> Dockerfile:
    """Parse a Dockerfile; `arguments` are the build arguments that were passed."""
    try:
        tree = parse_dockerfile_ast(text)
    except DockerfileSyntaxError as error:
        line = error.line or 0
        raise DockerfileError(line, str(error).partition(": ")[2] or str(error)) from error
    shared = platform_arguments() | dict(arguments)
    declared: dict[str, str | None] = {}
    variables = Variables(tree.escape_token)
    for name, value in platform_arguments().items():
        variables.set_argument(name, value)
    stages: list[DockerfileStage] = []
    groups = _groups(tree.instructions)
    for instruction in groups[0]:
        if instruction.name != "ARG":
            raise DockerfileError(
                instruction.start_line, f"{instruction.name} is not allowed before FROM"
            )
        for name, value in argument_values(instruction, variables, shared, {}):
            declared[name] = value
            variables.set_argument(name, value)
    for group in groups[1:]:
        stages.append(_stage(group, stages, variables))
    if not stages:
        raise DockerfileError(0, "the Dockerfile has no FROM")
    notes = tuple(f"line {item.line}: {item.message}" for item in tree.warnings)
    return Dockerfile(tuple(stages), declared, tree.escape_token, notes)


def platform_arguments() -> dict[str, str]:
    """Return the build arguments that describe the platform, which an ARG may declare."""
    machine = platform.machine()
    architecture = _ARCHITECTURES.get(machine, machine)
    values = {"PLATFORM": f"linux/{architecture}", "OS": "linux", "ARCH": architecture}
    return {f"{of}{part}": value for of in ("TARGET", "BUILD") for part, value in values.items()}


def argument_values(
    instruction: DockerfileInstruction,
    variables: Variables,
    passed: Mapping[str, str],
    shared: Mapping[str, str | None],
) -> Iterable[tuple[str, str | None]]:
    """Yield each name of an ARG with its value: passed, default, or declared before FROM."""
    parse_flags(instruction)
    if not instruction.args:
        raise DockerfileError(instruction.start_line, "ARG has no name")
    for word in instruction.args:
        name, equals, default = word.partition("=")
        value = shared.get(name)
        if equals:
            value = variables.expand(default, instruction.start_line)
        yield name, passed.get(name, value)


def _groups(instructions: Iterable[DockerfileInstruction]) -> list[list[DockerfileInstruction]]:
    """Divide instructions before each FROM."""
    groups: list[list[DockerfileInstruction]] = [[]]
    for instruction in instructions:
        if instruction.name == "FROM":
            groups.append([])
        groups[-1].append(instruction)
    return groups


def _stage(
    group: list[DockerfileInstruction], before: list[DockerfileStage], variables: Variables
) -> DockerfileStage:
    first, *rest = group
    parse_flags(first)  # --platform: the image of the machine is used
    name = ""
    if len(first.args) == 3 and first.args[1].lower() == "as":
        name = first.args[2].lower()
    elif len(first.args) != 1:
        raise DockerfileError(first.start_line, "FROM takes an image, or an image AS a name")
    if any(name and stage.name == name for stage in before):
        raise DockerfileError(first.start_line, f"the stage {name!r} exists already")
    base = variables.expand(first.args[0], first.start_line)
    if not base:
        raise DockerfileError(
            first.start_line,
            f"the image {first.args[0]!r} is empty",
            hint="declare the build argument before FROM, with a default",
        )
    parent = next((stage.number for stage in before if stage.name == base.lower()), None)
    if parent is None and base == _NO_IMAGE:
        raise DockerfileError(
            first.start_line,
            "FROM scratch is not supported: a sandbox needs a shell and a user",
            hint="FROM minimal, or another small image",
        )
    return DockerfileStage(len(before), name, base, parent, first.start_line, tuple(rest))


def find_target(dockerfile: Dockerfile, target: str | None) -> DockerfileStage:
    """Return the stage to build: the last one, or the one with a name or number."""
    if target is None:
        return dockerfile.stages[-1]
    found = find_stage(dockerfile.stages, target)
    if found is None:
        names = ", ".join(stage.label for stage in dockerfile.stages)
        raise InvalidError(f"the Dockerfile has no stage {target!r}", hint=f"its stages: {names}")
    return found


def find_stage(stages: Iterable[DockerfileStage], name: str) -> DockerfileStage | None:
    """Return the stage with a name or number."""
    return next(
        (item for item in stages if name.lower() == item.name or name == str(item.number)), None
    )


def ancestors(dockerfile: Dockerfile, stage: DockerfileStage) -> tuple[DockerfileStage, ...]:
    """Return the stages that a stage starts from, the first one first, and the stage itself."""
    if stage.parent is None:
        return (stage,)
    return (*ancestors(dockerfile, dockerfile.stages[stage.parent]), stage)
