"""Settings: a TOML file, then the environment, then the command line. The last source wins.

Every field has a name, a unit and a default here. Its environment variable is `PADDOCK_` followed
by the upper-case name. An unknown key in the file is an error that names the key.
"""

import ipaddress
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
PURGE_FILE = "purge.pid"
"""File of the run directory: the process id of the supervisor that a purge stops."""
IMAGES_FILE = "images.json"
"""File of the run directory: settings of images and registries, for the node."""
OUTBOUND_FILE = "outbound.json"
"""File of the run directory: proxies, CA certificates and mirrors, for the node."""
TLS_DIRECTORY = "tls"
"""Directory of the state directory: the certificate that the installation issues to itself."""
PRIVATE_UMASK = 0o077
"""Files of state, run and log directories are for the user of Paddock only."""
Port = Annotated[int, Meta(ge=0, le=65535)]


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one Paddock process."""

    state_dir: str = "/var/lib/paddock"
    """Directory of all data that must survive a restart: the store, images, files of sandboxes."""
    run_dir: str = "/run/paddock"
    """Directory of sockets and pid files."""
    cache_dir: str = "/var/cache/paddock"
    """Directory of artifacts that can be rebuilt: CRIU, the base image."""

    host: str = "127.0.0.1"
    """Listen address of the gateways."""
    port: Port = 3000
    """Port for clients: the API and traffic to sandboxes."""
    api_host: str = "127.0.0.1"
    """Listen address of `api_port`."""
    api_port: Port = 3001
    """Port of the control plane. Gateways forward API calls to it."""
    kube_port: Port = 3004
    """Loopback port of the declarative API over TLS, for `kubectl` and other clients of Kubernetes;
    `paddock kubeconfig` configures them. 0: not served."""
    domain: str = ""
    """Wildcard domain of sandboxes. If empty, clients choose the domain."""
    mcp_template: str = "code-interpreter-v1"
    """Template of the sandboxes that clients of `/mcp` get on their first call."""
    mcp_gateway: str = ""
    """URL at which `/mcp` reaches the gateways. If empty, `host` and `port` are used; on a cluster,
    `/mcp` is not served then."""
    gateways: int = 0
    """Number of gateway processes. 0: one per core."""
    admin_host: str = "127.0.0.1"
    """Listen address of `admin_port`."""
    admin_port: Port = 0
    """Port on which each gateway serves metrics and receives updates from peers. 0: any free port.
    If one machine runs several gateways, the first uses this port, the second the next one, and so
    on."""
    peers: str = ""
    """Admin URLs of the gateways, separated by commas; or `dns:NAME:PORT` or
    `kubernetes:NAMESPACE/SERVICE:PORT`, resolved again every few seconds. Gateways exchange routes
    with each other. Controllers query them for idle sandboxes. The control plane notifies gateways
    on its own machine without this setting."""
    access_log: bool = False
    """Log every request to a sandbox."""
    trust_forwarded: bool = False
    """Trust the client address that a proxy in front of the gateways reports."""
    max_connections: Annotated[int, Meta(ge=1)] = 20_000
    """Maximum number of client connections of one gateway process. At the limit, the oldest
    connections without a request in flight are closed."""
    max_connections_per_address: Annotated[int, Meta(ge=0)] = 10_000
    """Maximum number of connections of one client address (IPv6: of one /64 network) to one gateway
    process. Does not apply to the process that serves TLS, and not at all with `trust_forwarded`:
    their connections carry requests of many clients. 0: no limit."""
    first_byte_seconds: Annotated[float, Meta(gt=0)] = 15.0
    """Number of seconds after which a new connection that has sent nothing is closed."""
    pause_grace_seconds: Annotated[float, Meta(ge=0)] = 1.0
    """A request that is younger than this, when the pause of its sandbox is requested, is
    held until the sandbox runs again. Older ones are answered with 502. In seconds."""
    wake_timeout_seconds: float = 60.0
    """Number of seconds that a request waits for a paused sandbox to resume."""
    tls_certificate: str = ""
    """PEM file with the wildcard certificate. If set, TLS and HTTP/2 are served on `tls_port`."""
    tls_key: str = ""
    """PEM file with the key of `tls_certificate`."""
    tls_self_signed: bool = False
    """Serve TLS with a certificate that the installation issues to itself, if `tls_certificate` is
    not set. Clients must trust `tls/ca.crt` of the state directory."""
    tls_host: str = "127.0.0.1"
    """Listen address of `tls_port`."""
    tls_port: Port = 3443
    """Port for TLS and HTTP/2."""
    front_port: Port = 3002
    """Loopback port on which gateways accept connections of the process that serves TLS. They trust
    the client address that it reports. Used only if a certificate is set."""

    allow_plaintext: bool = False
    """Serve without TLS on addresses that other machines can reach (`host`, `api_host`,
    `admin_host`). Keys and data can be read on the way there."""

    store: Literal["sqlite", "memory", "kubernetes"] = "sqlite"
    """`sqlite`, `memory` (not persistent) or `kubernetes`."""
    runtime: Literal["local", "simulated", "kubernetes"] = "local"
    """`local`, `simulated` or `kubernetes`."""
    kubeconfig: str = ""
    """Kubeconfig file for the store or runtime `kubernetes`, and for commands such as `paddock
    batch`. If empty, the in-cluster configuration is used, else the default file."""
    namespace: str = ""
    """Namespace to watch, on one machine too. If empty, all namespaces."""
    system_namespace: str = "paddock-system"
    """Namespace that holds the leases and keys of Paddock, and on a cluster Paddock itself."""
    agent_image: str = ""
    """Image of Paddock with envd, for the sidecar in the pod of each sandbox."""
    pod_limits: bool = True
    """Set resource limits on the whole pod (Kubernetes 1.34 and newer) instead of on each
    container."""
    pods_may_reach_host: bool = False
    """Allow templates to use host paths, the host network and privileged containers."""
    webhook_certificate: str = ""
    """PEM file. If set, the role `api` serves the admission webhook over TLS on the address of the
    API."""
    webhook_key: str = ""
    """PEM file with the key of `webhook_certificate`."""
    webhook_port: Port = 3003
    """Port of the admission webhook, for the API server of the cluster."""
    api_peers: str = ""
    """Other replicas of the API, which are notified of every write: URLs, or `dns:NAME:PORT`,
    separated by commas."""
    cluster_requests_per_second: float = 500.0
    """Maximum rate of requests of one process to the API server of the cluster, per second."""
    cluster_id: str = "local"
    """Name of this cluster in `spec.clusters` of environments."""
    instance_types: str = ""
    """Additional instance types for environments: `name=cores/memory`, separated by commas, such as
    `huge=32/128Gi`. A built-in name is redefined."""
    federation_peers: str = ""
    """Control planes of other clusters that serve each other's claims: `cluster=http://host:port`
    (or `https`), separated by commas. All of them need the same `seed`."""
    federation_gateway: str = ""
    """Address at which gateways of other clusters reach the gateways of this one: `host:port`. If
    empty, `host` and `port` are used."""

    token: str = ""
    """Bearer token of the declarative API. If empty, it is generated at first start and kept in the
    state directory."""
    api_key: str = ""
    """The first API key on a cluster. It belongs to an operator."""
    wrong_keys_per_address: Annotated[int, Meta(ge=0)] = 20
    """Number of wrong API keys or bearer tokens that one client address (IPv6: one /64 network) can
    send at once. Further ones are refused with 429 and checked at intervals. 0: no limit."""
    wrong_key_seconds: Annotated[float, Meta(gt=0)] = 3.0
    """Number of seconds after which one more key of such an address is checked."""
    calls_per_second_per_key: Annotated[float, Meta(ge=0)] = 1000.0
    """Number of calls of E2B's API per second that one API key can make, in each API process; ten
    times as many at once. Further ones are refused with 429. 0: no limit."""
    calls_per_second_per_address: Annotated[float, Meta(ge=0)] = 2000.0
    """The same for one client address (IPv6: one /64 network). 0: no limit."""
    seed: str = ""
    """Secret from which the tokens of sandboxes are derived. If empty, it is generated at first
    start and kept."""
    accepted_seeds: str = ""
    """Further seeds, separated by commas, whose tokens and signatures are accepted: those from
    before a rotation, and the next one. Only on a cluster; elsewhere the keyring holds them."""

    keyring_file: str = ""
    """File with the secrets of the installation: seed, bearer token, first API key and the keys
    that encrypt the store. If empty, `secrets.json` in the state directory. Not used on a
    cluster."""

    host_paths: str = ""
    """Directories of this machine that templates can mount with `hostPath`, together with those
    below them, separated by commas. Files that sandboxes create there belong to user ids from
    1073676288, never to root. Only for the runtime `local`. If empty, none."""

    clone_hook_seconds: Annotated[float, Meta(ge=0, le=300)] = 10.0
    """How long the programs of a sandbox that run in each new clone of it
    (`/etc/paddock/clone.d`) can take together, in seconds. 0: they are not run."""
    heavy_work: Annotated[int, Meta(ge=0)] = 0
    """Maximum number of operations that this machine runs at once of those that store or restore
    memory: hibernating, resuming a hibernated sandbox, snapshots, forks and sandboxes from a
    snapshot. Others wait, and teams take turns. A team with operations at work leaves as many
    others free for other teams. Only for the runtime `local`. 0: four per CPU, at least 8."""
    heavy_work_per_team: Annotated[int, Meta(ge=0)] = 0
    """Maximum number of these operations of one team at once. 0: one per CPU, at least 2."""

    sandbox_ingress_bandwidth: str = "500M"
    """Network traffic to one sandbox at most, in bits per second. Templates can set less. Only for
    the runtime `local`, as the settings of disk I/O. 0: no limit."""
    sandbox_egress_bandwidth: str = "500M"
    """Network traffic of one sandbox at most, in bits per second. 0: no limit."""
    sandbox_io_read_bandwidth: str = "400Mi"
    """What one sandbox reads from each disk at most, in bytes per second. 0: no limit."""
    sandbox_io_write_bandwidth: str = "400Mi"
    """What one sandbox writes to each disk at most, in bytes per second. With cgroup v1 only writes
    of direct I/O are limited. 0: no limit."""
    sandbox_io_read_iops: Annotated[int, Meta(ge=0)] = 20_000
    """Read operations of one sandbox on each disk at most, per second. 0: no limit."""
    sandbox_io_write_iops: Annotated[int, Meta(ge=0)] = 20_000
    """Write operations of one sandbox on each disk at most, per second. With cgroup v1 only those
    of direct I/O are limited. 0: no limit."""

    code_interpreter: bool = False
    """Install the template `code-interpreter-v1` in the background of `paddock up`."""
    pool_size: int = 4
    """Number of warm sandboxes of the default template."""
    default_image: str = "base"
    """Image of the default template: the name of an image, or `host`."""
    disk_reserve_bytes: Annotated[int, Meta(ge=256 << 20)] | None = None
    """Space that is kept free on the disk of `state_dir`, in bytes, for the store and for running
    sandboxes. Below it, new sandboxes, snapshots, hibernations and images are refused. If unset, 5
    % of the disk: at least 2 GiB and at most 8 GiB, but no more than a fifth of the disk. The
    minimum is 256 MiB."""
    kernel_memory_percent: Annotated[int, Meta(ge=1, le=100)] = 10
    """Kernel memory that no limit counts: the share of its memory limit that a sandbox may have, in
    percent. Beyond it, the sandbox is killed. Only for the runtime `local`."""
    kernel_memory_min_bytes: Annotated[int, Meta(ge=16 << 20)] = 32 << 20
    """What each sandbox may have of it, however low its memory limit is, in bytes."""
    pending_signals_per_sandbox: Annotated[int, Meta(ge=1024)] = 16_384
    """Pending signals that a sandbox may have; beyond it, the sandbox is killed. All sandboxes of a
    machine together have half of those of the machine (`ulimit -i`)."""
    image_max_bytes: Annotated[int, Meta(ge=1)] = 64 << 30
    """Maximum size of an imported image when it is unpacked, in bytes."""
    image_max_entries: Annotated[int, Meta(ge=1)] = 2_000_000
    """Maximum number of files and directories of an imported image."""
    image_max_file_bytes: Annotated[int, Meta(ge=1)] = 32 << 30
    """Maximum size of one file of an imported image, in bytes."""
    image_max_ratio: Annotated[int, Meta(ge=1)] = 200
    """Maximum number of unpacked bytes per byte of an imported archive. Images of up to 256 MiB are
    not limited."""
    image_max_team_bytes: Annotated[int, Meta(ge=0)] = 64 << 30
    """Maximum size of all images that were pulled for one team on a machine, unpacked, in bytes.
    Beyond, images of the team that no template, sandbox or snapshot needs are removed, least
    recently used first; then further pulls of the team are refused. 0: no limit. Only for the
    runtime `local`."""
    image_evict_percent: Annotated[int, Meta(ge=1, le=100)] = 85
    """Share of the disk in use, in percent, above which pulled images that no template, sandbox or
    snapshot needs are removed, least recently used first. 100: never. Only for the runtime `local`.
    """
    registry_mirrors: str = ""
    """Mirrors of registries, which are tried first: `host=URL`, separated by commas, such as
    `docker.io=https://mirror.example`. Several mirrors of a host are tried in their order. A
    mirror gets the user and password of its URL, if it has any, and never those of the registry."""
    registry_plain_hosts: str = ""
    """Registries that are reached by HTTP without TLS, `host` or `host:port`, separated by commas.
    Those on loopback addresses always are."""
    registry_private_hosts: str = ""
    """Hosts with private or loopback addresses, `host` or `host:port`, separated by commas, that
    images of templates are pulled from, and that a registry can redirect to or name as its token
    server. `*`: all. A registry that the operator names to `paddock image pull` can have a private
    address itself. If pulls use a proxy (`http_proxy`, `https_proxy`, `no_proxy` in the
    environment), hosts that only the proxy can resolve are refused to templates unless listed."""
    registry_config: str = ""
    """File with credentials of registries, in the format of Docker's `config.json`, for `paddock
    image pull` and `push`. If empty, `.docker/config.json` in the home directory of the user."""
    template_builds_per_team: Annotated[int, Meta(ge=1)] = 20
    """Maximum number of template builds of a team that run at the same time."""
    templates_per_team: Annotated[int, Meta(ge=1)] = 10_000
    """Maximum number of templates of a team, above which clients cannot build new ones."""
    template_max_cpu: Annotated[int, Meta(ge=1)] = 32
    """Maximum number of CPU cores that a client can request for a template that it builds."""
    template_max_memory: str = "8Gi"
    """Maximum memory that a client can request for a template that it builds, such as `8Gi`."""
    template_max_disk: str = "10Gi"
    """Maximum free disk space that a client can request for a template that it builds. Less than
    the default (`10Gi`) changes nothing."""
    template_build_seconds: Annotated[int, Meta(ge=1)] = 4 * 3600
    """Maximum duration of a template build, in seconds. A step takes at most an hour."""
    max_timeout_seconds: int = 30 * 24 * 3600
    """Maximum timeout that a client can request, in seconds. If it is less than the default (30
    days), clients cannot create sandboxes without a timeout (`never-timeout`) either."""
    paused_retention_seconds: Annotated[int, Meta(ge=0)] = 14 * 24 * 3600
    """How long a paused sandbox is kept, in seconds, unless its creator chooses another time. Then
    it is deleted. If 0, it is kept indefinitely."""
    cold_creates_per_second: float = 100.0
    """Maximum rate of cold starts of all teams together, per second."""
    claim_images: str = ""
    """Images that clients can choose instead of the image of a template: patterns such as
    `registry.example/team/*`, separated by commas. If empty, none."""
    claim_memory: str = ""
    """Maximum memory that a client can request, such as `8Gi`, if its template has less. If empty,
    the limit is that of the template."""
    wake_on_traffic: bool = True
    """Resume paused sandboxes that have `wakeOnTraffic` enabled when a request arrives."""
    capacity_cpu: str = ""
    """CPU cores that all warm pools together can reserve, such as `64`. If empty, no limit."""
    capacity_memory: str = ""
    """Memory that all warm pools together can reserve, such as `256Gi`. If empty, no limit."""
    adopt_pools: bool = False
    """Create an environment for each pool that has none."""

    sandbox_http_proxy: str = ""
    """URL of the proxy that programs in sandboxes use for HTTP. Templates can override it."""
    sandbox_https_proxy: str = ""
    """URL of the proxy for HTTPS. If empty, `sandbox_http_proxy`."""
    sandbox_no_proxy: str = ""
    """Hosts, domains and addresses that sandboxes reach without the proxy, separated by commas."""
    sandbox_ca_file: str = ""
    """PEM file with CA certificates that programs in sandboxes trust in addition to those of their
    image. It is read at start."""
    sandbox_pip_index: str = ""
    """URL of the Python package index for pip and uv in sandboxes."""
    sandbox_npm_registry: str = ""
    """URL of the registry for npm, pnpm and Yarn in sandboxes."""
    sandbox_apt_mirror: str = ""
    """Base URL of a mirror that serves `/debian`, `/debian-security` and `/ubuntu`, for apt in
    sandboxes."""
    sandbox_internet: Literal["open", "registries", "closed"] = "open"
    """Internet access of sandboxes at most: `open` (what their templates allow), `registries`
    (the package mirrors set above, else public package registries) or `closed`. A team can have
    another value (`paddock teams set`). On Kubernetes `registries` needs mirrors with addresses
    instead of names."""
    sandbox_host_ports: str = ""
    """TCP ports of this machine that sandboxes can reach as `host.paddock.internal`, separated by
    commas. Only for the runtime `local`. If empty, none."""
    sandbox_private_networks: str = ""
    """Private addresses or CIDRs that sandboxes can reach, such as the address of a proxy,
    separated by commas. Only for the runtime `local`. If empty, none."""

    lease_seconds: float = 15.0
    """Duration of the leader lease of the controllers, in seconds. If the leader fails, another one
    takes over after this time."""
    identity: str = ""
    """Name of this process in leases. If empty, the host name with a random suffix."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """`debug`, `info`, `warning` or `error`."""
    log_json: bool = False
    """Write the log as JSON lines instead of text."""

    audit_log: Literal["file", "stdout", "off"] = "file"
    """Where the audit log goes: `file` (in `audit_dir`), `stdout` (of the control plane or of each
    replica of the API; other logs go to standard error) or `off`."""
    audit_dir: str = ""
    """Directory of the audit log. If empty, `audit` in the state directory."""
    audit_max_bytes: Annotated[int, Meta(ge=4096)] = 64 << 20
    """Size at which a file of the audit log is rotated, in bytes."""
    audit_files: Annotated[int, Meta(ge=1)] = 8
    """Number of files of the audit log that are kept, including the current one."""
    audit_required: bool = False
    """Refuse calls that change something, with 503, while the audit log cannot be written. If
    false, they are served, and the lost lines are counted and reported."""

    @property
    def audit_directory(self) -> str:
        """Directory of the audit log."""
        return self.audit_dir or str(self.state / "audit")

    @property
    def state(self) -> Path:
        """State directory as a path."""
        return Path(self.state_dir)

    @property
    def image_cache(self) -> Path:
        """Directory of the images that are built on this machine."""
        return Path(self.cache_dir) / "images"

    @property
    def run(self) -> Path:
        """Run directory as a path."""
        return Path(self.run_dir)

    @property
    def keyring(self) -> Path:
        """Path of the file with the secrets of the installation."""
        return Path(self.keyring_file) if self.keyring_file else self.state / "secrets.json"

    @property
    def gateway_count(self) -> int:
        """Number of gateway processes of this machine."""
        return self.gateways or os.cpu_count() or 1

    @property
    def node_socket(self) -> str:
        """Path of the socket of the node."""
        return str(self.run / "node.sock")


def require_loopback_or_consent(settings: Settings) -> None:
    """Raise `InvalidError` if other machines could reach a port without TLS."""
    for name in ("host", "api_host", "admin_host"):
        address = getattr(settings, name)
        if not settings.allow_plaintext and not _is_loopback(address):
            problem = FieldProblem(name, f"other machines would reach {address} without TLS")
            raise InvalidError(
                str(problem),
                problems=[problem],
                hint="keep it on 127.0.0.1 and serve TLS (tls_host, with tls_certificate or "
                "tls_self_signed), or set allow_plaintext",
            )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def load(
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """Load the settings from all sources. `InvalidError` names a setting with an invalid value."""
    values: dict[str, Any] = {}
    if file is not None:
        values.update(_from_file(file))
    values.update(_from_environment(os.environ if environ is None else environ))
    values.update({key: value for key, value in (overrides or {}).items() if value is not None})
    if isinstance(level := values.get("log_level"), str):
        values["log_level"] = level.lower()  # Accept INFO, as other programs do.
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidError(
            f"settings: {_located(str(error))}", hint="see docs/reference/settings.md"
        ) from error


def _located(error: str) -> str:
    """Return the message with the name of the setting and, for an enum, its valid values."""
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
        raise InvalidError(f"cannot read settings file {file}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidError(f"settings file {file} is not valid TOML: {error}") from error


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
