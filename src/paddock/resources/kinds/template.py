"""SandboxTemplate: what a sandbox is made of."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

from paddock.resources.frozen import EMPTY, freeze_documents, freeze_fields
from paddock.resources.meta import Condition, Resource, ResourcePart


class PauseStrategy(StrEnum):
    """How a sandbox is paused."""

    FREEZE = "Freeze"
    """Processes stop where they are; memory goes back to the machine. Wakes in milliseconds."""
    HIBERNATE = "Hibernate"
    """Memory and files are stored, everything else is freed."""
    STOP = "Stop"
    """Files are kept, processes end."""


class Privileges(StrEnum):
    """What root inside may do to become root inside."""

    SUDO = "sudo"
    """Set-uid programs work, as E2B's users expect; root inside is nobody outside."""
    LOCKED = "locked"
    """nosuid and no_new_privs: nobody inside becomes anybody else."""


class Port(ResourcePart, frozen=True, kw_only=True):
    """A port that something inside listens on."""

    port: int
    """1 to 65535."""
    name: str = ""
    """For people."""
    protocol: str = "TCP"
    """`TCP` or `UDP`."""


class Resources(ResourcePart, frozen=True, kw_only=True):
    """Limits, as quantities; an unset one is the runtime's default."""

    cpu: str | None = None
    """Cores, such as `2` or `500m`."""
    memory: str | None = None
    """Bytes, such as `512Mi`."""
    disk: str | None = None
    """Bytes that the sandbox may write, such as `10Gi`."""
    pids: int | None = None
    """How many processes and threads there may be at once."""


class Volume(ResourcePart, frozen=True, kw_only=True):
    """A directory from outside, seen inside."""

    name: str
    """Unique within the template."""
    mount_path: str
    """Where it is seen inside."""
    host_path: str | None = None
    """A directory of the machine; operators only."""
    claim_name: str | None = None
    """A PersistentVolumeClaim (Kubernetes) or a named volume of Paddock's (this machine)."""
    read_only: bool = False
    """Whether programs inside may only read it."""


class NetworkPolicy(ResourcePart, frozen=True, kw_only=True):
    """Where a sandbox may connect to and who may connect to it."""

    allow_internet_access: bool = True
    """Off: only what `allowOut` names can be reached."""
    allow_out: tuple[str, ...] = ()
    """Addresses, CIDRs or domains (`*.example.com` too); domains only with internet access off."""
    deny_out: tuple[str, ...] = ()
    """Addresses or CIDRs. What `allowOut` names stays allowed."""
    dns_servers: tuple[str, ...] = ()
    """Addresses of name servers; the runtime's own where empty."""
    allow_private_networks: bool = False
    """Whether private address ranges can be reached; the machine itself never can."""
    allow_public_traffic: bool = True
    """Off: requests to ports need the sandbox's traffic token."""
    mask_request_host: str | None = None
    """What programs inside see as Host; `${PORT}` is replaced."""


class Probe(ResourcePart, frozen=True, kw_only=True):
    """How an idle sandbox shows that it is well."""

    command: str | None = None
    """Run by `bash -l -c`; exit 0 is well. Without it, envd's own health is asked."""
    period_seconds: int = 30
    """Between two probes."""
    timeout_seconds: int = 5
    """How long one may take."""
    failure_threshold: int = 3
    """So many failures in a row, and the sandbox is replaced."""


class SandboxTemplateSpec(ResourcePart, frozen=True, kw_only=True):
    """What a sandbox is made of."""

    image: str = "base"
    """An image of the runtime's store, or a container image on Kubernetes."""
    resources: Resources = Resources()
    """What a sandbox may use at most."""
    env: Mapping[str, str] = EMPTY
    """Variables of every process, by name."""
    user: str = "user"
    """Who runs commands that name nobody."""
    workdir: str | None = None
    """Where commands start that name no directory; the user's home where absent."""
    start_command: str | None = None
    """Started with the sandbox, by `bash -l -c`, and kept running."""
    ready_command: str | None = None
    """The sandbox is ready when this first exits with 0."""
    ready_timeout_seconds: int = 60
    """A sandbox that is not ready by then has failed."""
    ports: tuple[Port, ...] = ()
    """What listens inside, for people and for probes; any port can be reached."""
    volumes: tuple[Volume, ...] = ()
    """Directories from outside."""
    network: NetworkPolicy = NetworkPolicy()
    """Where it may connect to and who may connect to it."""
    privileges: Privileges = Privileges.SUDO
    """Whether programs inside may become root inside."""
    pause_strategy: PauseStrategy = PauseStrategy.FREEZE
    """How its sandboxes are paused unless they say otherwise."""
    probe: Probe | None = None
    """How idle sandboxes are watched over."""
    pod_template: Mapping[str, Any] | None = None
    """Merged over the pod that Kubernetes runs; other runtimes ignore it."""
    volume_claim_templates: tuple[Mapping[str, Any], ...] = ()
    """PersistentVolumeClaims made for each sandbox; other runtimes ignore them."""
    aliases: tuple[str, ...] = ()
    """Other names by which clients may ask for it."""
    public: bool = True
    """Whether other teams (namespaces) may use it."""
    description: str = ""
    """For people."""

    def __post_init__(self) -> None:
        freeze_fields(self, "env")
        freeze_documents(self, "pod_template", "volume_claim_templates")


class SandboxTemplateStatus(ResourcePart, frozen=True, kw_only=True):
    """What is known of a template."""

    observed_generation: int = 0
    """The generation that this status is about."""
    revision: str = ""
    """Hash of what sandboxes are made of; changes when they would differ."""
    conditions: tuple[Condition, ...] = ()
    """What was found out about the template."""


class SandboxTemplate(Resource, frozen=True, kw_only=True):
    """What a sandbox is made of."""

    KIND: ClassVar[str] = "SandboxTemplate"
    PLURAL: ClassVar[str] = "sandboxtemplates"

    spec: SandboxTemplateSpec = SandboxTemplateSpec()
    status: SandboxTemplateStatus = SandboxTemplateStatus()


class TemplateRef(ResourcePart, frozen=True, kw_only=True):
    """Names a template, in the referrer's namespace or, if public, in another."""

    name: str
    """Of the template."""
    namespace: str | None = None
    """Where it is; the referrer's own where absent."""
