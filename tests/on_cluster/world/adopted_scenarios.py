"""Running another module's scenarios on another world, as they are written."""

import asyncio
import inspect
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pytest


def scenarios(
    modules: Iterable[types.ModuleType],
    *,
    without: Mapping[str, str],
    inside: str = "",
    only: Collection[str] | None = None,
    elsewhere: Collection[str] = (),
    cases: Mapping[str, Callable[[tuple[Any, ...]], bool]] | None = None,
) -> dict[str, Any]:
    """Give every test of some modules but those named in `without`, which says why not.

    Left out are also those whose text matches `inside`: they reach into what are processes here.
    With `only`, all but those are left out; those of `elsewhere` are run there. `cases` says which
    cases of a parametrised one are run; of all others, all are.
    """
    found: dict[str, Any] = {}
    left_out = set(without)
    for module in modules:
        for name, value in vars(module).items():
            if not name.startswith("test_") or not isinstance(value, types.FunctionType):
                continue
            if name in elsewhere or (only is not None and name not in only):
                continue
            if name in without or (inside and re.search(inside, inspect.getsource(value))):
                left_out.discard(name)
                continue
            assert name not in found, f"two scenarios are called {name}"
            found[name] = _copy(value, (cases or {}).get(name))
    left_out |= set(only or ()) - set(found)
    assert not left_out, f"there are no such scenarios: {left_out}"
    return found


def _copy(function: types.FunctionType, chosen: Callable[[Any], bool] | None) -> Any:
    made = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__annotations__ = function.__annotations__
    marks = list(getattr(function, "pytestmark", []))
    if chosen is not None:
        marks = [_narrowed(mark, chosen) for mark in marks]
    if marks:
        made.pytestmark = marks  # type: ignore[attr-defined]
    return made


def _narrowed(mark: pytest.Mark, chosen: Callable[[Any], bool]) -> pytest.Mark:
    if mark.name != "parametrize":
        return mark
    names, values = mark.args
    kept = [value for value in values if chosen(value)]
    assert kept, f"no case of {names} is left"
    return pytest.mark.parametrize(names, kept).mark


class Hurried:
    """`asyncio`, for scenarios of virtual time.

    Deadlines of a few seconds are waited for. Whoever sleeps longer wants to see that nothing
    happens, and sees less of it here.
    """

    LONGEST_SECONDS = 6.5

    def __init__(self, a_while_seconds: float = 1.5) -> None:
        self._a_while = a_while_seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds if seconds <= self.LONGEST_SECONDS else self._a_while)
