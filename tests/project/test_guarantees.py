"""Every guarantee in docs/guarantees.md has a bound, and a test that exists and is run."""

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "guarantees.md").read_text()
DEMANDED = (
    "given to two claimers",
    "lost by pausing",
    "acknowledged write survives",
    "outlive the control plane",
    "quota is never exceeded",
    "held request is sent once",
)
NEVER_RUN = re.compile(r"pytest\.(mark\.)?(skip\b|xfail\b|skipif\((condition=)?(True|1)[,)])")
"""Marks and calls; tests skipped on some machines only are run on others."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def rows(text: str) -> list[list[str]]:
    """Return the cells of every guarantee."""
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| Promise"))
    ]


def problem(promise: str, bound: str, proof: str) -> str | None:
    """Return what a guarantee lacks."""
    if not promise or not re.search(r"\w", bound):
        return f"no bound: {promise}"
    proofs = re.findall(r"`(tests/[^`]+)`", proof)
    if not proofs:
        return f"no test proves: {promise}"
    for named in proofs:
        file, _, test = named.partition("::")
        path = ROOT / file
        if not path.is_file():
            return f"{named} is not there"
        there = collected_from(path)
        if not there or (test and test not in there):
            return f"{named} is not there"
        if not (there[test] if test else all(there.values())):
            return f"{named} is never run"
    return None


@functools.cache
def collected_from(path: Path) -> dict[str, bool]:
    """The tests that pytest collects from a file, and whether each is run anywhere.

    The source is parsed, not imported: collecting all tests takes longer than this test.
    """
    if not path.match("test_*.py"):
        return {}
    tree = parsed(path)
    is_run = not is_off(tree.body)
    found: dict[str, bool] = {}
    for node in tree.body:
        if isinstance(node, Function) and node.name.startswith("test"):
            found[node.name] = is_run and not is_never_run(node)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            marks = [node, *(item for item, _ in bases(node, tree))]
            is_class_run = is_run and not any(map(is_never_run, marks))
            for method in methods(node, tree):
                name = f"{node.name}::{method.name}"
                found[name] = is_class_run and not is_never_run(method)
    return found


def methods(node: ast.ClassDef, module: ast.Module) -> Iterator[Function]:
    """The tests of a class, including those of its base classes."""
    for base, _ in reversed([(node, module), *bases(node, module)]):
        for item in base.body:
            if isinstance(item, Function) and item.name.startswith("test"):
                yield item


def bases(node: ast.ClassDef, module: ast.Module) -> Iterator[tuple[ast.ClassDef, ast.Module]]:
    """The base classes of a class, in any test module."""
    for base in node.bases:
        *where, name = ast.unparse(base).split(".")
        there = imported(where[0] if where else name, module) or module
        for item in there.body:
            if isinstance(item, ast.ClassDef) and item.name == name:
                yield item, there
                yield from bases(item, there)


def imported(name: str, module: ast.Module) -> ast.Module | None:
    """The project module that a name refers to."""
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and name in [item.name for item in node.names]:
            place = ROOT.joinpath(*(node.module or "").split("."))
            for path in (place / f"{name}.py", place.with_suffix(".py")):
                if path.is_file():
                    return parsed(path)
    return None


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def is_never_run(node: Function | ast.ClassDef) -> bool:
    """Whether a mark or its first statements keep a test from running anywhere."""
    return any(NEVER_RUN.match(ast.unparse(mark)) for mark in node.decorator_list) or is_off(
        node.body if isinstance(node, ast.ClassDef) else node.body[:2]
    )


def is_off(body: Sequence[ast.stmt]) -> bool:
    """Whether a body skips by its own statement or by `pytestmark`."""
    for node in body:
        if isinstance(node, ast.Expr) and NEVER_RUN.match(ast.unparse(node)):
            return True
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks = node.value.elts if isinstance(node.value, ast.List) else [node.value]
            if any(NEVER_RUN.match(ast.unparse(mark)) for mark in marks):
                return True
    return False


@pytest.mark.parametrize(("promise", "bound", "proof"), rows(TEXT))
def test_a_guarantee_has_a_bound_and_a_test(promise: str, bound: str, proof: str) -> None:
    assert problem(promise, bound, proof) is None


@pytest.mark.parametrize("words", DEMANDED)
def test_the_most_important_guarantees_are_listed(words: str) -> None:
    assert any(words in promise for promise, *_ in rows(TEXT))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("| It never breaks | ever | |", "no test proves"),
        ("| It never breaks | ever | by reading the code |", "no test proves"),
        ("| It never breaks | - | `tests/project/test_guarantees.py` |", "no bound"),
        ("| It never breaks | ever | `tests/app/test_nothing.py::test_it` |", "is not there"),
        (
            "| It never breaks | ever | `tests/project/test_guarantees.py::test_it` |",
            "is not there",
        ),
        (
            "| It never breaks | ever | `tests/project/test_guarantees.py::problem` |",
            "is not there",
        ),
        ("| It never breaks | ever | `tests/store/contract.py` |", "is not there"),
    ],
)
def test_an_incomplete_guarantee_is_detected(row: str, said: str) -> None:
    found = problem(*rows(row)[0])

    assert found is not None
    assert said in found


FILES = {
    "test_kinds.py": """
import pytest
def test_plain(): pass
def helper():
    def test_inside(): pass
@pytest.mark.skipif(1 > 2, reason="elsewhere")
def test_here(): pass
@pytest.mark.skip
def test_off(): pass
@pytest.mark.skipif(True, reason="never")
def test_off_by_a_condition(): pass
@pytest.mark.xfail(reason="broken")
def test_broken(): assert False
def test_off_by_itself():
    '''Later.'''
    pytest.skip("later")
class Shared:
    def test_shared(self): pass
class TestAll(Shared):
    async def test_own(self): pass
    def helps(self): pass
@pytest.mark.skip
class TestNone(Shared): pass
""",
    "test_marked.py": "import pytest\npytestmark = [pytest.mark.skip]\ndef test_marked(): pass\n",
    "test_skips.py": "import pytest\npytest.skip('x', allow_module_level=True)\ndef test_it(): 1\n",
    "other.py": "def test_elsewhere(): pass\n",
}


def test_tests_read_as_run_are_those_that_pytest_runs(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    # Without plugins that are not needed here: they take most of the time.
    options = ("-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-o", "asyncio_mode=auto")
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-c", os.devnull, "--rootdir", ".", *options],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    run = set(re.findall(r"^(\S+) PASSED", done.stdout, re.MULTILINE))
    assert run, done.stdout + done.stderr
    read = {
        f"{name}::{test}"
        for name in FILES
        for test, is_run in collected_from(tmp_path / name).items()
        if is_run
    }
    assert read == run


def test_base_classes_of_other_modules_are_found() -> None:
    there = collected_from(ROOT / "tests" / "store" / "test_contract.py")
    assert there["TestUpdating::test_a_stale_write_is_a_conflict"]
