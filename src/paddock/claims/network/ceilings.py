"""The network policies of teams and of the installation, as ceilings for their sandboxes."""

from collections.abc import Callable

from paddock.kit.errors import InvalidError
from paddock.resources.kinds.template import NetworkPolicy
from paddock.resources.network.destinations import parse_network
from paddock.resources.network.internet import PUBLIC_REGISTRIES, Internet, internet_ceiling

INSTALLATION, TEAM, TEMPLATE, SANDBOX = "installation", "team", "template", "sandbox"
"""Where a part of a sandbox's network policy comes from."""

CeilingOf = Callable[[str], NetworkPolicy | None]
"""Returns the ceiling of a team; `None` if it has none."""


def no_ceiling(_team: str) -> NetworkPolicy | None:
    """Return None: no team is limited."""
    return None


class NetworkCeilings:
    """Ceilings by team: the team's own setting, else that of the installation."""

    def __init__(
        self,
        installation: Internet,
        team_internet: Callable[[str], Internet | None],
        *,
        mirrors: tuple[str, ...] = (),
        needs_addresses: bool = False,
    ) -> None:
        self._installation = installation
        self._team_internet = team_internet
        self._registries = mirrors or PUBLIC_REGISTRIES
        self._needs_addresses = needs_addresses
        """Whether the runtime cannot filter by host name."""
        self._ceilings = {item: internet_ceiling(item, self._registries) for item in Internet}
        self.check(installation, "sandbox_internet")

    def check(self, internet: Internet, field: str) -> None:
        """Raise `InvalidError` for a setting that the runtime cannot enforce."""
        if internet is not Internet.REGISTRIES or not self._needs_addresses:
            return
        if any(parse_network(host) is None for host in self._registries):
            raise InvalidError.at(
                field,
                "'registries' needs package mirrors with addresses instead of names here: "
                "NetworkPolicies support addresses only",
                hint="set sandbox_pip_index and the others to URLs with addresses, or use 'closed'",
            )

    def source(self, team: str) -> tuple[str, Internet]:
        """Return whose setting applies to a team, and the setting."""
        own = self._team_internet(team)
        return (INSTALLATION, self._installation) if own is None else (TEAM, own)

    def of(self, team: str) -> NetworkPolicy | None:
        """Return the ceiling of a team; `None` if it has none."""
        return self._ceilings[self._team_internet(team) or self._installation]
