"""Settings: a TOML file, then the environment, then the command line; later ones win.

Every field has a name, a unit and a default here; `PADDOCK_` and the upper-case name is its
environment variable. An unknown key is an error that names it.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from paddock.kit.errors import FieldProblem, InvalidError

PREFIX = "PADDOCK_"
Port = Annotated[int, Meta(ge=0, le=65535)]


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How Paddock runs here."""

    state_dir: str = "/var/lib/paddock"
    """Everything that must outlive a restart: the store, images, sandboxes' files."""
    run_dir: str = "/run/paddock"
    """Sockets and pid files."""
    cache_dir: str = "/var/cache/paddock"
    """What was built once and can be built again: CRIU, the base image."""

    host: str = "127.0.0.1"
    """Where gateways listen."""
    port: Port = 3000
    """The one port for clients: API and traffic to sandboxes."""
    api_host: str = "127.0.0.1"
    """Address of `api_port`."""
    api_port: Port = 3001
    """Where the control plane itself listens; gateways forward API calls to it."""
    domain: str = ""
    """The wildcard domain under which sandboxes are reached; empty: clients decide."""
    gateways: int = 0
    """Gateway processes; 0 is one per core."""
    admin_host: str = "127.0.0.1"
    """Address of `admin_port`."""
    admin_port: Port = 0
    """Where each gateway serves metrics and hears from peers; 0 is any free port. Of several on one
    machine the first has this one, the second the next, and so on."""
    peers: str = ""
    """Gateways: their admin URLs, separated by commas; or `dns:NAME:PORT` or
    `kubernetes:NAMESPACE/SERVICE:PORT`, looked up anew every few seconds. Gateways tell each other
    of routes; controllers ask them which sandboxes are idle. The control plane tells of those on
    its own machine by itself."""
    access_log: bool = False
    """Log every request to a sandbox."""
    trust_forwarded: bool = False
    """Believe a proxy in front of the gateways about who the client is."""
    wake_timeout_seconds: float = 60.0
    """How long a request waits for a paused sandbox to wake."""
    tls_certificate: str = ""
    """PEM file with the wildcard certificate; TLS and HTTP/2 are served when it is set."""
    tls_key: str = ""
    """PEM file with the key of `tls_certificate`."""
    tls_host: str = "127.0.0.1"
    """Address of `tls_port`."""
    tls_port: Port = 3443
    """Where clients reach TLS and HTTP/2."""
    front_port: Port = 3002
    """Where gateways listen, on loopback, for the process that serves TLS; they believe what it
    says of the client. Used only when a certificate is set."""

    store: Literal["sqlite", "memory", "kubernetes"] = "sqlite"
    """`sqlite`, `memory` (forgets everything) or `kubernetes`."""
    runtime: Literal["local", "simulated", "kubernetes"] = "local"
    """`local`, `simulated` or `kubernetes`."""
    kubeconfig: str = ""
    """For the store or runtime `kubernetes`; empty: in-cluster, else the usual file."""
    namespace: str = ""
    """Look at this namespace only; empty: all."""
    system_namespace: str = "paddock-system"
    """Where Paddock itself runs on a cluster, with its leases and keys."""
    agent_image: str = ""
    """Image of Paddock's own, with envd: the sidecar of every sandbox's pod."""
    pod_limits: bool = True
    """Limit pods as a whole (Kubernetes 1.34 and newer) instead of container by container."""
    pods_may_reach_host: bool = False
    """Let templates ask for host paths, the host's network and privileged containers."""
    webhook_certificate: str = ""
    """PEM file; the role `api` then serves the admission webhook, over TLS, on the API's host."""
    webhook_key: str = ""
    """PEM file with the key of `webhook_certificate`."""
    webhook_port: Port = 3003
    """Where the cluster's API server reaches the admission webhook."""
    api_peers: str = ""
    """Other replicas of the API, told of every write: URLs, or `dns:NAME:PORT`, by commas."""
    cluster_requests_per_second: float = 500.0
    """What one process may ask of the cluster's API server at most."""
    cluster_id: str = "local"
    """This cluster's segment in environments."""
    instance_types: str = ""
    """Named shapes of environments' sandboxes, beside the built-in ones: `name=cores/memory`,
    separated by commas, such as `huge=32/128Gi`. A built-in name is given another meaning."""
    federation_peers: str = ""
    """Control planes of other clusters that serve each other's claims: `cluster=http://host:port`
    (or `https`), separated by commas. All of them need the same `seed`."""
    federation_gateway: str = ""
    """Where other clusters' gateways reach ours: `host:port`; empty: `host` and `port`."""

    token: str = ""
    """Bearer token of the declarative API; empty: made at first start and kept in the state dir."""
    api_key: str = ""
    """On a cluster: the first API key, an administrator's."""
    seed: str = ""
    """Secret from which sandboxes' tokens follow; empty: made at first start and kept."""
    allow_anonymous: bool = False
    """Serve the declarative API without a token; loopback only."""

    pool_size: int = 4
    """Warm sandboxes of the default template."""
    default_image: str = "base"
    """What the default template is made of: an image's name, or `host`."""
    max_timeout_seconds: int = 30 * 24 * 3600
    """The longest timeout that a client may ask for."""
    cold_creates_per_second: float = 100.0
    """Of all teams together, when stock is out."""
    claim_images: str = ""
    """Images that clients may name instead of a template's: patterns such as
    `registry.example/team/*`, separated by commas; empty: none."""
    claim_memory: str = ""
    """The most memory that a client may ask for, such as `8Gi`, where its template gives less;
    empty: no more than the template's."""
    wake_on_traffic: bool = True
    """Whether gateways wake paused sandboxes that ask for it."""
    capacity_cpu: str = ""
    """Cores that all warm pools together may promise, such as `64`; empty: no limit."""
    capacity_memory: str = ""
    """Memory that all warm pools together may promise, such as `256Gi`; empty: no limit."""
    adopt_pools: bool = False
    """Whether pools without an environment get one."""

    lease_seconds: float = 15.0
    """How long the controllers of a cluster stay without a leader when theirs vanishes."""
    identity: str = ""
    """This process's name in leases; empty: host name and a random tail."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """`debug`, `info`, `warning` or `error`."""
    log_json: bool = False
    """Write the log as lines of JSON instead of text."""

    @property
    def state(self) -> Path:
        """The state directory."""
        return Path(self.state_dir)

    @property
    def run(self) -> Path:
        """The run directory."""
        return Path(self.run_dir)

    @property
    def node_socket(self) -> str:
        """Where the node answers."""
        return str(self.run / "node.sock")


def load(
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """Read settings from all places; a bad value is an `InvalidError` that names it."""
    values: dict[str, Any] = {}
    if file is not None:
        values.update(_from_file(file))
    values.update(_from_environment(os.environ if environ is None else environ))
    values.update({key: value for key, value in (overrides or {}).items() if value is not None})
    if isinstance(level := values.get("log_level"), str):
        values["log_level"] = level.lower()  # INFO, as other programs have it
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidError(
            f"settings: {_located(str(error))}", hint="see docs/reference/settings.md"
        ) from error


def _located(error: str) -> str:
    """Return the message with the name of the setting and, if few, its valid values."""
    match = re.fullmatch(r"(.+) - at `\$\.(\w+)`", error)
    if match is None:
        return error
    fault, name = match[1], match[2]
    kind = next(field.type for field in msgspec.structs.fields(Settings) if field.name == name)
    if fault.startswith("Invalid enum value"):
        fault += f"; choose one of {', '.join(get_args(kind))}"
    return f"{name}: {fault}"


def _from_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise InvalidError(f"settings file {file} cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidError(f"settings file {file} is not TOML: {error}") from error


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    known = {field.name: field for field in msgspec.structs.fields(Settings)}
    values: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX):
            continue
        field = known.get(name.removeprefix(PREFIX).lower())
        if field is not None:
            values[field.name] = _flag(name, text) if field.type is bool else text
    return values


def _flag(name: str, text: str) -> bool:
    lowered = text.lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    problem = FieldProblem(name, f"{text!r} is neither true nor false")
    raise InvalidError(str(problem), problems=[problem])
