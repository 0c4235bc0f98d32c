"""The code blocks of a page, with the marks that say how the walk runs them.

A mark is an HTML comment, which readers of the page do not see:

    <!-- walk: skip REASON: TESTS -->  before a block: it is not run, TESTS (file::test, …) do
    <!-- walk: exit 1 -->              before a block: its exit code
    <!-- walk: types yes -->           before a block: the answer to its question
    <!-- walk: file NAME -->           before a block: it is a file that a later block uses
    <!-- walk: check COMMAND -->       after a block: COMMAND must succeed then
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAST = "docs/how-to/operating.md"
"""It ends with the removal of the installation."""

_FENCE = re.compile(r"^```(\w*)$")
_MARK = re.compile(r"^<!-- walk: (\w+) (.+) -->$")
_DIAGRAM = "mermaid"
_KINDS_BEFORE = ("skip", "exit", "types", "file")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict[str, str])
    checks: list[str] = field(default_factory=list[str])

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def exit_code(self) -> int:
        return int(self.marks.get("exit", "0"))

    @property
    def skip(self) -> tuple[str, str] | None:
        """The reason why the block is not run, and the tests that run what it shows."""
        if "skip" not in self.marks:
            return None
        reason, _, test = self.marks["skip"].rpartition(": ")
        return reason, test


def pages() -> list[str]:
    """Return README, every how-to guide and every page of concepts, in the order of the walk."""
    found = [
        str(path.relative_to(ROOT))
        for directory in ("docs/how-to", "docs")
        for path in sorted((ROOT / directory).glob("*.md"))
    ]
    return ["README.md", *(page for page in found if page != LAST), LAST]


def blocks(page: str, text: str | None = None) -> list[Block]:
    """Return the blocks of a page in order."""
    lines = ((ROOT / page).read_text() if text is None else text).splitlines()
    found: list[Block] = []
    marks: dict[str, str] = {}
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if mark := _MARK.match(line):
            kind, value = mark.groups()
            if kind in _KINDS_BEFORE:
                marks[kind] = value
            elif kind == "check" and found and not marks:
                found[-1].checks.append(value)
            else:
                raise ValueError(f"{page}:{number}: unknown or misplaced mark {line!r}")
        elif fence := _FENCE.match(line):
            end = lines.index("```", number)
            body = "\n".join(lines[number:end]) + "\n"
            if fence[1] != _DIAGRAM:
                found.append(Block(page, number, fence[1], body, marks))
            marks, number = {}, end + 1
        elif line.strip() and marks:
            raise ValueError(f"{page}:{number}: the mark {marks} is not followed by a block")
    return found


def indented(page: str) -> list[int]:
    """Return the lines of blocks without a fence: neither their language nor a mark is known."""
    fenced = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    text = fenced.sub(lambda block: "\n" * block[0].count("\n"), (ROOT / page).read_text())
    return [number for number, line in enumerate(text.splitlines(), 1) if re.match(r" {4}\S", line)]


def expected_output(program: str) -> list[re.Pattern[str]]:
    """Return what a program prints according to the comments behind its `print` calls."""
    calls = re.findall(r"^\s*(?:print|console\.log)\(.*\)\s+(?:#|//) (.+)$", program, re.MULTILINE)
    return [pattern(comment.replace("ID", "…")) for comment in calls]


def pattern(text: str) -> re.Pattern[str]:
    """Return a pattern for a printed line: `…` stands for any text without spaces."""
    parts = text.strip().split("…")
    return re.compile(r"\S*".join(re.escape(part) for part in parts))


def console_steps(text: str) -> list[tuple[str, list[re.Pattern[str]]]]:
    """Return the commands of a `console` block, each with the lines that it prints."""
    steps: list[tuple[str, list[re.Pattern[str]]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            steps.append((line[2:], []))
        elif steps and steps[-1][0].endswith("\\"):
            command, lines = steps.pop()
            steps.append((f"{command}\n{line}", lines))
        else:
            steps[-1][1].append(pattern(line))
    return steps
