"""The code that `paddock run` runs: its text, its language, its arguments."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from msgspec import Struct

from paddock.kit.errors import InvalidError

LANGUAGES = {
    "": "python",
    ".py": "python",
    ".js": "javascript",
    ".mjs": "javascript",
    ".ts": "typescript",
    ".sh": "bash",
    ".bash": "bash",
    ".r": "r",
    ".java": "java",
}
"""The language of a file by its suffix in lower case."""

_STDIN = "-"


class CodeSource(Struct, frozen=True):
    """Code and its arguments."""

    code: str
    language: str
    arguments: tuple[str, ...] = ()
    """As `sys.argv` has them: the name of the file first."""

    @property
    def prelude(self) -> str:
        """The code to run first, which passes the arguments; empty if there is none."""
        if self.language == "python":
            # IPython warns about `sys.exit`, which ends a notebook in no other way.
            return (
                f"__import__('sys').argv[:] = {list(self.arguments)!a}\n"
                "__import__('warnings').filterwarnings('ignore', 'To exit: use')"
            )
        if self.language == "bash" and self.arguments[1:]:
            return f"set -- {shlex.join(self.arguments[1:])}"
        return ""


def read(code: str | None, words: Sequence[str], language: str | None) -> CodeSource:
    """Return the code that the command line names: `-c CODE`, a file, or `-`."""
    if code is not None:
        return _source(code, language or "python", ("-c", *words))
    if not words:
        raise click.UsageError(
            "no code to run: name a file, pass code with -c, or name - to read standard input"
        )
    if words[0] == _STDIN:
        return _source(sys.stdin.read(), language or "python", words)
    path = Path(words[0])
    found = language or LANGUAGES.get(path.suffix.lower())
    if found is None:
        raise click.UsageError(
            f"no language has the suffix of {path.name}: name the language with --language"
        )
    try:
        return _source(path.read_text(), found, words)
    except UnicodeDecodeError as error:
        raise InvalidError(f"{path} is not text in UTF-8") from error


def _source(code: str, language: str, arguments: Sequence[str]) -> CodeSource:
    if len(arguments) > 1 and language not in ("python", "bash"):
        raise click.UsageError(
            f"{language} code takes no arguments: pass values with --env NAME=VALUE"
        )
    return CodeSource(code, language, tuple(arguments))
