"""Registry credentials of template builds. They are in memory only, never in the store or a log.

After a restart they are gone: a build that still needs them fails and has to be requested again.
"""

from msgspec import Struct

from paddock.builds.aws.signature import AwsKeys


class RegistryLogin(Struct, frozen=True, kw_only=True):
    """User name and password for the registry of one image."""

    username: str
    password: str
    host: str = ""
    """The only host that gets them; empty: that of the image."""

    def __repr__(self) -> str:
        """Return a text without the password."""
        return f"RegistryLogin(username={self.username!r})"


RegistryAccess = RegistryLogin | AwsKeys
"""What a build is started with. AWS keys are exchanged for a login when the image is pulled."""


class BuildCredentials:
    """Keeps the credentials of builds by UID, until the build ends."""

    def __init__(self) -> None:
        self._logins: dict[str, RegistryAccess] = {}

    def put(self, uid: str, login: RegistryAccess) -> None:
        """Keep the credentials of a build."""
        self._logins[uid] = login

    def get(self, uid: str) -> RegistryAccess | None:
        """Return the credentials of a build, if it has any."""
        return self._logins.get(uid)

    def remove(self, uid: str) -> None:
        """Forget the credentials of a build; it may have none."""
        self._logins.pop(uid, None)
