"""The table of the battery in SECURITY.md, and the tool that writes it."""

from pathlib import Path

import pytest

from tests.security.battery import results
from tests.security.battery.attacks import PRIVILEGES, STATES, counts
from tests.security.battery.results import BEGIN, END, Recorder, Result

PAGE = Path(__file__).parents[2] / "SECURITY.md"


def rows(table: str) -> dict[str, list[str]]:
    """Return the cells of a table by class."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return {kind: rest for kind, *rest in cells}


def test_the_page_shows_that_every_attack_was_tried_in_every_sandbox_and_held():
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    cells = len(PRIVILEGES) * len(STATES)
    expected = {kind: [f"{number} / {number}"] * cells for kind, number in counts().items()}
    assert rows(table) == expected, "run the battery (SECURITY.md says how)"


def test_an_attack_that_succeeded_is_counted_as_not_held(tmp_path: Path):
    file = tmp_path / "results.jsonl"
    recorder = Recorder(str(file))
    for privileges in PRIVILEGES:
        for state in STATES:
            for name in ("one", "two"):
                is_held = (privileges, state, name) != ("locked", "forked", "two")
                recorder.record(Result("tools", name, privileges, state, is_held))

    table = results.table(results.read(file))

    assert rows(table) == {"tools": ["2 / 2"] * 7 + ["1 / 2"]}
    assert "16 attacks were tried, 15 were held" in table


def test_of_an_attack_that_ran_twice_the_last_result_counts(tmp_path: Path):
    file = tmp_path / "results.jsonl"
    for is_held in (False, True):
        Recorder(str(file)).record(Result("tools", "one", "sudo", "new", is_held))

    assert [one.is_held for one in results.read(file)] == [True]


def test_only_the_part_between_the_marks_is_replaced():
    page = f"before\n{BEGIN}\nold\n{END}\nafter"
    assert results.with_table(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter"
    with pytest.raises(ValueError, match="no marks"):
        results.with_table("no table", "new")
