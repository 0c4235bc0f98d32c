"""Settings come from a file, then the environment; what is wrong with one is said by its name."""

from pathlib import Path

import pytest

from paddock.kit.errors import InvalidError
from paddock.settings import load


def test_the_environment_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "paddock.toml"
    file.write_text('port = 4000\nhost = "0.0.0.0"\n')

    settings = load(file=file, environ={"PADDOCK_PORT": "5000", "HOME": "/root"})

    assert (settings.port, settings.host, settings.api_port) == (5000, "0.0.0.0", 3001)


@pytest.mark.parametrize("text", ["1", "true", "Yes", "on"])
def test_switches_are_written_as_people_write_them(text: str) -> None:
    assert load(environ={"PADDOCK_ACCESS_LOG": text}).access_log is True


def test_levels_of_the_log_may_be_written_large() -> None:
    assert load(environ={"PADDOCK_LOG_LEVEL": "WARNING"}).log_level == "warning"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PORT", "http", "port: Expected `int`"),
        ("PORT", "99999", "port: Expected `int` <= 65535"),
        ("STORE", "sqllite", "choose one of sqlite, memory, kubernetes"),
        ("RUNTIME", "docker", "choose one of local, simulated, kubernetes"),
        ("LOG_LEVEL", "loud", "choose one of debug, info, warning, error"),
        ("ACCESS_LOG", "perhaps", "neither true nor false"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_starts(name: str, value: str, said: str) -> None:
    with pytest.raises(InvalidError, match=said):
        load(environ={f"PADDOCK_{name}": value})


def test_a_setting_that_does_not_exist_is_named(tmp_path: Path) -> None:
    file = tmp_path / "paddock.toml"
    file.write_text("prot = 4000\n")

    with pytest.raises(InvalidError, match="prot"):
        load(file=file, environ={})
