"""`paddock mcp` without its package."""

import pytest
from click.testing import CliRunner

from paddock.api.mcp import package
from paddock.cli.program import program


def test_without_the_package_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(package, "find_spec", lambda _: None)
    result = CliRunner().invoke(program, ["mcp"])
    assert result.exit_code == 1
    assert "the Python package mcp is not installed" in result.output
    assert "paddock[mcp]" in result.output
