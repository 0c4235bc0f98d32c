"""Run the scenarios of another module, unmodified, in another world."""

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
    """Return the tests of some modules except those named in `without`, which has the reasons.

    Tests whose text matches `inside` are skipped too: they use internals that are in other
    processes here. With `only`, all others are skipped; those of `elsewhere` run in another module.
    `cases` selects the cases of a parametrized test; by default all are run.
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


class ShortenedAsyncio:
    """`asyncio`, for scenarios of virtual time.

    Sleeps of a few seconds are kept. Longer ones check that nothing happens, and are shortened.
    """

    LONGEST_SECONDS = 6.5

    def __init__(self, a_while_seconds: float = 1.5) -> None:
        self._a_while = a_while_seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds if seconds <= self.LONGEST_SECONDS else self._a_while)
