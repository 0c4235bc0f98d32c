"""docs/architecture.md is true: every file, function and package that it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paddock"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = re.compile(r"([\w/-]+\.(?:py|c))(?::([A-Za-z_][\w.]*))?")
"""`claims/engine.py`, or `claims/engine.py:Claims.create`."""


def named_files(text: str) -> list[tuple[str, str]]:
    """Every file that a page names, with the function after it, if any."""
    return sorted({(file, name) for file, name in NAMED.findall(text) if "/" in file})


def located(file: str) -> Path | None:
    """Return the file, whose path is given below the package or below the project."""
    return next((base / file for base in (SOURCE, ROOT) if (base / file).is_file()), None)


def definitions(tree: ast.Module) -> set[str]:
    """Every function and class of a module, methods as `Class.method`."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


@pytest.mark.parametrize(("file", "name"), named_files(PAGE))
def test_a_named_file_and_its_function_exist(file: str, name: str) -> None:
    path = located(file)
    assert path is not None, f"{file} is gone"
    if name:
        assert name in definitions(ast.parse(path.read_text())), f"{file} has no {name}"


def packages() -> list[str]:
    """Every package one or two levels below `paddock`."""
    found = (path.parent.relative_to(SOURCE) for path in SOURCE.rglob("__init__.py"))
    return sorted(str(path) for path in found if 1 <= len(path.parts) <= 2)


@pytest.mark.parametrize("package", packages())
def test_every_package_is_on_the_map(package: str) -> None:
    assert f"`{package}/`" in PAGE


def test_what_is_gone_would_be_noticed() -> None:
    text = "`claims/no_such_file.py`, `kit/clock.py:no_such_function`, README.py"
    assert named_files(text) == [
        ("claims/no_such_file.py", ""),
        ("kit/clock.py", "no_such_function"),
    ]
    assert located("claims/no_such_file.py") is None
    assert "no_such_function" not in definitions(ast.parse((SOURCE / "kit/clock.py").read_text()))
