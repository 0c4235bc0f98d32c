"""COPY and ADD: where files come from, and where they go."""

import re
from collections.abc import Iterable, Sequence

from e2b_dockerfile_utils import DockerfileInstruction, parse_heredoc

from paddock.cli.template.dockerfile.flags import is_on, parse_flags
from paddock.cli.template.dockerfile.model import Copy, DockerfileError, DockerfileStage, InlineFile
from paddock.cli.template.dockerfile.run import heredoc_text
from paddock.cli.template.dockerfile.stages import find_stage
from paddock.cli.template.dockerfile.variables import Variables

_MODE = re.compile(r"[0-7]{3,4}")
_URL = re.compile(r"(https?|ftp|git|ssh)://|git@", re.IGNORECASE)


def parse_copy(
    instruction: DockerfileInstruction,
    variables: Variables,
    stages: Sequence[DockerfileStage],
    user: str,
) -> Copy:
    """Return what a COPY or ADD copies; `stages` are those that it may copy from."""
    line, name = instruction.start_line, instruction.name
    flags = parse_flags(instruction)
    if len(instruction.args) < 2:
        raise DockerfileError(line, f"{name} needs a source and a destination")
    *raw_sources, raw_destination = instruction.args
    if parse_heredoc(raw_destination) is not None:
        raise DockerfileError(line, f"the destination of {name} cannot be a heredoc")
    inline = tuple(_inline_files(instruction, raw_sources, variables))
    sources = tuple(
        variables.expand(word, line) for word in raw_sources if parse_heredoc(word) is None
    )
    if remote := next((source for source in sources if _URL.match(source)), None):
        raise DockerfileError(
            line,
            f"{name} cannot fetch {remote}",
            hint="download it in a RUN step: RUN curl -fsSLo FILE URL",
        )
    stage, image = _origin(flags.get("from", ()), variables, stages, line)
    return Copy(
        sources=sources,
        inline=inline,
        destination=_destination(
            variables.expand(raw_destination, line), len(sources) + len(inline), line, name
        ),
        # Docker copies as root, whatever the user; a step copies as its user.
        owner=variables.expand((flags.get("chown") or ("",))[-1], line)
        or ("" if user == "root" else "root"),
        mode=_mode(variables.expand((flags.get("chmod") or ("",))[-1], line), line, name),
        line=line,
        stage=stage,
        image=image,
        unpacks=name == "ADD" and is_on(flags.get("unpack", ("true",))),
    )


def _destination(path: str, count: int, line: int, name: str) -> str:
    """Return a destination; that of a directory ends with a slash."""
    if not path:
        raise DockerfileError(line, f"the destination of {name} is empty")
    if path in (".", "..") or path.endswith(("/.", "/..")):
        return f"{path}/"
    if count > 1 and not path.endswith("/"):
        raise DockerfileError(
            line,
            f"{name} copies {count} sources, so the destination must be a directory",
            hint=f"end it with a slash: {path}/",
        )
    return path


def _mode(mode: str, line: int, name: str) -> str:
    if mode and not _MODE.fullmatch(mode):
        raise DockerfileError(
            line,
            f"{name} --chmod={mode} is not supported",
            hint="use an octal mode such as 0755, or chmod in a RUN step",
        )
    return mode


def _origin(
    values: Sequence[str], variables: Variables, stages: Sequence[DockerfileStage], line: int
) -> tuple[int | None, str]:
    """Return the stage or the image that --from names."""
    if not values:
        return None, ""
    name = variables.expand(values[-1], line)
    if not name:
        raise DockerfileError(line, "COPY --from has no value")
    if (stage := find_stage(stages, name)) is not None:
        return stage.number, ""
    if name.isdecimal():
        raise DockerfileError(line, f"COPY --from={name}: there is no such stage before this one")
    return None, name


def _inline_files(
    instruction: DockerfileInstruction, words: Iterable[str], variables: Variables
) -> Iterable[InlineFile]:
    documents = iter(instruction.heredocs)
    for word in words:
        if parse_heredoc(word) is None:
            continue
        document = next(documents)
        text = heredoc_text(document)
        if document.expand:
            text = variables.expand_text(text, instruction.start_line)
        yield InlineFile(document.name, text)
