"""What a Dockerfile becomes: stages, steps and files to copy."""

from typing import NamedTuple

from e2b_dockerfile_utils import DockerfileInstruction

from paddock.kit.errors import InvalidError


class DockerfileError(InvalidError):
    """A Dockerfile, or one of its instructions, cannot be built."""

    def __init__(self, line: int, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"line {line}: {message}" if line else message, hint=hint)
        self.line = line


class PlainStep(NamedTuple):
    """One step of a build, as the build API takes it."""

    type: str
    args: tuple[str, ...]
    line: int = 0
    """Line of the Dockerfile that it comes from; 0 for a step that no instruction asked for."""


class InlineFile(NamedTuple):
    """A file that the Dockerfile contains (a heredoc of COPY)."""

    name: str
    content: str


class Copy(NamedTuple):
    """Files to copy. They become steps when their content is known."""

    sources: tuple[str, ...]
    inline: tuple[InlineFile, ...]
    destination: str
    owner: str
    """`user` or `user:group`. Empty means the user of the step."""
    mode: str
    """Octal mode. Empty means that of the source."""
    line: int
    stage: int | None = None
    """Number of the stage that the files come from."""
    image: str = ""
    """Image that the files come from. Without stage and image, they are in the build context."""
    unpacks: bool = False
    """Whether local tar archives are unpacked."""


class DockerfileStage(NamedTuple):
    """One stage of a Dockerfile: FROM and what follows."""

    number: int
    """Position, from 0."""
    name: str
    """Name in lower case, or an empty string."""
    base: str
    """Image, unless there is a parent."""
    parent: int | None
    """Number of the stage that it starts from."""
    line: int
    instructions: tuple[DockerfileInstruction, ...]

    @property
    def label(self) -> str:
        """The name, or the number of a stage without one."""
        return self.name or str(self.number)


class Dockerfile(NamedTuple):
    """A parsed Dockerfile."""

    stages: tuple[DockerfileStage, ...]
    arguments: dict[str, str | None]
    """ARGs before the first FROM, with the values that apply."""
    escape: str
    notes: tuple[str, ...]


class StageSteps(NamedTuple):
    """What a stage builds."""

    stage: DockerfileStage
    image: str
    """Image of the stage, or of the first of its ancestors."""
    steps: tuple[PlainStep | Copy, ...]
    start_command: str
    ready_command: str
    notes: tuple[str, ...]
    arguments: frozenset[str]
    """Names of the build arguments that it declares."""
