"""SandboxTemplate: the specification that sandboxes are created from."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, ClassVar

from paddock.resources.frozen import EMPTY, freeze_documents, freeze_fields
from paddock.resources.meta import Condition, Resource, ResourcePart

LABEL_BUILT = "paddock.dev/built"
"""On templates that were created for a build. Their specification applies once `status.build` is
set; until then they have nothing to start sandboxes from."""


class PauseStrategy(StrEnum):
    """How a sandbox is paused."""

    FREEZE = "Freeze"
    """Processes are frozen and their memory is reclaimed. Resumes in milliseconds."""
    HIBERNATE = "Hibernate"
    """Memory and files are stored. All other resources are freed."""
    STOP = "Stop"
    """Files are kept. Processes end."""


class Privileges(StrEnum):
    """Whether processes in the sandbox can become root in the sandbox."""

    SUDO = "sudo"
    """Set-uid programs work, as users of E2B expect. Root in the sandbox has no privileges outside.
    """
    LOCKED = "locked"
    """nosuid and no_new_privs: no process can change its user."""


class ImagePullPolicy(StrEnum):
    """When the registry of an image is asked for it."""

    IF_NOT_PRESENT = "IfNotPresent"
    """If the node does not have the image."""
    ALWAYS = "Always"
    """Before every start, so that a tag that was moved is followed. Layers that are present are not
    downloaded again."""
    NEVER = "Never"
    """Not at all."""


class Port(ResourcePart, frozen=True, kw_only=True):
    """A port that a process in the sandbox listens on."""

    port: int
    """Port number, from 1 to 65535."""
    name: str = ""
    """Name of the port, for information only."""
    protocol: str = "TCP"
    """`TCP` or `UDP`. Defaults to `TCP`."""


class Resources(ResourcePart, frozen=True, kw_only=True):
    """Resource limits, as quantities. Unset fields use the default of the runtime."""

    cpu: str | None = None
    """CPU cores, such as `2` or `500m`."""
    memory: str | None = None
    """Memory in bytes, such as `512Mi`."""
    disk: str | None = None
    """Bytes that the sandbox can write, such as `10Gi`."""
    pids: int | None = None
    """Maximum number of processes and threads."""
    ingress_bandwidth: str | None = None
    """Network traffic to the sandbox in bits per second, such as `100M`."""
    egress_bandwidth: str | None = None
    """Network traffic of the sandbox in bits per second, such as `100M`."""
    io_read_bandwidth: str | None = None
    """Bytes per second that the sandbox reads from a disk, such as `100Mi`."""
    io_write_bandwidth: str | None = None
    """Bytes per second that the sandbox writes to a disk, such as `100Mi`. With cgroup v1, only of
    direct I/O."""
    io_read_iops: int | None = None
    """Read operations of the sandbox on a disk, per second."""
    io_write_iops: int | None = None
    """Write operations of the sandbox on a disk, per second. With cgroup v1, only of direct I/O."""


class Volume(ResourcePart, frozen=True, kw_only=True):
    """A directory from outside that is mounted into the sandbox."""

    name: str
    """Name of the volume. Must be unique within the template."""
    mount_path: str
    """Path in the sandbox at which the volume is mounted."""
    host_path: str | None = None
    """Directory of the node, below one that the operator lists (setting `host_paths`)."""
    claim_name: str | None = None
    """Name of a PersistentVolumeClaim. Only on Kubernetes: refused by one machine."""
    read_only: bool = False
    """Whether the volume is mounted read-only."""


class NetworkPolicy(ResourcePart, frozen=True, kw_only=True):
    """Allowed outgoing and incoming traffic of a sandbox."""

    allow_internet_access: bool = True
    """Whether the internet can be reached. If false, only destinations in `allowOut` can be
    reached. Defaults to true."""
    allow_out: tuple[str, ...] = ()
    """Allowed destinations: addresses, CIDRs or domains, including wildcards such as
    `*.example.com`. Domains require that all other traffic is denied."""
    deny_out: tuple[str, ...] = ()
    """Denied destinations: addresses or CIDRs. `allowOut` takes precedence."""
    dns_servers: tuple[str, ...] = ()
    """Addresses of DNS servers. Defaults to those of the runtime."""
    allow_private_networks: bool = False
    """Whether private address ranges can be reached. Of the node itself only ports that the
    operator opens can be reached."""
    allow_public_traffic: bool = True
    """Whether ports can be reached without a token. If false, requests need the traffic token of
    the sandbox. Defaults to true."""
    mask_request_host: str | None = None
    """Value of the Host header that processes in the sandbox see. `${PORT}` is replaced by the
    port."""


class Outbound(ResourcePart, frozen=True, kw_only=True):
    """Proxies, CA certificates and package mirrors that programs in a sandbox use.

    A field that is set overrides the setting of the installation; an empty text removes it.
    Certificates and exceptions of the proxy are added to those of the installation. Passwords in
    URLs are stored in plain text.
    """

    http_proxy: str | None = None
    """URL of the proxy for HTTP, such as `http://proxy.example:3128`."""
    https_proxy: str | None = None
    """URL of the proxy for HTTPS. Defaults to `httpProxy`."""
    no_proxy: tuple[str, ...] = ()
    """Hosts, domains and addresses that are reached without the proxy."""
    ca_certificates: str = ""
    """CA certificates that programs trust in addition to those of the image, in PEM format."""
    pip_index: str | None = None
    """URL of the Python package index, for pip and uv."""
    npm_registry: str | None = None
    """URL of the registry for npm, pnpm and Yarn."""
    apt_mirror: str | None = None
    """Base URL of a mirror that serves `/debian`, `/debian-security` and `/ubuntu`."""


class Probe(ResourcePart, frozen=True, kw_only=True):
    """Health check of an idle sandbox."""

    command: str | None = None
    """Command line run by the image's shell. Exit code 0 means healthy. If unset, the health
    endpoint of envd is used."""
    period_seconds: int = 30
    """Number of seconds between two probes. Defaults to 30."""
    timeout_seconds: int = 5
    """Number of seconds after which a probe fails. Defaults to 5."""
    failure_threshold: int = 3
    """Number of consecutive failures after which the sandbox is replaced. Defaults to 3."""


class SandboxTemplateSpec(ResourcePart, frozen=True, kw_only=True):
    """Specification of sandboxes."""

    image: str = "base"
    """Name of an image in the image store of the runtime, or reference to an image in a registry,
    such as `python:3.13`. Defaults to `base`."""
    image_pull_policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT
    """When the registry is asked for the image. Defaults to IfNotPresent."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets of type `kubernetes.io/dockerconfigjson` with credentials of registries, in
    the namespace of the sandboxes."""
    image_digest: str | None = None
    """Version of the image that sandboxes start from, wherever its tag points. If unset, the first
    sandbox of the template resolves the tag, and later ones use the same version. Not used with the
    pull policy Always."""
    restore_from: str | None = None
    """Public id of a checkpoint. Sandboxes start from its files, and from its memory if it has any,
    instead of from the image. Set by template builds."""
    resources: Resources = Resources()
    """Resource limits of a sandbox."""
    env: Mapping[str, str] = EMPTY
    """Environment variables of every process, by name."""
    user: str = "user"
    """User of commands that specify none: a name or a number. Defaults to `user`, which is added to
    images that lack it."""
    workdir: str | None = None
    """Working directory of commands that specify none. Defaults to the home directory of the user.
    """
    start_command: str | None = None
    """Command line that is started with the sandbox and keeps running. `bash -l -c` runs it, or
    `sh -l -c` if the image has no bash."""
    ready_command: str | None = None
    """The sandbox is ready once this command exits with 0."""
    ready_timeout_seconds: int = 60
    """Number of seconds after which a sandbox that is not ready has failed. Defaults to 60."""
    ports: tuple[Port, ...] = ()
    """Ports that processes in the sandbox listen on, for information and for probes. All ports can
    be reached, including those not listed."""
    volumes: tuple[Volume, ...] = ()
    """Directories from outside that are mounted into the sandbox."""
    network: NetworkPolicy = NetworkPolicy()
    """Allowed outgoing and incoming traffic."""
    outbound: Outbound | None = None
    """Proxies, CA certificates and package mirrors. Defaults to the settings of the installation.
    """
    privileges: Privileges = Privileges.SUDO
    """Whether processes in the sandbox can become root in the sandbox."""
    pause_strategy: PauseStrategy = PauseStrategy.FREEZE
    """How sandboxes are paused, unless they specify a strategy. Defaults to Freeze."""
    probe: Probe | None = None
    """Health check of idle sandboxes."""
    pod_template: Mapping[str, Any] | None = None
    """Pod template that is merged over the pod. Only on Kubernetes: refused by one machine."""
    volume_claim_templates: tuple[Mapping[str, Any], ...] = ()
    """PersistentVolumeClaims that are created for each sandbox. Only on Kubernetes: refused by one
    machine."""
    aliases: tuple[str, ...] = ()
    """Other names by which clients can refer to the template."""
    public: bool = True
    """Whether other teams (namespaces) can use the template. Defaults to true."""
    description: str = ""
    """Human-readable description."""

    def __post_init__(self) -> None:
        freeze_fields(self, "env")
        freeze_documents(self, "pod_template", "volume_claim_templates")


class TemplateTag(ResourcePart, frozen=True, kw_only=True):
    """Assignment of a tag to a build of the template."""

    tag: str
    """The tag, such as `default` or `v1`."""
    build: str
    """Name of the TemplateBuild."""
    assigned_at: datetime
    """Time of the assignment. The newest one whose build is ready counts."""


class SandboxTemplateStatus(ResourcePart, frozen=True, kw_only=True):
    """Observed state of a template."""

    observed_generation: int = 0
    """The generation that this status reflects."""
    revision: str = ""
    """Hash of the specification, as pools show it. It changes when new sandboxes would differ.
    Empty until the template can start sandboxes."""
    image: str = ""
    """Image that `imageDigest` belongs to."""
    image_digest: str = ""
    """Version of the image that sandboxes of the template start from, as its registry names it."""
    build: str = ""
    """Name of the TemplateBuild that the specification comes from."""
    tags: tuple[TemplateTag, ...] = ()
    """Tags of builds, oldest assignment first. Written by the API."""
    conditions: tuple[Condition, ...] = ()
    """Conditions of the template."""


class SandboxTemplate(Resource, frozen=True, kw_only=True):
    """The specification that sandboxes are created from."""

    KIND: ClassVar[str] = "SandboxTemplate"
    PLURAL: ClassVar[str] = "sandboxtemplates"

    spec: SandboxTemplateSpec = SandboxTemplateSpec()
    status: SandboxTemplateStatus = SandboxTemplateStatus()


class TemplateRef(ResourcePart, frozen=True, kw_only=True):
    """Reference to a template in the same namespace or, if it is public, in another one."""

    name: str
    """Name of the template."""
    namespace: str | None = None
    """Namespace of the template. Defaults to the namespace of the referring object."""
