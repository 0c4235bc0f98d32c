"""Settings of proxies, CA certificates and mirrors: merging, variables, and what is refused."""

from pathlib import Path

import pytest

from paddock.envd.config import CA_VARIABLES, OutboundFiles
from paddock.kit.errors import InvalidError
from paddock.resources.kinds.template import Outbound, SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import ObjectMeta
from paddock.resources.schema.validation import problems_of
from paddock.runtime import outbound
from paddock.runtime.outbound_settings import load_outbound, node_file, write_node_file
from paddock.runtime.port import OutboundConfig
from paddock.settings import Settings
from tests.gateway.certificates import issue

PROXY = "http://agent:pass-4711@proxy.example:3128"


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    return issue(tmp_path, "mirror.example")[0]


def test_without_settings_nothing_is_set_and_nothing_written():
    assert outbound.variables(OutboundConfig()) == {}
    assert outbound.files(OutboundConfig()) == OutboundFiles()


def test_a_proxy_applies_to_both_protocols_in_both_spellings_and_never_to_loopback():
    env = outbound.variables(
        OutboundConfig(http_proxy=PROXY, no_proxy=(".corp",)), ["host.paddock.internal"]
    )

    assert {env[name] for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy")} == {
        PROXY
    }
    assert env["NO_PROXY"] == env["no_proxy"]
    assert env["no_proxy"] == "localhost,127.0.0.1,::1,host.paddock.internal,.corp"


def test_a_template_overrides_urls_removes_them_by_an_empty_text_and_adds_certificates():
    installation = OutboundConfig(
        http_proxy=PROXY, pip_index="https://a/simple", ca_certificates="ONE", no_proxy=("a",)
    )
    own = OutboundConfig(http_proxy="", ca_certificates="TWO\n", no_proxy=("b",))

    merged = outbound.merge(installation, own)

    assert outbound.variables(merged).keys() == {
        "PIP_INDEX_URL",
        "UV_DEFAULT_INDEX",
        "UV_INDEX_URL",
    }
    assert merged.ca_certificates == "ONE\nTWO\n"
    assert merged.no_proxy == ("a", "b")


def test_pip_trusts_the_host_of_an_index_without_tls():
    env = outbound.variables(OutboundConfig(pip_index="http://mirror.corp:8081/simple/"))

    assert env["PIP_TRUSTED_HOST"] == "mirror.corp"


def test_sudo_passes_on_every_variable():
    full = OutboundConfig(
        http_proxy=PROXY, pip_index="http://m/simple", npm_registry="http://m/npm"
    )

    assert {*outbound.variables(full), *CA_VARIABLES} == set(outbound.SUDO_VARIABLES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sandbox_http_proxy", "pass-4711@proxy"),
        ("sandbox_http_proxy", 'http://agent:pass-4711@proxy" x'),
        ("sandbox_https_proxy", "ftp://agent:pass-4711@proxy:1"),
        ("sandbox_pip_index", "http://agent:pass-4711@host:port/"),
        ("sandbox_apt_mirror", "socks5://agent:pass-4711@host"),
        ("sandbox_no_proxy", "a b"),
        ("sandbox_host_ports", "8081,0"),
        ("sandbox_host_ports", "53"),
        ("sandbox_private_networks", "8.8.8.0/24"),
        ("sandbox_private_networks", "169.254.169.254"),
        ("sandbox_private_networks", "0.0.0.0/0"),
        ("sandbox_ca_file", "/nowhere/ca.pem"),
    ],
)
def test_an_invalid_setting_is_refused_by_name_without_its_password(name: str, value: str):
    with pytest.raises(InvalidError, match=name) as refused:
        load_outbound(Settings(**{name: value}))

    assert "pass-4711" not in f"{refused.value} {refused.value.hint} {refused.value.problems}"


def test_a_file_without_certificates_or_with_a_key_is_refused(ca: Path, tmp_path: Path):
    key = tmp_path / "server.key"
    for text in ("", "hello", ca.read_text() + key.read_text(), "x" * 40_000):
        (tmp_path / "bad.pem").write_text(text)
        with pytest.raises(InvalidError, match="sandbox_ca_file"):
            load_outbound(Settings(sandbox_ca_file=str(tmp_path / "bad.pem")))


def test_the_file_for_the_node_is_private(ca: Path, tmp_path: Path):
    settings = Settings(run_dir=str(tmp_path), sandbox_http_proxy=PROXY, sandbox_ca_file=str(ca))

    write_node_file(settings)
    write_node_file(settings)

    assert node_file(settings).stat().st_mode & 0o777 == 0o600
    assert "pass-4711" in node_file(settings).read_text()


def test_ports_of_the_machine_are_refused_on_kubernetes():
    for name, value in (
        ("sandbox_host_ports", "8081"),
        ("sandbox_private_networks", "10.1.2.3"),
    ):
        with pytest.raises(InvalidError, match=f"{name}.*runtime `local`"):
            load_outbound(Settings(runtime="kubernetes", **{name: value}))


def test_a_template_is_refused_without_quoting_its_urls(ca: Path):
    def problems(**fields: object) -> list[str]:
        template = SandboxTemplate(
            metadata=ObjectMeta(name="t", namespace="default"),
            spec=SandboxTemplateSpec(outbound=Outbound(**fields)),  # pyright: ignore[reportArgumentType]
        )
        return [str(one) for one in problems_of(template)]

    assert problems(http_proxy=PROXY, ca_certificates=ca.read_text(), pip_index="") == []
    assert problems(ca_certificates="# Autorité\n" + ca.read_text()) == []
    assert problems(ca_certificates="Autorité") != []
    found = problems(http_proxy="agent:pass-4711", ca_certificates="no", no_proxy=("a b",))
    assert [one.split(":")[0] for one in found] == [
        "spec.outbound.httpProxy",
        "spec.outbound.noProxy[0]",
        "spec.outbound.caCertificates",
    ]
    assert "pass-4711" not in " ".join(found)
