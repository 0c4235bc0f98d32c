"""Reads and checks the settings for proxies, CA certificates and mirrors of sandboxes.

Messages name the setting and do not quote URLs, which may hold passwords.
"""

import ipaddress
from collections.abc import Callable
from pathlib import Path

import msgspec

from paddock.kit import private_files
from paddock.kit.errors import FieldProblem, InvalidError
from paddock.resources.schema import formats
from paddock.runtime.local.net.policy import LINK_LOCAL, PRIVATE
from paddock.runtime.outbound import InstallationOutbound
from paddock.runtime.port import OutboundConfig
from paddock.settings import OUTBOUND_FILE, PREFIX, Settings

_LAST_PORT = 65535
_DNS_PORT = 53


def load_outbound(settings: Settings) -> InstallationOutbound:
    """Return the settings of all sandboxes. Raise `InvalidError` that names an invalid one."""
    local = settings.runtime != "kubernetes"
    for name in ("sandbox_host_ports", "sandbox_private_networks"):
        if getattr(settings, name) and not local:
            raise _invalid(
                name,
                "applies only to the runtime `local`",
                hint="on Kubernetes allow addresses with `network.allowOut` of the template",
            )
    outbound = OutboundConfig(
        http_proxy=_checked(settings, "sandbox_http_proxy", formats.proxy_url),
        https_proxy=_checked(settings, "sandbox_https_proxy", formats.proxy_url),
        no_proxy=tuple(
            _check("sandbox_no_proxy", one, formats.proxy_exception)
            for one in _listed(settings.sandbox_no_proxy)
        ),
        ca_certificates=_certificates(settings.sandbox_ca_file),
        pip_index=_checked(settings, "sandbox_pip_index", formats.web_url),
        npm_registry=_checked(settings, "sandbox_npm_registry", formats.web_url),
        apt_mirror=_checked(settings, "sandbox_apt_mirror", formats.web_url),
    )
    return InstallationOutbound(
        outbound=outbound,
        host_ports=tuple(map(_port, _listed(settings.sandbox_host_ports))),
        private_networks=tuple(map(_network, _listed(settings.sandbox_private_networks))),
    )


def node_file(settings: Settings) -> Path:
    """Return the file that passes these settings to the node: a command line is not secret."""
    return settings.run / OUTBOUND_FILE


def write_node_file(settings: Settings) -> None:
    """Write the file, readable by its owner only."""
    private_files.replace(node_file(settings), msgspec.json.encode(load_outbound(settings)))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(","))))


def _checked(settings: Settings, name: str, check: formats.Check) -> str | None:
    text = getattr(settings, name)
    return _check(name, text, check) if text else None


def _check(name: str, text: str, check: formats.Check) -> str:
    if (problem := check(text)) is not None:
        raise _invalid(name, problem)
    return text


def _certificates(file: str) -> str:
    if not file:
        return ""
    name = "sandbox_ca_file"
    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(name, f"cannot read {file}: {error}") from error
    if len(text) > formats.MAX_CERTIFICATES:
        raise _invalid(
            name,
            f"{file} is larger than {formats.MAX_CERTIFICATES} bytes",
            hint="list only your own CA certificates: sandboxes have the public ones",
        )
    if not text.strip():
        raise _invalid(name, f"{file} is empty")
    return _check(name, text, _located(file))


def _located(file: str) -> Callable[[str], str | None]:
    def check(text: str) -> str | None:
        problem = formats.certificates(text)
        return problem and f"{file} {problem}"

    return check


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _LAST_PORT or int(text) == _DNS_PORT:
        raise _invalid("sandbox_host_ports", f"{text!r} is not a port from 1 to 65535 except 53")
    return int(text)


def _network(text: str) -> str:
    name = "sandbox_private_networks"
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError as error:
        raise _invalid(name, f"{text!r} is not an IPv4 address or CIDR") from error
    if network.subnet_of(LINK_LOCAL) or not any(network.subnet_of(one) for one in PRIVATE):
        raise _invalid(
            name,
            f"{text} is not within a private range such as 10.0.0.0/8",
            hint="public addresses need no permission; link-local ones cannot be opened here",
        )
    return str(network)


def _invalid(name: str, problem: str, *, hint: str = "") -> InvalidError:
    return InvalidError(
        f"settings: {name}: {problem}",
        problems=[FieldProblem(f"{PREFIX}{name.upper()}", problem)],
        hint=hint or "see docs/how-to/company-networks.md",
    )
