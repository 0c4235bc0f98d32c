"""What every call needs of the sandbox: settings, users, paths, variables.

Holds the settings in force (replaced by `POST /init`), the users of the sandbox, and the files that
hold its ids.
"""

import contextlib
import logging
import os
import stat
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from paddock.envd.config import CA_VARIABLES, Config, EnvdSettings, OutboundFiles
from paddock.envd.files import paths
from paddock.envd.outbound import OutboundWriter
from paddock.envd.process import login_path
from paddock.envd.process.shells import BASH, NO_SHELL, ShellFinder
from paddock.envd.rpc.connect_frames import Code, ConnectError, printable
from paddock.envd.users import User, Users

log = logging.getLogger(__name__)


class InitRequest(Struct, frozen=True, kw_only=True, rename="camel"):
    """The body of `POST /init`. The node handles the clock and volumes."""

    env_vars: dict[str, str] | None = None
    access_token: str | None = None
    timestamp: str | None = None
    default_user: str | None = None
    default_workdir: str | None = None
    sandbox_id: str | None = None
    template_id: str | None = None
    outbound: OutboundFiles | None = None


class SandboxContext:
    """The settings, users, paths and variables of the sandbox that envd serves."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._timestamp = ""
        self._written: dict[str, str] = {}
        self.settings: EnvdSettings = config.settings
        self._outbound = OutboundWriter()
        self.users = Users(config.passwd_path, config.group_path)
        self._shells = ShellFinder()

    def assign(self, config: Config) -> None:
        """Serve another sandbox."""
        if config.identity_dir != self._config.identity_dir:
            self._written.clear()
        self._config = config
        self._timestamp = ""
        self.settings = config.settings
        self._outbound = OutboundWriter()
        self.users.assign(config.passwd_path, config.group_path)
        self._shells.assign()

    @property
    def sandbox_id(self) -> str:
        """The public id of the sandbox; empty until it is claimed."""
        return self._config.sandbox_id

    def user(self, name: str | None) -> User:
        """Return the user with this name, or the default user; raise if there is none."""
        wanted = name or self.settings.default_user
        user = self.users.find(wanted)
        if user is None:
            raise ConnectError(
                Code.UNAUTHENTICATED, f"invalid username: user {printable(wanted)!r} not found"
            )
        if self._config.has_one_id:
            return msgspec.structs.replace(user, uid=0, gid=0, groups=())
        return user

    def resolve(self, path: str, user: User) -> str:
        """Make a path absolute."""
        try:
            return paths.resolve(path, home=user.home, default=self.settings.default_workdir)
        except paths.BadPathError as error:
            raise ConnectError(Code.INVALID_ARGUMENT, printable(str(error))) from error

    def directory(self, path: str, user: User) -> str:
        """Return the working directory of a command; raise if it does not exist.

        A home directory that does not exist (`/nonexistent`) is replaced by `/`, as login does.
        The working directory of the template is created, as container runtimes do.
        """
        wanted = self.resolve(path, user)
        if _is_directory(wanted):
            return wanted
        if not path and not self.settings.default_workdir:
            return "/"
        if not path and _create_directory(wanted, user):
            return wanted
        raise ConnectError(
            Code.INVALID_ARGUMENT, f"cwd {printable(wanted)!r} does not exist or is not a directory"
        )

    def program(self, name: str) -> str:
        """Return the program to run: the sandbox's shell if `/bin/bash` is wanted and missing."""
        found = self._shells.resolve(name)
        if found is None:
            raise ConnectError(Code.INVALID_ARGUMENT, f"cannot run {BASH!r}: {NO_SHELL}")
        return found

    def invocation(
        self, argv: Sequence[str], env: dict[str, str]
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the arguments and the environment that start a command in this sandbox.

        A login shell keeps the PATH of the environment, and has the standard directories.
        """
        arguments = (self.program(argv[0]), *argv[1:])
        path = login_path.path_to_keep(arguments, env)
        if path is None:
            return arguments, env
        env = {**env, "PATH": path}
        if self._config.owns_root and self._keeps_path():
            env[login_path.VARIABLE] = path
        return arguments, env

    def _keeps_path(self) -> bool:
        """Whether /etc/profile takes PATH from our variable."""
        try:
            return login_path.install()
        except OSError as error:
            log.warning(
                "/etc/profile cannot be extended: login shells may lose the variable PATH",
                extra={"error": str(error)},
            )
            return False

    def defaults(self) -> dict[str, str]:
        """Return the variables that all users have."""
        env = {"E2B_SANDBOX": "true"}
        if self._config.sandbox_id:
            env["E2B_SANDBOX_ID"] = self._config.sandbox_id
        if self._config.template_id:
            env["E2B_TEMPLATE_ID"] = self._config.template_id
        if self._outbound.has_certificates:
            env |= CA_VARIABLES
        return env | dict(self.settings.env_vars)

    def variables(self, user: User) -> dict[str, str]:
        """Return the environment of a user's command, without the variables of the request."""
        own = {
            "PATH": self._config.path,
            "HOME": user.home,
            "USER": user.name,
            "LOGNAME": user.name,
        }
        return own | self.defaults()

    def apply(self, request: InitRequest) -> None:
        """Replace the settings, unless the request is older than those in force."""
        if request.timestamp is not None:
            if request.timestamp < self._timestamp:
                return
            self._timestamp = request.timestamp
        changes: dict[str, object] = {}
        if request.env_vars is not None:
            changes["env_vars"] = request.env_vars
        if request.access_token is not None:
            changes["access_token"] = request.access_token or None
        if request.default_user:
            changes["default_user"] = request.default_user
        if request.default_workdir is not None:
            changes["default_workdir"] = request.default_workdir or None
        if request.outbound is not None:
            changes["outbound"] = request.outbound
        self.settings = msgspec.structs.replace(self.settings, **changes)
        self.write_outbound()
        if request.sandbox_id is not None:
            # A warm sandbox gets its id when it is claimed.
            self._config = msgspec.structs.replace(
                self._config,
                sandbox_id=request.sandbox_id,
                template_id=request.template_id or "",
            )
            self.write_identity()

    def write_outbound(self) -> None:
        """Write CA certificates and mirrors into the sandbox, if they changed."""
        if self._config.owns_root:
            self._outbound.apply(self.settings.outbound)

    def write_identity(self) -> None:
        """Write the ids as files into the sandbox; ignore a sandbox that prevents it."""
        directory = self._config.identity_dir
        if directory is None:
            return
        facts = {
            ".E2B_SANDBOX": "true",
            ".E2B_SANDBOX_ID": self._config.sandbox_id,
            ".E2B_TEMPLATE_ID": self._config.template_id,
        }
        files = {f"{directory}/{name}": value for name, value in facts.items() if value}
        with contextlib.suppress(OSError, paths.NotRegularError):
            if not self._written:
                os.makedirs(directory, 0o755, exist_ok=True)
            for path, value in files.items():
                if self._written.get(path) != value:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                    fd = paths.open_regular(path, flags, 0o644)
                    try:
                        os.write(fd, value.encode())
                    finally:
                        os.close(fd)
                    self._written[path] = value


def _is_directory(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _create_directory(path: str, user: User) -> bool:
    """Create a directory that belongs to a user; return whether it succeeded."""
    try:
        os.makedirs(path, 0o755)
        os.chown(path, user.uid, user.gid)
    except (OSError, ValueError):
        return False
    return True
