"""Passes every command its target and its output."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec

import click

if TYPE_CHECKING:
    from paddock.cli.output import Output
    from paddock.cli.target import CliTarget

P = ParamSpec("P")


class GlobalOptions(NamedTuple):
    """The options of all commands, before the name of the command; --output also after it."""

    config: Path | None
    url: str | None
    output: str


def with_target(function: "Callable[Concatenate[CliTarget, Output, P], Any]") -> Callable[P, Any]:
    """Pass a command its target and its output."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Any:
        # Imported here to keep --help fast: it needs neither settings nor tables.
        from paddock.cli.output import Output
        from paddock.cli.target import CliTarget

        options: GlobalOptions = click.get_current_context().find_root().obj
        target, output = CliTarget(options.config, options.url), Output(options.output)
        return function(target, output, *args, **kwargs)

    return called
