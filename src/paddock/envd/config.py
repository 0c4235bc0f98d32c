"""The configuration of one envd; data only.

`Config` comes with the fork (or the command line) and does not change. `POST /init` replaces
`EnvdSettings` while envd serves, after every start and resume.
"""

from collections.abc import Mapping

from msgspec import Struct

VERSION = "0.6.13"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


CA_DIRECTORY = "/etc/paddock"
CA_FILE = f"{CA_DIRECTORY}/ca.pem"
"""The operator's CA certificates alone."""
CA_BUNDLE = f"{CA_DIRECTORY}/ca-bundle.pem"
"""Link to the bundle of the image, to which the operator's certificates were added."""
CA_VARIABLES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT"),
            *("GIT_SSL_CAINFO", "CARGO_HTTP_CAINFO", "AWS_CA_BUNDLE"),
        ),
        CA_BUNDLE,
    ),
    "NODE_EXTRA_CA_CERTS": CA_FILE,
}
"""Variables for programs that do not read the bundle of the system."""


class OutboundFiles(Struct, frozen=True, kw_only=True, rename="camel"):
    """Settings that programs read from files of the sandbox."""

    ca_certificates: str = ""
    """In PEM format."""
    apt_mirror: str = ""
    """Replaces the hosts of Debian and Ubuntu in the sources of apt; without a final slash."""
    sudo_variables: tuple[str, ...] = ()
    """Variables that `sudo` passes on."""


class EnvdSettings(Struct, frozen=True, kw_only=True, rename="camel"):
    """The settings that `POST /init` replaces."""

    access_token: str | None = None
    env_vars: Mapping[str, str] = {}
    default_user: str = "user"
    default_workdir: str | None = None
    outbound: OutboundFiles = OutboundFiles()


class Config(Struct, frozen=True, kw_only=True):
    """The configuration of one envd. File descriptors are passed separately."""

    sandbox_id: str = ""
    template_id: str = ""
    settings: EnvdSettings = EnvdSettings()
    path: str = DEFAULT_PATH
    """PATH of commands, unless the environment sets another."""
    passwd_path: str = "/etc/passwd"  # noqa: S105 - a file name
    group_path: str = "/etc/group"
    has_one_id: bool = False
    """The sandbox was created without root: only id 0 is mapped, and all users act as it."""
    identity_dir: str | None = "/run/e2b"
    """The directory of the files that hold the sandbox's ids; `None` writes none."""
    owns_root: bool = False
    """The root directory is that of a sandbox: CA certificates and mirrors are written into it."""
    tasks_dir: str = "/var/lib/paddock/tasks"
    """The directory of tasks and their logs, inside the sandbox."""
    cpu_count: float | None = None
    memory_total_bytes: int | None = None
    disk_total_bytes: int | None = None
    disk_inherited_bytes: int = 0
    """Bytes inherited from a snapshot or a parent: in use, but not in the sandbox's own meter."""
    idle_exit_seconds: float | None = None
    """Exit with status 0 after this many seconds without requests, processes and watchers."""
    is_reserved: bool = False
    """In the warm stock: envd does not exit when idle until `/init` has set a sandbox id."""
    name: str = "envd"
    """The name in process listings (15 bytes)."""
