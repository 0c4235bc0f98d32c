"""Every promise in docs/guarantees.md has a bound, and a test that exists."""

import ast
import re
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


def rows(text: str) -> list[list[str]]:
    """Give the cells of every promise."""
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| Promise"))
    ]


def problem(promise: str, bound: str, proof: str) -> str | None:
    """Say what a promise lacks."""
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
        names = {
            node.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and node.name.startswith("test_")
        }
        if not names or (test and test.rpartition("::")[2] not in names):
            return f"{named} is not there"
    return None


@pytest.mark.parametrize(("promise", "bound", "proof"), rows(TEXT))
def test_a_promise_has_its_bound_and_its_proof(promise: str, bound: str, proof: str) -> None:
    assert problem(promise, bound, proof) is None


@pytest.mark.parametrize("words", DEMANDED)
def test_what_matters_most_is_promised(words: str) -> None:
    assert any(words in promise for promise, *_ in rows(TEXT))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("| It never breaks | ever | |", "no test proves"),
        ("| It never breaks | ever | by reading the code |", "no test proves"),
        ("| It never breaks | - | `tests/app/test_guarantees.py` |", "no bound"),
        ("| It never breaks | ever | `tests/app/test_nothing.py::test_it` |", "is not there"),
        ("| It never breaks | ever | `tests/app/test_guarantees.py::test_it` |", "is not there"),
        ("| It never breaks | ever | `tests/app/test_guarantees.py::problem` |", "is not there"),
    ],
)
def test_a_promise_that_lacks_something_is_found(row: str, said: str) -> None:
    found = problem(*rows(row)[0])

    assert found is not None
    assert said in found
