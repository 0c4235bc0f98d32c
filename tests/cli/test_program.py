"""The command line without a server: help, usage errors, exit codes."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from paddock.cli.click_ext import RemoteCommand
from paddock.cli.output import until
from paddock.cli.program import COMMANDS, program


def test_every_command_has_help() -> None:
    runner = CliRunner()
    for name in COMMANDS:
        done = runner.invoke(program, [name, "--help"])
        assert done.exit_code == 0, done.output
        assert f"Usage: program {name}" in done.output


def test_help_imports_no_heavy_modules() -> None:
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from paddock.cli.program import program\n"
        "CliRunner().invoke(program, ['--help'])\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    heavy = {
        "rich",
        "yaml",
        "aiohttp",
        "starlette",
        "asyncio",
        "paddock.runtime",
        "paddock.resources",
    }
    assert not loaded & heavy


@pytest.mark.parametrize(
    "arguments", [["nope"], ["sandbox", "nope"], ["--output", "xml", "status"], ["get"]]
)
def test_a_usage_error_exits_with_2(arguments: list[str]) -> None:
    done = CliRunner().invoke(program, arguments)
    assert done.exit_code == 2
    assert "Usage:" in done.output


def test_a_similar_command_is_suggested() -> None:
    for words, meant in ((["statsu"], "status"), (["sandbox", "crate"], "create")):
        assert f"Did you mean '{meant}'?" in CliRunner().invoke(program, words).output


@pytest.mark.parametrize("option", ["--replicas", "--attempts", "--timeout"])
def test_batch_options_must_be_positive(option: str) -> None:
    done = CliRunner().invoke(program, ["batch", "run", option, "0", "true"])
    assert done.exit_code == 2
    assert option in done.output


def test_an_impossible_log_directory_is_reported_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    directory = str(tmp_path / "file" / "logs")
    done = CliRunner().invoke(program, ["batch", "run", "--logs", directory, "true"])
    assert done.exit_code == 1
    assert done.stderr == f"error: {directory}: Not a directory\n"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("paddock sta", ["plain,status"]),
        ("paddock sandbox ex", ["plain,exec"]),
        ("paddock sandboxs ex", []),
    ],
)
def test_shells_complete_commands(words: str, found: list[str]) -> None:
    asked = {"_PADDOCK_COMPLETE": "bash_complete", "COMP_WORDS": words}
    done = CliRunner().invoke(
        program, prog_name="paddock", env={**asked, "COMP_CWORD": str(len(words.split()) - 1)}
    )
    assert done.exception is None
    assert done.output.split() == found


@pytest.mark.parametrize("position", range(3))
def test_the_output_option_is_accepted_anywhere(position: int) -> None:
    words = ["image", "ls"]
    words[position:position] = ["--output", "json"]
    done = CliRunner().invoke(program, words)
    assert done.exit_code == 0
    assert isinstance(json.loads(done.output), list)


def test_the_arguments_of_a_remote_command_are_not_parsed() -> None:
    command = RemoteCommand(
        "exec",
        params=[
            click.Argument(["name"]),
            click.Argument(["command"], nargs=-1, required=True, type=click.UNPROCESSED),
            click.Option(["--user", "-u"]),
            click.Option(["--stdin", "-i"], is_flag=True),
        ],
    )

    def read(*words: str) -> tuple[object, ...]:
        given = command.make_context("exec", list(words)).params
        return given["name"], given["user"], given["stdin"], given["command"]

    inside = ("python3", "-u", "run.py", "-i")
    assert read("box", *inside) == ("box", None, False, inside)
    assert read("box", "--", *inside) == ("box", None, False, inside)
    assert read("-u", "root", "box", "-i", *inside) == ("box", "root", True, inside)
    assert read("--user=root", "box", "--", *inside) == ("box", "root", False, inside)
    assert read("box", "ls", "--", "-l") == ("box", None, False, ("ls", "--", "-l"))
    with pytest.raises(click.NoSuchOption):
        read("box", "--nope", "ls")
    with pytest.raises(click.MissingParameter):
        read("box")


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ("2026-01-01T00:05:00Z", "5m"),
        ("2026-01-01T00:00:09Z", "9s"),
        ("2025-12-31T23:59:00Z", "0s"),
        ("0001-01-01T00:00:00Z", "never"),
    ],
)
def test_the_remaining_time_is_printed_briefly(end: str, text: str) -> None:
    assert until(end, datetime(2026, 1, 1, tzinfo=UTC)) == text
