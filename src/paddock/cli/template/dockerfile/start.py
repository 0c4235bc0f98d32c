"""CMD, ENTRYPOINT and HEALTHCHECK: the start and ready commands of a template."""

import shlex
from collections.abc import Sequence

from e2b_dockerfile_utils import DockerfileInstruction

from paddock.cli.template.dockerfile.flags import parse_flags
from paddock.cli.template.dockerfile.model import DockerfileError
from paddock.cli.template.dockerfile.run import in_shell

_SHELL = ("/bin/sh", "-c")


class StartCommand:
    """What a container of the image would run."""

    def __init__(self) -> None:
        self._command: DockerfileInstruction | None = None
        self._entrypoint: DockerfileInstruction | None = None
        self._is_own_command = False
        self._check = ""

    def begin_stage(self) -> None:
        """Begin a stage that starts from the last one."""
        self._is_own_command = False

    def set_command(self, instruction: DockerfileInstruction) -> None:
        """Follow CMD."""
        parse_flags(instruction)
        self._command = instruction
        self._is_own_command = True

    def set_entrypoint(self, instruction: DockerfileInstruction) -> None:
        """Follow ENTRYPOINT, which drops the CMD of an earlier stage."""
        parse_flags(instruction)
        self._entrypoint = instruction
        if not self._is_own_command:
            self._command = None

    def set_check(self, instruction: DockerfileInstruction, shell: Sequence[str]) -> None:
        """Follow HEALTHCHECK."""
        parse_flags(instruction)
        kind, *words = instruction.args or ("",)
        if kind.upper() == "NONE":
            self._check = ""
        elif kind.upper() == "CMD" and words:
            self._check = shlex.join(words) if instruction.json else in_shell(words[0], shell)
        else:
            raise DockerfileError(instruction.start_line, "HEALTHCHECK takes CMD or NONE")

    def commands(self, shell: Sequence[str]) -> tuple[str, str]:
        """Return the start and the ready command; both are empty without CMD and ENTRYPOINT."""
        start = self._start(shell)
        return start, self._check if start else ""

    def _start(self, shell: Sequence[str]) -> str:
        command, entrypoint = self._command, self._entrypoint
        if entrypoint is None or not entrypoint.args:
            return _line(command, shell)
        if not entrypoint.json:
            return _line(entrypoint, shell)  # Its shell ignores CMD.
        words = list(entrypoint.args)
        if command is not None and command.args:
            words += command.args if command.json else [*(shell or _SHELL), command.args[0]]
        return shlex.join(words)


def _line(instruction: DockerfileInstruction | None, shell: Sequence[str]) -> str:
    if instruction is None or not instruction.args:
        return ""
    if instruction.json:
        return shlex.join(instruction.args)
    return in_shell(instruction.args[0], shell)
