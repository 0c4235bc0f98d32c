"""The options of `paddock template build`: the name, resources, and where the Dockerfile is."""

import re
import sys
from decimal import ROUND_UP, Decimal
from pathlib import Path
from typing import NamedTuple

import click

from paddock.kit.errors import InvalidError
from paddock.resources import quantity

_MIB = 1 << 20
_NOT_IN_NAMES = re.compile(r"[^a-z0-9_-]+")


class Place(NamedTuple):
    """What is built, and from what."""

    name: str
    context: Path
    dockerfile: Path | None
    """None means standard input."""

    def read(self) -> str:
        """Return the text of the Dockerfile."""
        try:
            if self.dockerfile is None:
                return sys.stdin.read()
            return self.dockerfile.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise InvalidError(
                f"{self.dockerfile} cannot be read: {reason}", hint="set the file with -f"
            ) from error


def place(words: tuple[str, ...], file: str | None) -> Place:
    """Return what the arguments [NAME] CONTEXT and the option --file mean."""
    *names, directory = words
    context = Path(directory)
    if not context.is_dir():
        raise click.UsageError(
            f"{directory!r} is not a directory; the arguments are [NAME] CONTEXT, such as `web .`"
        )
    name = names[0] if names else default_name(context)
    if file == "-":
        return Place(name, context, None)
    return Place(name, context, Path(file) if file else context / "Dockerfile")


def default_name(context: Path) -> str:
    """Return the name of a directory as the name of a template."""
    name = _NOT_IN_NAMES.sub("-", context.resolve().name.lower()).strip("-_")
    if not name:
        raise click.UsageError(f"{context} gives no name for the template: pass NAME CONTEXT")
    return name


def mebibytes(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    """Parse an amount of memory such as 1Gi; return MiB."""
    if text is None:
        return None
    try:
        found = quantity.parse(text)
    except InvalidError as error:
        raise click.BadParameter(f"{text!r} is not an amount such as 512Mi or 2Gi") from error
    return int((found / Decimal(_MIB)).to_integral_value(ROUND_UP))
