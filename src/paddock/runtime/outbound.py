"""Proxies, CA certificates and package mirrors as variables and files of a sandbox. Pure.

The settings of the installation are merged with those of the template whenever envd is configured,
so a changed setting reaches every sandbox without a new image or snapshot.
"""

from collections.abc import Iterable
from urllib.parse import urlsplit

from msgspec import Struct

from paddock.envd.config import CA_VARIABLES, OutboundFiles
from paddock.runtime.port import OutboundConfig


class InstallationOutbound(Struct, frozen=True, kw_only=True):
    """What the operator sets for all sandboxes of an installation."""

    outbound: OutboundConfig = OutboundConfig()
    host_ports: tuple[int, ...] = ()
    """TCP ports of this machine that sandboxes may reach."""
    private_networks: tuple[str, ...] = ()
    """Private networks that sandboxes may reach, as CIDRs."""


_ALWAYS_DIRECT = ("localhost", "127.0.0.1", "::1")
SUDO_VARIABLES = (
    *("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"),
    *("PIP_INDEX_URL", "PIP_TRUSTED_HOST", "UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    *("NPM_CONFIG_REGISTRY", "YARN_NPM_REGISTRY_SERVER"),
    *CA_VARIABLES,
)
"""Variables that `sudo` passes on. By default it would drop all of them."""


def merge(installation: OutboundConfig, own: OutboundConfig) -> OutboundConfig:
    """Return the settings of a sandbox: those of its template, else those of the installation."""
    certificates = (installation.ca_certificates, own.ca_certificates)
    return OutboundConfig(
        http_proxy=_first(own.http_proxy, installation.http_proxy),
        # A template that changes only the proxy for HTTP means both.
        https_proxy=_first(own.https_proxy, own.http_proxy, installation.https_proxy),
        no_proxy=(*installation.no_proxy, *own.no_proxy),
        ca_certificates="".join(f"{pem.strip()}\n" for pem in certificates if pem),
        pip_index=_first(own.pip_index, installation.pip_index),
        npm_registry=_first(own.npm_registry, installation.npm_registry),
        apt_mirror=_first(own.apt_mirror, installation.apt_mirror),
    )


def variables(outbound: OutboundConfig, direct_hosts: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables of every process, except those of certificates (`CA_VARIABLES`).

    `direct_hosts` are further hosts that are reached without the proxy.
    """
    env: dict[str, str] = {}
    http = outbound.http_proxy
    https = outbound.http_proxy if outbound.https_proxy is None else outbound.https_proxy
    if http:
        env |= {"HTTP_PROXY": http, "http_proxy": http}
    if https:
        env |= {"HTTPS_PROXY": https, "https_proxy": https}
    if env:
        direct = ",".join(dict.fromkeys((*_ALWAYS_DIRECT, *direct_hosts, *outbound.no_proxy)))
        env |= {"NO_PROXY": direct, "no_proxy": direct}
    if outbound.pip_index:
        index = outbound.pip_index
        # Older versions of uv read only the second name.
        env |= {"PIP_INDEX_URL": index, "UV_DEFAULT_INDEX": index, "UV_INDEX_URL": index}
        parts = urlsplit(index)
        if parts.scheme == "http" and parts.hostname:
            # pip ignores an index without TLS unless its host is trusted.
            env["PIP_TRUSTED_HOST"] = parts.hostname
    if outbound.npm_registry:
        registry = outbound.npm_registry
        env |= {"NPM_CONFIG_REGISTRY": registry, "YARN_NPM_REGISTRY_SERVER": registry}
    return env


def files(outbound: OutboundConfig) -> OutboundFiles:
    """Return what envd writes into the sandbox; nothing if nothing is set."""
    if not variables(outbound) and not outbound.ca_certificates and not outbound.apt_mirror:
        return OutboundFiles()
    return OutboundFiles(
        ca_certificates=outbound.ca_certificates,
        apt_mirror=(outbound.apt_mirror or "").rstrip("/"),
        sudo_variables=SUDO_VARIABLES,
    )


def _first(*values: str | None) -> str | None:
    return next((value for value in values if value is not None), None)
