"""The choice of a numbered fabric: unused by others, and kept."""

from ipaddress import IPv4Network
from itertools import combinations
from pathlib import Path

import pytest
from msgspec import structs

from paddock.kit.errors import ConflictError, UnavailableError
from paddock.runtime.local.net import fabric_number, links
from paddock.runtime.local.net.addresses import AddressPlan
from paddock.runtime.local.net.settings import FabricSettings

INSTALLATIONS = 10
OWN = ("subnet", "link_prefix", "table", "dns_port")


class Machine:
    """A fake kernel, with the fabrics that are open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open: dict[str, FabricSettings] = {}
        self.links: list[links.Link] = []
        monkeypatch.setattr(fabric_number.Fabric, "open", self.opened)
        monkeypatch.setattr(fabric_number.links, "list_addresses", lambda _: [])
        monkeypatch.setattr(fabric_number.links, "list_links", lambda _: self.links)

    async def opened(self, settings: FabricSettings) -> FabricSettings:
        if settings.subnet in self.open:
            raise ConflictError(f"{settings.subnet} is taken")
        self.open[settings.subnet] = settings
        return settings

    def has_sandbox(self, settings: FabricSettings) -> None:
        """Add a link to a fabric; it outlives the node."""
        name = AddressPlan(settings.subnet, settings.link_prefix).slot(1).link
        self.links.append(links.Link(1, name, "", 1500, 2, True))


async def test_the_networks_of_ten_installations_do_not_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    for number in range(INSTALLATIONS):
        await fabric_number.open_node_fabric(tmp_path / str(number))
    fabrics = list(machine.open.values())
    assert len(fabrics) == INSTALLATIONS
    for one, other in combinations(fabrics, 2):
        assert not IPv4Network(one.subnet).overlaps(IPv4Network(other.subnet))
        # No prefix is a prefix of another: links are identified by their prefix.
        assert not one.link_prefix.startswith(other.link_prefix)
        assert not other.link_prefix.startswith(one.link_prefix)
        for field in OWN:
            assert structs.asdict(one)[field] != structs.asdict(other)[field]
    with pytest.raises(ConflictError):
        await fabric_number.open_node_fabric(tmp_path / "one too many")


async def test_a_network_with_sandboxes_is_kept_by_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    directories = [tmp_path / str(number) for number in range(INSTALLATIONS)]
    for directory in directories:
        machine.has_sandbox(await fabric_number.open_node_fabric(directory))  # type: ignore[arg-type]
    taken = dict(machine.open)
    machine.open.clear()  # as if every node had been killed
    with pytest.raises(UnavailableError, match="all 10 networks"):
        await fabric_number.open_node_fabric(tmp_path / "one too many")
    for directory in reversed(directories):
        fabric = await fabric_number.open_node_fabric(directory)
        assert taken[fabric.subnet].state_directory == str(directory)  # type: ignore[attr-defined]
