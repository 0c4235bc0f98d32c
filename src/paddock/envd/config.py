"""The configuration of one envd; data only.

`Config` comes with the fork (or the command line) and does not change. `POST /init` replaces
`EnvdSettings` while envd serves, after every start and resume.
"""

from collections.abc import Mapping

from msgspec import Struct

VERSION = "0.6.13"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class EnvdSettings(Struct, frozen=True, kw_only=True, rename="camel"):
    """The settings that `POST /init` replaces."""

    access_token: str | None = None
    env_vars: Mapping[str, str] = {}
    default_user: str = "user"
    default_workdir: str | None = None


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
