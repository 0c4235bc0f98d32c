"""What a line of a build's log says: which step begins, or what its command prints."""

import re
from typing import NamedTuple

_HEAD = re.compile(
    r"(?P<cached>CACHED )?\[(?P<phase>\w+)(?: (?P<number>\d+)/(?P<count>\d+))?\] "
    r"(?P<text>[A-Z]+\b.*?)(?: \[[0-9a-f]{6,}\])?",
    re.DOTALL,
)
_OUTPUT = re.compile(
    r"\[(?P<phase>\w+)(?: \d+/\d+)?\] \[(?:stdout|stderr)\]: (?P<text>.*)", re.DOTALL
)


class Heading(NamedTuple):
    """A step begins, or was taken from the cache."""

    label: str
    text: str
    is_cached: bool


class Line(NamedTuple):
    """What a command prints, or any other message."""

    text: str
    is_output: bool


def parse(message: str) -> Heading | Line:
    """Return what a message of the log says."""
    if (found := _OUTPUT.fullmatch(message)) is not None:
        return Line(found["text"], is_output=True)
    if (found := _HEAD.fullmatch(message)) is not None:
        label = f"{found['number']}/{found['count']}" if found["number"] else found["phase"]
        return Heading(label, found["text"], is_cached=bool(found["cached"]))
    return Line(message, is_output=False)
