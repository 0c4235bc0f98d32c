"""`paddock mcp` without its package, and how to install it."""

import shlex
import subprocess
import sys
import tomllib

import pytest
from click.testing import CliRunner

from paddock.api.mcp import package
from paddock.cli.program import program
from tests.newcomer.blocks import ROOT, blocks

READS = """
import sys
from pip._internal.req.constructors import install_req_from_editable
found = install_req_from_editable(sys.argv[1])
print(found.link.file_path, found.editable, *found.extras)
"""
"""How pip reads its argument, without building or installing anything."""


def test_without_the_package_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(package, "find_spec", lambda _: None)
    result = CliRunner().invoke(program, ["mcp"])
    assert result.exit_code == 1
    assert "the Python package mcp is not installed" in result.output
    assert "pip install -e '.[mcp]'" in result.output


def test_the_command_of_the_guide_installs_the_package() -> None:
    command = next(block.text for block in blocks("docs/how-to/mcp.md") if block.skip is not None)
    *words, argument = shlex.split(command)
    assert words == [".venv/bin/pip", "install", "-e"]
    done = subprocess.run(
        [sys.executable, "-c", READS, argument],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(ROOT), "True", "mcp"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert [name for name in extras["mcp"] if name.startswith("mcp")]
