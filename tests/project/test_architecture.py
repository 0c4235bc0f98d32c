"""The layout of the code: rules that a reader can rely on.

The direction of imports between packages is checked by import-linter (`lint-imports`). Exceptions
stand in allow-lists below, each with its reason.
"""

import ast
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paddock"
MODULES = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}

MAX_MODULES = 15
CROWDED: dict[str, str] = {}
"""Directories with more modules than that, and why."""

SHARED_CLASS_NAMES: dict[str, str] = {}
"""Public class names that are used more than once, and why."""

DIALECT = re.compile(r"(Give|Gives|Say|Says|Tell|Tells|Hear|Hears|Whoever|Take in|Takes in) ")
"""First words that hide what a function does: `Return …`, `Whether …`, `Report …` say it."""


def named(path: Path) -> str:
    """The path of a module below the package."""
    return str(path.relative_to(SOURCE))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


# ---- sizes ---------------------------------------------------------------------------------


def test_no_module_is_longer_than_five_hundred_lines() -> None:
    long = {
        named(path): count
        for path in MODULES
        if (count := len(path.read_text().splitlines())) > 500
    }
    assert not long


def test_modules_and_functions_stay_small() -> None:
    lines = [len(path.read_text().splitlines()) for path in MODULES]
    assert statistics.median(lines) <= 130
    lengths = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in MODULES.values()
        for node in functions(tree)
    )
    assert lengths[int(len(lengths) * 0.95)] <= 25


def test_no_directory_is_crowded() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path in MODULES:
        if path.name != "__init__.py":
            counts[str(path.parent.relative_to(SOURCE))] += 1
    crowded = {name for name, count in counts.items() if count > MAX_MODULES}
    assert crowded == set(CROWDED)


# ---- names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["utils", "common", "helpers", "misc", "base_classes"])
def test_there_is_no_module_for_leftovers(name: str) -> None:
    assert not [path for path in MODULES if path.stem == name]


def test_a_public_class_name_is_used_once() -> None:
    owners: dict[str, list[str]] = defaultdict(list)
    for path, tree in MODULES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].append(named(path))
    repeated = {name: paths for name, paths in owners.items() if len(paths) > 1}
    assert {n: p for n, p in repeated.items() if n not in SHARED_CLASS_NAMES} == {}
    assert set(SHARED_CLASS_NAMES) <= set(repeated), "an entry of the allow-list is not needed"


# ---- language ------------------------------------------------------------------------------


def test_every_module_has_a_docstring() -> None:
    assert not [named(path) for path, tree in MODULES.items() if ast.get_docstring(tree) is None]


def test_docstrings_begin_with_plain_verbs() -> None:
    found = [
        f"{named(path)}: {node.name}: {text.splitlines()[0]}"
        for path, tree in MODULES.items()
        for node in functions(tree)
        if (text := ast.get_docstring(node)) and DIALECT.match(text)
    ]
    assert not found


# ---- imports -------------------------------------------------------------------------------


def is_type_checking(node: ast.AST) -> bool:
    """Whether a statement is the guard of imports that only type checkers follow."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Module and name of every import at run time, in functions too."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        else:
            yield from imported(node)


def import_graph() -> dict[str, set[str]]:
    """Which module imports which, at run time."""
    names = {}
    for path in MODULES:
        parts = ("paddock", *path.relative_to(SOURCE).with_suffix("").parts)
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        targets = set()
        for module, attribute in imported(MODULES[path]):
            below = f"{module}.{attribute}"
            targets.add(below if below in names else module)
        graph[name] = {target for target in targets if target in names} - {name}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected parts of a graph that have more than one member."""
    reachable = {name: _reach(graph, name) for name in graph}
    found: list[set[str]] = []
    for name, below in reachable.items():
        ring = {other for other in below if name in reachable[other]}
        if len(ring) > 1 and ring not in found:
            found.append(ring)
    return found


def _reach(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    queue = list(graph[start])
    while queue:
        name = queue.pop()
        if name not in seen:
            seen.add(name)
            queue.extend(graph[name])
    return seen


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    assert cycles(import_graph()) == []


def test_a_circle_would_be_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_only_the_clock_reads_the_system_date() -> None:
    reading = [
        named(path)
        for path in MODULES
        if path.name != "clock.py"
        and "envd" not in path.relative_to(SOURCE).parts
        and any(word in path.read_text() for word in ("datetime.now(", "datetime.utcnow("))
    ]
    assert not reading
