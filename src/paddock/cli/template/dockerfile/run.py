"""RUN: the command line that a build runs."""

import re
import shlex
from collections.abc import Sequence

from e2b_dockerfile_utils import (
    DockerfileHeredoc,
    DockerfileInstruction,
    chomp_heredoc_content,
    parse_heredoc,
)

from paddock.cli.template.dockerfile.model import DockerfileError


def command_line(instruction: DockerfileInstruction, shell: Sequence[str]) -> str:
    """Return the command line of RUN; `shell` is that of SHELL, or empty."""
    if not instruction.args or not "".join(instruction.args).strip():
        raise DockerfileError(instruction.start_line, "RUN has no command")
    if instruction.json:
        return shlex.join(instruction.args)
    line = instruction.args[0]
    if not instruction.heredocs:
        return in_shell(line, shell)
    if len(instruction.heredocs) == 1 and parse_heredoc(line.strip()) is not None:
        return _script(instruction.heredocs[0], shell)
    # The shell reads the documents itself: it expands them by its own rules.
    documents = (f"\n{document.content}{document.name}" for document in instruction.heredocs)
    return in_shell(line + "".join(documents), shell)


def in_shell(command: str, shell: Sequence[str]) -> str:
    """Return a command line that another shell than that of the build runs, if one is set."""
    return shlex.join((*shell, command)) if shell else command


def heredoc_text(document: DockerfileHeredoc) -> str:
    """Return the content of a heredoc; `<<-` removes leading tabs."""
    return chomp_heredoc_content(document.content) if document.chomp else document.content


def _script(document: DockerfileHeredoc, shell: Sequence[str]) -> str:
    text = heredoc_text(document)
    if not text.startswith("#!"):
        return in_shell(text, shell)
    end = _delimiter(document.name, text)
    if not text.endswith("\n"):
        text += "\n"
    return (
        f'script=$(mktemp) && cat >"$script" <<\'{end}\' && chmod 700 "$script"\n{text}{end}\n'
        '"$script"; status=$?; rm -f "$script"; exit $status'
    )


def _delimiter(name: str, text: str) -> str:
    """Return the end of a heredoc that is not a line of its text."""
    found = re.sub(r"\W", "_", name)
    while found in text.splitlines():
        found += "_"
    return found
