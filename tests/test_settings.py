"""Sources of settings, and errors about invalid ones."""

from pathlib import Path

import pytest

from paddock.kit.errors import InvalidError
from paddock.settings import Settings, load, require_loopback_or_consent


def test_the_environment_overrides_the_file_and_the_file_overrides_defaults(tmp_path: Path) -> None:
    file = tmp_path / "paddock.toml"
    file.write_text('port = 4000\nhost = "0.0.0.0"\n')

    settings = load(file=file, environ={"PADDOCK_PORT": "5000", "HOME": "/root"})

    assert (settings.port, settings.host, settings.api_port) == (5000, "0.0.0.0", 3001)


@pytest.mark.parametrize("text", ["1", "true", "Yes", "on"])
def test_booleans_have_several_spellings(text: str) -> None:
    assert load(environ={"PADDOCK_ACCESS_LOG": text}).access_log is True


def test_log_levels_may_be_upper_case() -> None:
    assert load(environ={"PADDOCK_LOG_LEVEL": "WARNING"}).log_level == "warning"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PORT", "http", "port: Expected `int`"),
        ("PORT", "99999", "port: Expected `int` <= 65535"),
        ("STORE", "sqllite", "choose one of sqlite, memory, kubernetes"),
        ("RUNTIME", "docker", "choose one of local, simulated, kubernetes"),
        ("LOG_LEVEL", "loud", "choose one of debug, info, warning, error"),
        ("ACCESS_LOG", "perhaps", "neither true nor false"),
    ],
)
def test_an_invalid_value_is_rejected(name: str, value: str, message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        load(environ={f"PADDOCK_{name}": value})


def test_an_unknown_setting_is_named_in_the_error(tmp_path: Path) -> None:
    file = tmp_path / "paddock.toml"
    file.write_text("prot = 4000\n")

    with pytest.raises(InvalidError, match="prot"):
        load(file=file, environ={})


@pytest.mark.parametrize("name", ["host", "api_host", "admin_host"])
@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.7", "paddock.example"])
def test_an_address_of_other_machines_needs_tls_or_consent(name: str, address: str):
    with pytest.raises(InvalidError, match=f"{name}: other machines would reach") as refused:
        require_loopback_or_consent(Settings(**{name: address}))
    assert "tls_self_signed" in (refused.value.hint or "")
    require_loopback_or_consent(Settings(**{name: address}, allow_plaintext=True))


def test_loopback_addresses_need_no_consent():
    require_loopback_or_consent(Settings(host="127.0.0.2", api_host="::1", admin_host="localhost"))
