"""Keys of layers, and what a build carries from step to step. Pure.

The key of a layer is a hash of the key before it and of the step, so equal keys mean equal steps
on an equal base. Teams do not share layers.
"""

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct, structs

from paddock.resources.kinds.template import Resources
from paddock.resources.kinds.template_build import BuildStep

KEY_LENGTH = 40
"""Hexadecimal digits: 160 bits. A label has room for 63 characters."""


class StepContext(Struct, frozen=True, kw_only=True):
    """User, working directory and variables that apply to a step."""

    user: str = "user"
    workdir: str | None = None
    """`None`: the home directory of the user."""
    env: Mapping[str, str] = {}
    arguments: Mapping[str, str] = {}
    """Build arguments: variables of the steps, not of the template."""

    @property
    def variables(self) -> dict[str, str]:
        """The variables of the next step. `env` overrides build arguments, as with Docker."""
        return {**self.arguments, **self.env}

    def with_arguments(self, changes: Mapping[str, str]) -> "StepContext":
        """Return the context with further build arguments."""
        return structs.replace(self, arguments={**self.arguments, **changes})

    def with_env(self, changes: Mapping[str, str]) -> "StepContext":
        """Return the context with further variables."""
        return structs.replace(self, env={**self.env, **changes})


def hashed(*parts: object) -> str:
    """Return the key for a sequence of parts."""
    data = msgspec.json.encode(parts, order="sorted")
    return hashlib.sha256(data).hexdigest()[:KEY_LENGTH]


def step_keys(base: str, steps: Sequence[BuildStep]) -> tuple[str, ...]:
    """Return the key of the layer after each step."""
    keys: list[str] = []
    for step in steps:
        base = hashed(base, step.type, step.args, step.files_hash)
        keys.append(base)
    return tuple(keys)


def result_key(
    last: str,
    start: str,
    ready: str,
    resources: Resources,
    start_context: StepContext | None = None,
) -> str:
    """Return the key of the stored result, which includes the memory of the start command.

    `start_context` is that of an inherited command; others run in the context of the last layer.
    """
    context = () if start_context is None else (msgspec.to_builtins(start_context),)
    return hashed(last, "result", start, ready, msgspec.to_builtins(resources), *context)


def first_forced(steps: Sequence[BuildStep], *, force: bool) -> int:
    """Return the number of leading steps that may come from the cache."""
    if force:
        return 0
    return next((number for number, step in enumerate(steps) if step.force), len(steps))


def needs_sandbox(step: BuildStep) -> bool:
    """Whether a step needs a sandbox, and its result a layer. Variables without `$` do not."""
    return step.type not in ("ENV", "ARG") or any("$" in value for value in step.args[1::2])
