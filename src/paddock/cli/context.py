"""Hands every command the place it works on and the way it shows things."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec

import click

if TYPE_CHECKING:
    from paddock.cli.output import Output
    from paddock.cli.target import Place

P = ParamSpec("P")


class Chosen(NamedTuple):
    """What every command can be told: before its name, the form of the output also after it."""

    config: Path | None
    url: str | None
    output: str


def with_place(function: "Callable[Concatenate[Place, Output, P], Any]") -> Callable[P, Any]:
    """Give a command its place and its output."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Any:
        # Not at the top: the help needs neither settings nor tables.
        from paddock.cli.output import Output
        from paddock.cli.target import Place

        chosen: Chosen = click.get_current_context().find_root().obj
        place, output = Place(chosen.config, chosen.url), Output(chosen.output)
        return function(place, output, *args, **kwargs)

    return called
