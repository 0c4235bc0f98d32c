"""The caller of a use case: team, API key and role. Keys themselves are in `manager/keys.py`."""

from enum import StrEnum

from msgspec import Struct

from paddock.kit.errors import ForbiddenError

SYSTEM_NAMESPACE = "paddock-system"
DEFAULT_TEAM = "default"
LABEL_KIND = "paddock.dev/kind"
LABEL_TEAM = "paddock.dev/team"


class Role(StrEnum):
    """What a key may do."""

    MEMBER = "member"
    """Everything with its team's sandboxes."""
    READER = "reader"
    """Look, not touch."""
    ADMIN = "admin"
    """Every team, keys and quotas."""


class Caller(Struct, frozen=True):
    """On whose behalf something is done."""

    team: str
    key_id: str = ""
    role: Role = Role.MEMBER

    @property
    def is_admin(self) -> bool:
        """Say whether every team is open to it."""
        return self.role is Role.ADMIN

    def must_write(self) -> None:
        """Refuse readers."""
        if self.role is Role.READER:
            raise ForbiddenError(
                "this API key may only read", hint="use a key with the role member or admin"
            )
