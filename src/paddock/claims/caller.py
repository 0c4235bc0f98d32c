"""The caller of a use case: team, API key and role. Keys themselves are in `manager/keys.py`."""

from enum import StrEnum

from msgspec import Struct

from paddock.kit.errors import ForbiddenError

SYSTEM_NAMESPACE = "paddock-system"
DEFAULT_TEAM = "default"
LABEL_KIND = "paddock.dev/kind"
LABEL_TEAM = "paddock.dev/team"


class Role(StrEnum):
    """The rights of an API key."""

    MEMBER = "member"
    """Read and write access to its team's sandboxes."""
    READER = "reader"
    """Read access to its team's sandboxes."""
    ADMIN = "admin"
    """Access to every team, to keys and to quotas."""


class Caller(Struct, frozen=True):
    """The team and key that a use case runs for."""

    team: str
    key_id: str = ""
    role: Role = Role.MEMBER

    @property
    def is_admin(self) -> bool:
        """Whether the caller may access every team."""
        return self.role is Role.ADMIN

    def require_write_access(self) -> None:
        """Raise `ForbiddenError` for a key that may only read."""
        if self.role is Role.READER:
            raise ForbiddenError(
                "this API key may only read", hint="use a key with the role member or admin"
            )
