"""Configurations of nginx, HAProxy and Envoy for the gateway's task, on one core each.

Each function writes a configuration and returns the command; `AbsentError` if not installed.
HAProxy looks sandboxes up in a table of the same size and refuses calls without a token; nginx and
Envoy only forward, which is less.
"""

import json
from pathlib import Path

from floors import program
from gateway_parts import ROUTES, sandbox_id


def nginx(directory: Path, port: int, location: str, name: str) -> list[str]:
    config = directory / f"{name}.conf"
    config.write_text(f"""
worker_processes 1; daemon off; pid {directory}/{name}.pid; error_log /dev/null;
events {{ worker_connections 8192; }}
http {{
  access_log off; keepalive_requests 1000000000; sendfile on;
  client_body_temp_path {directory}/b; proxy_temp_path {directory}/p;
  fastcgi_temp_path {directory}/f; uwsgi_temp_path {directory}/u; scgi_temp_path {directory}/s;
  {location.partition("|||")[0]}
  server {{ listen 127.0.0.1:{port} backlog=4096; {location.partition("|||")[2]} }}
}}""")
    return [program("nginx"), "-c", str(config), "-e", "/dev/null"]


def forwarding(directory: Path, port: int, upstream: int) -> list[str]:
    """nginx as a proxy with kept connections."""
    kept = f"upstream u {{ server 127.0.0.1:{upstream}; keepalive 512; "
    kept += "keepalive_requests 1000000000; }"
    passing = "location / { proxy_pass http://u; proxy_http_version 1.1; "
    passing += 'proxy_set_header Connection ""; proxy_buffering off; }'
    return nginx(directory, port, f"{kept}|||{passing}", "proxy")


def haproxy(directory: Path, port: int, upstream: int) -> list[str]:
    table = directory / "routes.map"
    table.write_text("".join(f"{sandbox_id(n)} 127.0.0.1\n" for n in range(ROUTES)))
    config = directory / "haproxy.cfg"
    config.write_text(f"""
global
  nbthread 1
  maxconn 4000
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  http-reuse always
frontend in
  bind 127.0.0.1:{port} backlog 4096
  http-request set-var(txn.ip) req.hdr(e2b-sandbox-id),map_str({table})
  http-request deny deny_status 502 unless {{ var(txn.ip) -m found }}
  http-request deny deny_status 401 unless {{ req.hdr(x-access-token) -m found }}
  option forwardfor
  default_backend out
backend out
  http-request set-dst var(txn.ip)
  http-request set-dst-port int({upstream})
  server any 0.0.0.0:0
""")
    return [program("haproxy"), "-db", "-f", str(config)]


def envoy(directory: Path, port: int, upstream: int) -> list[str]:
    config = directory / "envoy.json"
    address = {"socket_address": {"address": "127.0.0.1", "port_value": upstream}}
    http = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    router = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
    config.write_text(json.dumps({"static_resources": {
        "listeners": [{
            "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
            "filter_chains": [{"filters": [{
                "name": "http",
                "typed_config": {
                    "@type": f"type.googleapis.com/{http}",
                    "stat_prefix": "in",
                    "route_config": {"virtual_hosts": [{
                        "name": "all", "domains": ["*"],
                        "routes": [{
                            "match": {"prefix": "/", "headers": [
                                {"name": "e2b-sandbox-id", "present_match": True}]},
                            "route": {"cluster": "out", "timeout": "0s"},
                        }],
                    }]},
                    "http_filters": [{"name": "router", "typed_config": {"@type": router}}],
                },
            }]}],
        }],
        "clusters": [{
            "name": "out", "connect_timeout": "5s",
            "circuit_breakers": {"thresholds": [
                {"max_connections": 9000, "max_requests": 9000, "max_pending_requests": 9000}]},
            "load_assignment": {"cluster_name": "out", "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": address}}]}]},
        }],
    }}))  # fmt: skip
    return [program("envoy"), "-c", str(config), "--concurrency", "1", "--log-level", "off",
            "--disable-hot-restart"]  # fmt: skip
