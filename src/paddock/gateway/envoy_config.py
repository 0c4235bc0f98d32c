"""The configuration of the Envoy that serves TLS and HTTP/2 in front of gateways.

`paddock up` runs that Envoy as a process, a cluster as a container of each gateway's pod. It
forwards requests unchanged to a loopback port on which gateways trust its forwarding headers.
Pure: the caller writes the files.
"""

from pathlib import Path
from typing import Any

from msgspec import Struct

from paddock.gateway.limits import KEEPALIVE_OPTIONS

_TYPES = "type.googleapis.com/envoy.extensions"
_HTTP = f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER = f"{_TYPES}.filters.http.router.v3.Router"
_TLS = f"{_TYPES}.transport_sockets.tls.v3.DownstreamTlsContext"
_SECRET = f"{_TYPES}.transport_sockets.tls.v3.Secret"
_UPSTREAM = f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions"
_MONITORS = f"{_TYPES}.resource_monitors"
_CONNECTIONS = f"{_MONITORS}.downstream_connections.v3.DownstreamConnectionsConfig"
_HEAP = f"{_MONITORS}.fixed_heap.v3.FixedHeapConfig"
_TIMERS = "type.googleapis.com/envoy.config.overload.v3.ScaleTimersOverloadActionConfig"
_UNLIMITED = 100_000
_IDLE_SECONDS = 620
"""As the gateways behind it: longer than load balancers keep idle connections."""


class TlsListener(Struct, frozen=True, kw_only=True):
    """Where TLS is served, and by which files and port."""

    host: str
    port: int
    front_port: int
    """Loopback port of the gateways."""
    certificate: str
    key: str
    secret_file: str
    """File with `certificate_secret`, which Envoy watches."""
    connections: int = 20_000
    """More are refused, so that clients do not use up memory and descriptors."""
    silent_seconds: float = 15
    """The longest TLS handshake. While Envoy is short of memory, also the shortest time that a
    connection may be idle."""
    heap_bytes: int = 256 << 20
    """Idle connections are closed the sooner, the more of the second half of this is in use. One
    takes 14 KiB, so this happens before they are as many as `connections`."""


def configuration(listener: TlsListener) -> dict[str, Any]:
    """Return Envoy's configuration."""
    return {
        "node": {"id": "paddock", "cluster": "paddock"},
        "static_resources": {
            "listeners": [
                {
                    "name": "clients",
                    "address": _address(listener.host, listener.port),
                    "per_connection_buffer_limit_bytes": 256 * 1024,
                    "socket_options": [
                        {"level": level, "name": name, "int_value": value}
                        for level, name, value in KEEPALIVE_OPTIONS
                    ],
                    "filter_chains": [
                        {
                            "transport_socket": _tls(listener),
                            "transport_socket_connect_timeout": f"{listener.silent_seconds}s",
                            "filters": [_http()],
                        }
                    ],
                }
            ],
            "clusters": [_gateways(listener)],
        },
        "overload_manager": _overload(listener),
    }


def _overload(listener: TlsListener) -> dict[str, Any]:
    """Bound connections. Envoy cannot count them by address."""
    heap = "envoy.resource_monitors.fixed_heap"
    return {
        "resource_monitors": [
            {
                "name": "envoy.resource_monitors.global_downstream_max_connections",
                "typed_config": {
                    "@type": _CONNECTIONS,
                    "max_active_downstream_connections": listener.connections,
                },
            },
            {
                "name": heap,
                "typed_config": {"@type": _HEAP, "max_heap_size_bytes": listener.heap_bytes},
            },
        ],
        "actions": [
            {
                "name": "envoy.overload_actions.reduce_timeouts",
                "triggers": [
                    {
                        "name": heap,
                        "scaled": {"scaling_threshold": 0.5, "saturation_threshold": 0.95},
                    }
                ],
                "typed_config": {
                    "@type": _TIMERS,
                    "timer_scale_factors": [
                        {
                            "timer": "HTTP_DOWNSTREAM_CONNECTION_IDLE",
                            "min_timeout": f"{listener.silent_seconds}s",
                        }
                    ],
                },
            }
        ],
    }


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _tls(listener: TlsListener) -> dict[str, Any]:
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
                            "path_config_source": {"path": listener.secret_file},
                            "resource_api_version": "V3",
                        },
                    }
                ],
            },
        },
    }


def certificate_secret(listener: TlsListener) -> dict[str, Any]:
    """Return the certificate as a separate resource: Envoy watches only the files of these."""
    directory = str(Path(listener.certificate).absolute().parent)
    return {
        "resources": [
            {
                "@type": _SECRET,
                "name": "certificate",
                "tls_certificate": {
                    "certificate_chain": {"filename": listener.certificate},
                    "private_key": {"filename": listener.key},
                    # Watch the directory: mounted Secrets change by renaming a link in it.
                    "watched_directory": {"path": directory},
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
            "common_http_protocol_options": {
                "idle_timeout": f"{_IDLE_SECONDS}s",
                "max_headers_count": 128,
            },
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


def _gateways(listener: TlsListener) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": _address("127.0.0.1", listener.front_port)}}
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
