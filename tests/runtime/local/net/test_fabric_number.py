"""Which of a machine's networks an installation takes: one that no other has, and keeps."""

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
    """What the kernel would say, and whose each fabric is."""

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
        """Give a fabric a link, which outlives whoever opened it."""
        name = AddressPlan(settings.subnet, settings.link_prefix).slot(1).link
        self.links.append(links.Link(1, name, "", 1500, 2, True))


async def test_ten_installations_have_nothing_of_their_networks_in_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    for number in range(INSTALLATIONS):
        await fabric_number.open_own(tmp_path / str(number))
    fabrics = list(machine.open.values())
    assert len(fabrics) == INSTALLATIONS
    for one, other in combinations(fabrics, 2):
        assert not IPv4Network(one.subnet).overlaps(IPv4Network(other.subnet))
        # Nor is one name the beginning of another: links are told apart by how they begin.
        assert not one.link_prefix.startswith(other.link_prefix)
        assert not other.link_prefix.startswith(one.link_prefix)
        for field in OWN:
            assert structs.asdict(one)[field] != structs.asdict(other)[field]
    with pytest.raises(ConflictError):
        await fabric_number.open_own(tmp_path / "one too many")


async def test_a_network_with_sandboxes_in_it_stays_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    directories = [tmp_path / str(number) for number in range(INSTALLATIONS)]
    for directory in directories:
        machine.has_sandbox(await fabric_number.open_own(directory))  # type: ignore[arg-type]
    taken = dict(machine.open)
    machine.open.clear()  # as if every node had been killed
    with pytest.raises(UnavailableError, match="all 10 networks"):
        await fabric_number.open_own(tmp_path / "one too many")
    for directory in reversed(directories):
        fabric = await fabric_number.open_own(directory)
        assert taken[fabric.subnet].state_directory == str(directory)  # type: ignore[attr-defined]
