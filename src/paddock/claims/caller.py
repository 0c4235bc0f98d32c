"""The caller of a use case: team, API key, role and scopes. Keys themselves are in
`manager/keys.py`; what a role and a scope allow is in `resources/rights.py`."""

from paddock.resources import rights
from paddock.resources.kinds.sandbox import ClaimIdentity
from paddock.resources.rights import AccessRequest, Role, Subject

__all__ = ["DEFAULT_TEAM", "LABEL_KIND", "LABEL_TEAM", "SYSTEM_NAMESPACE", "Caller", "Role"]

SYSTEM_NAMESPACE = "paddock-system"
DEFAULT_TEAM = "default"
LABEL_KIND = "paddock.dev/kind"
LABEL_TEAM = "paddock.dev/team"


class Caller(Subject, frozen=True):
    """The team and key that a use case runs for."""

    @property
    def is_operator(self) -> bool:
        """Whether the caller may access every team, without a restriction."""
        return self.role is Role.OPERATOR and not self.scopes

    def require(
        self,
        verb: str,
        resource: str,
        *,
        namespace: str | None = None,
        template: str | None = None,
    ) -> None:
        """Raise `ForbiddenError` if the caller may not do this; without a namespace: to any
        object of its team."""
        rights.require(
            self,
            AccessRequest(verb=verb, resource=resource, namespace=namespace, template=template),
        )

    def may(
        self,
        verb: str,
        resource: str,
        *,
        namespace: str | None = None,
        template: str | None = None,
    ) -> bool:
        """Whether the caller may do this; see `require`."""
        access = AccessRequest(verb=verb, resource=resource, namespace=namespace, template=template)
        return rights.decide(self, access).is_allowed

    def may_use(self, claim: ClaimIdentity) -> bool:
        """Whether a claimed sandbox is visible to the caller."""
        if claim.owner == self.team and not self.scopes:
            return True
        access = AccessRequest(
            verb="get",
            resource="sandboxes",
            namespace=claim.owner,
            template=claim.template_id,
            key_id=claim.key_id,
        )
        return rights.decide(self, access).is_allowed
