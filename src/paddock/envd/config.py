"""The configuration of one envd; data only.

`Config` comes with the fork (or the command line) and does not change. `POST /init` replaces
`EnvdSettings` while envd serves, after every start and resume.
"""

from collections.abc import Mapping

from msgspec import Struct

VERSION = "0.6.13"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class EnvdSettings(Struct, frozen=True, kw_only=True, rename="camel"):
    """What `/init` sets. A field left out stays as it is; `env_vars` replace the previous ones."""

    access_token: str | None = None
    env_vars: Mapping[str, str] = {}
    default_user: str = "user"
    default_workdir: str | None = None


class Config(Struct, frozen=True, kw_only=True):
    """What one envd is for. Holds no file descriptors: those travel beside it."""

    sandbox_id: str = ""
    template_id: str = ""
    settings: EnvdSettings = EnvdSettings()
    path: str = DEFAULT_PATH
    """PATH of commands, unless the environment says otherwise."""
    passwd_path: str = "/etc/passwd"  # noqa: S105 - a file name
    group_path: str = "/etc/group"
    has_one_id: bool = False
    """The sandbox was made without root: it has root's id only, and all its users act as that."""
    identity_dir: str | None = "/run/e2b"
    """Where the sandbox finds files with its own ids; `None` writes none."""
    tasks_dir: str = "/var/lib/paddock/tasks"
    """Where tasks and their logs are kept, inside the sandbox."""
    cpu_count: float | None = None
    memory_total_bytes: int | None = None
    disk_total_bytes: int | None = None
    disk_inherited_bytes: int = 0
    """What it began with, of a snapshot or a parent: used, and in no meter of its own."""
    idle_exit_seconds: float | None = None
    """End (exit status 0) after this long without requests, processes and watchers."""
    is_reserved: bool = False
    """Nobody's yet: it does not end for being idle until `/init` has given it a name."""
    name: str = "envd"
    """What process listings show (15 bytes)."""
