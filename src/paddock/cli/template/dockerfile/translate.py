"""Translates a stage of a Dockerfile into the steps of a build."""

from collections.abc import Callable, Mapping

from e2b_dockerfile_utils import DockerfileInstruction

from paddock.cli.template.dockerfile.copy import parse_copy
from paddock.cli.template.dockerfile.flags import check_run, parse_flags
from paddock.cli.template.dockerfile.model import (
    Copy,
    Dockerfile,
    DockerfileError,
    DockerfileStage,
    PlainStep,
    StageSteps,
)
from paddock.cli.template.dockerfile.run import command_line
from paddock.cli.template.dockerfile.stages import (
    ancestors,
    argument_values,
    platform_arguments,
)
from paddock.cli.template.dockerfile.start import StartCommand
from paddock.cli.template.dockerfile.variables import Variables

_ROOT = "root"
_DEFAULT_USER, _DEFAULT_WORKDIR = "user", "/home/user"
_WITHOUT_EFFECT: Mapping[str, str] = {
    "EXPOSE": "EXPOSE has no effect: every port of a sandbox can be reached",
    "LABEL": "LABEL has no effect: templates have no labels of images",
    "MAINTAINER": "MAINTAINER has no effect",
    "STOPSIGNAL": "STOPSIGNAL has no effect: sandboxes end without a signal of their own",
    "VOLUME": "VOLUME has no effect: the directory is part of the template",
}


def translate(
    dockerfile: Dockerfile, stage: DockerfileStage, arguments: Mapping[str, str]
) -> StageSteps:
    """Return the steps of a stage, after those of the stages that it starts from."""
    chain = ancestors(dockerfile, stage)
    translation = _Translation(dockerfile, platform_arguments() | dict(arguments))
    for item in chain:
        translation.follow(item)
    start, ready = translation.start.commands(translation.shell)
    return StageSteps(
        stage=stage,
        image=chain[0].base,
        steps=(*translation.steps, *translation.defaults()),
        start_command=start,
        ready_command=ready,
        notes=tuple(dict.fromkeys(translation.notes)),
        arguments=translation.variables.declared,
    )


class _Translation:
    """The state that instructions change, and the steps so far."""

    def __init__(self, dockerfile: Dockerfile, arguments: Mapping[str, str]) -> None:
        self.variables = Variables(dockerfile.escape)
        self.shell: tuple[str, ...] = ()
        self.start = StartCommand()
        self.notes: list[str] = []
        # What Docker starts with; a build starts as `user` in its home directory.
        self.steps: list[PlainStep | Copy] = [
            PlainStep("USER", (_ROOT,)),
            PlainStep("WORKDIR", ("/",)),
        ]
        self._dockerfile = dockerfile
        self._arguments = arguments
        self._user = _ROOT
        self._has_user = self._has_workdir = False
        self._stage = dockerfile.stages[0]

    def follow(self, stage: DockerfileStage) -> None:
        """Translate the instructions of one stage."""
        self._stage = stage
        self.start.begin_stage()
        for instruction in stage.instructions:
            if (note := _WITHOUT_EFFECT.get(instruction.name)) is not None:
                self.notes.append(f"line {instruction.start_line}: {note}")
                continue
            handler = _HANDLERS.get(instruction.name)
            if handler is None:
                raise DockerfileError(
                    instruction.start_line,
                    f"{instruction.name} is not supported",
                    hint="write its instructions into this Dockerfile",
                )
            handler(self, instruction)

    def defaults(self) -> list[PlainStep]:
        """Return the steps that set what sandboxes start with, where the Dockerfile does not."""
        steps = [] if self._has_user else [PlainStep("USER", (_DEFAULT_USER,))]
        return steps if self._has_workdir else [*steps, PlainStep("WORKDIR", (_DEFAULT_WORKDIR,))]

    def run(self, instruction: DockerfileInstruction) -> None:
        """Translate RUN."""
        self.notes += check_run(instruction)
        self._add("RUN", command_line(instruction, self.shell), line=instruction.start_line)

    def copy(self, instruction: DockerfileInstruction) -> None:
        """Translate COPY and ADD."""
        before = self._dockerfile.stages[: self._stage.number]
        self.steps.append(parse_copy(instruction, self.variables, before, self._user))

    def env(self, instruction: DockerfileInstruction) -> None:
        """Translate ENV. Its values see the variables before the instruction."""
        line, words = instruction.start_line, instruction.args
        parse_flags(instruction)
        if not words:
            raise DockerfileError(line, "ENV has no variable")
        values = {
            self.variables.expand(name, line): self.variables.expand_env(value, line)
            for name, value in zip(words[::3], words[1::3], strict=True)
        }
        if "" in values:
            raise DockerfileError(line, "ENV has a variable without a name")
        for name, value in values.items():
            self.variables.set_env(name, value)
        pairs = (part for name, value in values.items() for part in (name, value.text))
        self._add("ENV", *pairs, line=line)

    def arg(self, instruction: DockerfileInstruction) -> None:
        """Translate ARG."""
        shared = self._dockerfile.arguments
        values = argument_values(instruction, self.variables, self._arguments, shared)
        for name, value in values:
            if self.variables.set_argument(name, value) and value is not None:
                self._add("ARG", name, value, line=instruction.start_line)

    def workdir(self, instruction: DockerfileInstruction) -> None:
        """Translate WORKDIR."""
        self._add("WORKDIR", self._only_word(instruction), line=instruction.start_line)
        self._has_workdir = True

    def user(self, instruction: DockerfileInstruction) -> None:
        """Translate USER, without its group."""
        name, colon, _ = self._only_word(instruction).partition(":")
        if colon:
            self.notes.append(
                f"line {instruction.start_line}: the group of USER has no effect: "
                "commands run with the groups of the user"
            )
        self._add("USER", name, line=instruction.start_line)
        self._user, self._has_user = name, True

    def set_shell(self, instruction: DockerfileInstruction) -> None:
        """Translate SHELL."""
        if not instruction.json or not instruction.args:
            raise DockerfileError(
                instruction.start_line,
                "SHELL takes a list in JSON",
                hint='SHELL ["/bin/bash", "-o", "pipefail", "-c"]',
            )
        self.shell = tuple(instruction.args)

    def command(self, instruction: DockerfileInstruction) -> None:
        """Translate CMD."""
        self.start.set_command(instruction)

    def entrypoint(self, instruction: DockerfileInstruction) -> None:
        """Translate ENTRYPOINT."""
        self.start.set_entrypoint(instruction)

    def check(self, instruction: DockerfileInstruction) -> None:
        """Translate HEALTHCHECK."""
        self.start.set_check(instruction, self.shell)

    def _add(self, kind: str, *args: str, line: int) -> None:
        self.steps.append(PlainStep(kind, args, line))

    def _only_word(self, instruction: DockerfileInstruction) -> str:
        parse_flags(instruction)
        text = self.variables.expand(
            instruction.args[0] if instruction.args else "", instruction.start_line
        )
        if not text:
            raise DockerfileError(instruction.start_line, f"{instruction.name} has no value")
        return text


_HANDLERS: Mapping[str, Callable[[_Translation, DockerfileInstruction], None]] = {
    "RUN": _Translation.run,
    "COPY": _Translation.copy,
    "ADD": _Translation.copy,
    "ENV": _Translation.env,
    "ARG": _Translation.arg,
    "WORKDIR": _Translation.workdir,
    "USER": _Translation.user,
    "SHELL": _Translation.set_shell,
    "CMD": _Translation.command,
    "ENTRYPOINT": _Translation.entrypoint,
    "HEALTHCHECK": _Translation.check,
}
