"""Variables of a stage: ENV and ARG, and what `$NAME` stands for."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from e2b_dockerfile_utils import ShellLex

from paddock.cli.template.dockerfile.model import DockerfileError

_REFERENCE = re.compile(r"\$[A-Za-z0-9_{@*#?!$-]")


class _Lookup(dict[str, str]):
    """Values by name, which remembers the names that it lacks."""

    def __init__(self, values: Mapping[str, str]) -> None:
        super().__init__(values)
        self.missing: set[str] = set()

    def get(self, key: str, default: object = None, /) -> str | None:  # type: ignore[override]
        """Return the value of a name, or None."""
        if key in self:
            return self[key]
        self.missing.add(key)
        return None


class Expanded(NamedTuple):
    """A word after expansion."""

    text: str
    unknown: tuple[str, ...]
    """Names whose value only the build knows. They are left in the text."""


class Variables:
    """The variables of one stage."""

    def __init__(self, escape: str) -> None:
        self._escape = escape
        self._env: dict[str, str] = {}
        self._in_build: set[str] = set()
        self._arguments: dict[str, str | None] = {}

    @property
    def declared(self) -> frozenset[str]:
        """The names of build arguments."""
        return frozenset(self._arguments)

    def set_env(self, name: str, value: Expanded) -> None:
        """Set a variable; one that refers to the base image is known in the build only."""
        self._env.pop(name, None)
        self._in_build.discard(name)
        if value.unknown:
            self._in_build.add(name)
        else:
            self._env[name] = value.text

    def set_argument(self, name: str, value: str | None) -> bool:
        """Declare a build argument; return whether the build must know its value."""
        self._arguments[name] = value
        # ENV overrides ARG.
        return value is not None and name not in self._env and name not in self._in_build

    def expand(self, word: str, line: int) -> str:
        """Expand a word; raise if it refers to a variable of the base image."""
        return self._known(self._expand(word, line), line)

    def expand_text(self, text: str, line: int) -> str:
        """Expand the text of a heredoc, in which quotes have no meaning."""
        return self._known(self._expand(text, line, is_text=True), line)

    def expand_env(self, word: str, line: int) -> Expanded:
        """Expand a value of ENV; the build expands what refers to the base image."""
        found = self._expand(word, line)
        if not found.unknown and _REFERENCE.search(found.text):
            raise DockerfileError(
                line,
                f"the value {found.text!r} contains a dollar sign that would be expanded",
                hint="set it in a file of /etc/profile.d with a RUN step",
            )
        return found

    def _known(self, found: Expanded, line: int) -> str:
        if found.unknown:
            name = found.unknown[0]
            raise DockerfileError(
                line,
                f"the value of ${name} is known only in the base image",
                hint=f"declare it with ENV {name}=…, or write the value",
            )
        return found.text

    def _expand(self, word: str, line: int, *, is_text: bool = False) -> Expanded:
        """Expand the variables that are declared; keep references to others."""
        values = {name: value for name, value in self._arguments.items() if value is not None}
        lookup = _Lookup(values | self._env)
        for name in self._in_build:
            lookup.pop(name, None)
        text = self._process(word, lookup, line, keep_unset=True, is_text=is_text)
        unknown = lookup.missing - (self._arguments.keys() - self._in_build)
        if lookup.missing and not unknown:
            text = self._process(word, lookup, line, keep_unset=False, is_text=is_text)
        return Expanded(text, tuple(sorted(unknown)))

    def _process(
        self, word: str, values: _Lookup, line: int, *, keep_unset: bool, is_text: bool
    ) -> str:
        lex = ShellLex(
            self._escape, env=values, skip_unset_env=keep_unset, skip_process_quotes=is_text
        )
        try:
            return lex.process_word(word)
        except ValueError as error:
            raise DockerfileError(line, str(error)) from error
