"""How the code is laid out: rules that a reader can rely on."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "paddock"
MODULES = sorted(SOURCE.rglob("*.py"))


def test_no_module_is_longer_than_five_hundred_lines() -> None:
    long = {
        str(path.relative_to(SOURCE)): count
        for path in MODULES
        if (count := len(path.read_text().splitlines())) > 500
    }
    assert not long


@pytest.mark.parametrize("name", ["utils", "common", "helpers", "misc"])
def test_there_is_no_dumping_place(name: str) -> None:
    assert not [path for path in MODULES if path.stem == name]


def test_every_module_says_what_lives_in_it() -> None:
    silent = [
        str(path.relative_to(SOURCE))
        for path in MODULES
        if ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert not silent


def test_only_the_clock_asks_the_system_for_the_date() -> None:
    asking = [
        str(path.relative_to(SOURCE))
        for path in MODULES
        if path.name != "clock.py"
        and path.parts[-2] != "envd"
        and any(word in path.read_text() for word in ("datetime.now(", "datetime.utcnow("))
    ]
    assert not asking
