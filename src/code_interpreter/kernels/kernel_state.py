"""What a kernel has of its sandbox: variables, and the clone that its random state belongs to.

Nothing counts as set before the kernel has it: a run may be dropped, or its kernel.
"""

from collections.abc import Mapping
from typing import NamedTuple

from code_interpreter.kernels import variables
from code_interpreter.kernels.languages import Language
from code_interpreter.kernels.run import RunRequest


class Preparation(NamedTuple):
    """What a run needs of its kernel besides its code."""

    before: str
    after: str
    generation: str
    variables: Mapping[str, str] | None
    """Those of the sandbox, if they are new."""


class KernelState:
    """The state of one kernel."""

    def __init__(self, language: Language, initial: Mapping[str, str]) -> None:
        """`initial`: the variables with which the kernel started."""
        self._language = language
        self._initial = initial
        self._variables: Mapping[str, str] = {}
        self._variables_of: str | None = None
        """The clone whose variables the kernel has."""
        self._seeded_in: str | None = None
        """The clone in which the kernel was started or seeded again."""

    async def prepare(self, request: RunRequest) -> Preparation:
        """Return the code to run in silence before and after that of the caller."""
        reseed = self._language.reseed if self._seeded_in != request.generation else ""
        present: Mapping[str, str] | None = None
        if self._variables_of != request.generation:
            present = await request.get_variables()
        changed = variables.before_run(self._variables, present, request.variables)
        of_sandbox = self._variables if present is None else present
        reset = variables.after_run(self._initial, of_sandbox, request.variables)
        before = "\n".join(part for part in (reseed, self._set(changed)) if part)
        return Preparation(before, self._set(reset), request.generation, present)

    def keep(self, prepared: Preparation) -> None:
        """Note what the kernel has now."""
        self._seeded_in = prepared.generation
        if prepared.variables is not None:
            self._variables = prepared.variables
            self._variables_of = prepared.generation

    def _set(self, changed: Mapping[str, str | None]) -> str:
        return self._language.set_variables(changed) if changed else ""
