"""Every block of README and the how-to guides is run, or names the test that covers it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.newcomer.blocks import (
    ROOT,
    blocks,
    console_steps,
    expected_output,
    indented,
    pages,
)

RUN = {"sh", "console", "python", "js", "yaml"}
REASONS = re.compile(
    r"needs (systemd|a cluster|a company network|more machines|an outside registry|another start"
    r"|a language model)\b"
)


@cache
def functions_of(file: Path) -> frozenset[str]:
    """Return the names of the tests that a file defines."""
    nodes = ast.parse(file.read_text()).body
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(
        node.name for node in nodes if isinstance(node, functions) and node.name.startswith("test_")
    )


def missing(tests: str) -> list[str]:
    """Return the tests of a mark, separated by commas, that are not `file::test` of this tree."""
    found: list[str] = []
    for test in tests.split(", "):
        file, _, name = test.partition("::")
        if (
            not file.endswith(".py")
            or not (ROOT / file).is_file()
            or name not in functions_of(ROOT / file)
        ):
            found.append(test)
    return found


@pytest.mark.parametrize("page", pages())
def test_every_block_is_run_or_names_its_reason_and_its_test(page: str) -> None:
    assert not indented(page), "use a fence with a language"
    for block in blocks(page):
        if block.skip is None and "file" not in block.marks:
            assert block.language in RUN, f"{block.place}: the walk cannot run {block.language!r}"
        if block.skip is None:
            continue
        reason, tests = block.skip
        assert REASONS.match(reason), f"{block.place}: {reason!r} is not a reason"
        assert not missing(tests), f"{block.place}: {missing(tests)} is not a test, file::test"


def test_a_mark_names_a_test_and_not_only_its_file() -> None:
    here = "tests/newcomer/test_blocks.py"
    own = f"{here}::test_a_mark_names_a_test_and_not_only_its_file"
    assert missing(own) == []
    assert missing(f"{own}, {own}") == []
    for wrong in (here, f"{here}::", f"{here}::missing", "scripts/test", f"{own}_x", "tests::x"):
        assert missing(wrong) == [wrong]
        assert missing(f"{own}, {wrong}") == [wrong]


def test_programs_for_frameworks_are_those_that_are_tested() -> None:
    text = (ROOT / "docs" / "how-to" / "frameworks.md").read_text()
    for path in sorted((ROOT / "examples" / "frameworks").rglob("*")):
        if path.is_file():
            assert f"\n{path.read_text()}```\n" in text, f"{path.name} differs from the page"


def test_marks_belong_to_the_block_beside_them() -> None:
    page = (
        "<!-- walk: exit 1 -->\n```sh\nfalse\n```\n<!-- walk: check test -f out -->\n"
        "<!-- walk: skip needs a cluster: tests/on_cluster -->\n\n```sh\nkubectl get pods\n```\n"
    )
    first, second = blocks("page.md", page)
    assert (first.text, first.exit_code, first.checks) == ("false\n", 1, ["test -f out"])
    assert second.skip == ("needs a cluster", "tests/on_cluster")
    for wrong in ("<!-- walk: exit 1 -->\ntext\n", "<!-- walk: check true -->\n"):
        with pytest.raises(ValueError, match=r"page\.md:\d"):
            blocks("page.md", wrong)


def test_comments_behind_print_are_the_expected_output() -> None:
    [line] = expected_output('print(f"http://{host}/")   # http://8000-ID.localhost:3000/\n')
    assert line.fullmatch("http://8000-i7b2.localhost:3000/")
    assert not line.fullmatch("http://8000-i7b2.example.org/")


def test_a_console_block_has_commands_and_their_output() -> None:
    [(command, [line])] = console_steps("$ paddock logs | tail -1\n… called method=… key=…\n")
    assert command == "paddock logs | tail -1"
    assert line.fullmatch("2026-11-16 called method=DELETE key=8727")
