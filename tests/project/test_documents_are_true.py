"""What the documentation names exists: links, commands with their options, settings.

README and the how-to guides are run by `tests/newcomer`.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from msgspec import structs

from paddock.cli.click_ext import RemoteCommand
from paddock.cli.program import COMMANDS, program
from paddock.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEREDOC = re.compile(r"<<'?(\w+)'?(.*?)\n.*?^\1$", re.MULTILINE | re.DOTALL)
ENDS = set("();<>|&\n")
OTHER_COMMANDS = {"helm", "kubectl"}
"""Commands whose arguments may be the word `paddock`."""
OF_OTHERS = {
    "URL",
    "CACHE",
    "VENV",
    "SHARD",
    "REPLICAS",
    "BATCH",
    "COMPLETE",
    "TEST_SEED",
    "GENERATION",
    "DEBIAN_MIRROR",
    "DEBIAN_SUITE",
    "WHEELS",
}
"""Variables that are not settings: of the command, of scripts, tasks, clone hooks and builds."""


def anchors(text: str) -> set[str]:
    """The anchors that GitHub creates for headings."""
    heads = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def commands(text: str) -> Iterator[list[str]]:
    """The words of every `paddock …` in shell blocks."""
    for language, block in FENCED.findall(text):
        if language == "console":
            block = "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)", block, re.MULTILINE))
        elif language != "sh":
            continue
        yield from calls(HEREDOC.sub(r"\2", block))


def calls(block: str) -> Iterator[list[str]]:
    """The words of every `paddock …` in a shell snippet."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split, words.commenters = True, "#"
        found: list[str] | None = None
        is_argument = False
        for word in (*words, ";"):
            if set(word) <= ENDS:
                if found:
                    yield found
                found, is_argument = None, False
            elif found is not None:
                found.append(word)
            elif word == "paddock" and not is_argument:
                found = []
            else:
                # Assignments and keywords such as `do` come before a command.
                is_argument = word in OTHER_COMMANDS or is_argument


def mistake(words: list[str]) -> str | None:
    """Return the error of a command line; `None` if it is valid."""
    command: click.Command = program
    context = click.Context(program, info_name="paddock")
    try:
        while isinstance(command, click.Group):
            _, words, _ = command.make_parser(context).parse_args(list(words))
            if not words:
                return None
            _, below, words = command.resolve_command(context, words)
            assert below is not None
            command, context = below, click.Context(below, parent=context)
        if not isinstance(command, RemoteCommand):  # the rest are arguments of another program
            command.make_parser(context).parse_args(list(words))
    except click.UsageError as error:
        return error.format_message()
    return None


@pytest.mark.parametrize("page", PAGES)
def test_every_link_has_a_target(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", PAGES[page])):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text()), target


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_valid(page: str) -> None:
    for words in commands(PAGES[page]):
        assert mistake(words) is None, f"paddock {shlex.join(words)}: {mistake(words)}"
    for said in re.findall(r"`paddock ([a-z][^`]*)`", FENCED.sub("", PAGES[page])):
        if not set(said) & set("|…[<'\""):
            assert mistake(said.split()) is None, f"paddock {said}: {mistake(said.split())}"


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_exists(page: str) -> None:
    known = {field.name.upper() for field in structs.fields(Settings)} | OF_OTHERS
    named = re.findall(rf"\b_?{PREFIX}([A-Z][A-Z_]*[A-Z])\b", PAGES[page])
    assert set(named) <= known


def test_every_example_in_the_help_is_valid() -> None:
    context = click.Context(program, info_name="paddock")

    def epilogs(command: click.Command) -> Iterator[str]:
        yield command.epilog or ""
        if isinstance(command, click.Group):
            for below in command.commands.values():
                yield from epilogs(below)

    found = 0
    for name in COMMANDS:
        command = program.get_command(context, name)
        assert command is not None
        for epilog in epilogs(command):
            for words in calls(epilog):
                found += 1
                assert mistake(words) is None, f"paddock {shlex.join(words)}: {mistake(words)}"
    assert found > 10


def test_a_wrong_command_is_detected() -> None:
    block = (
        "ID=$(paddock sandbox create --nope)\npaddock get pools | paddock nope; A=1 paddock up -d\n"
    )
    page = f"```sh\n{block}```\n"
    wrong = [words for words in commands(page) if mistake(words)]
    assert wrong == [["sandbox", "create", "--nope"], ["nope"]]
