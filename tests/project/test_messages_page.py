"""docs/reference/messages.md lists the warnings and events that operators meet, and no others."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paddock"
PAGE = (ROOT / "docs" / "reference" / "messages.md").read_text()
LOGS, _, EVENTS = PAGE.partition("\n## Events\n")
LEVELS = {"warning", "error", "exception", "critical"}


def calls(package: Path) -> Iterator[tuple[Path, ast.Call, str, str]]:
    """Every method call in the source: file, call, receiver, method."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                yield path, node, ast.unparse(node.func.value), node.func.attr


def constant(node: ast.expr) -> str | None:
    """The text of a constant string."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def logged() -> set[str]:
    """Messages of warnings and errors; envd logs into its sandbox, not for operators."""
    return {
        text
        for path, node, receiver, method in calls(SOURCE)
        if receiver == "log" and method in LEVELS and (SOURCE / "envd") not in path.parents
        if (text := constant(node.args[0])) is not None
    }


def recorded() -> set[str]:
    """Reasons of events that stand in the code as constants."""
    return {
        text
        for _, node, receiver, method in calls(SOURCE)
        if receiver.endswith("recorder") and method in {"warning", "normal"}
        if (text := constant(node.args[1])) is not None
    }


def first_cells(text: str) -> list[str]:
    """The first cell of every row of a table."""
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return [row.split("|")[1] for row in rows]


def test_every_message_is_on_the_page() -> None:
    listed = {name for cell in first_cells(LOGS) for name in re.findall(r"`([^`]+)`", cell)}
    assert logged() - listed == set()
    assert listed - logged() == set()


def test_every_event_is_on_the_page_and_exists() -> None:
    listed = {name for cell in first_cells(EVENTS) for name in re.findall(r"`([^`]+)`", cell)}
    assert recorded() - listed == set()
    source = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    assert {name for name in listed if f'"{name}"' not in source} == set()
