"""Choose the numbered fabric of a node: the one it used before, else the first free one.

The number is stored next to the records, because sandboxes that outlive the node process have
addresses of that fabric. A fabric with sandboxes is in use even if no node runs it now.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from paddock.kit.errors import ConflictError, UnavailableError
from paddock.kit.logs import fields
from paddock.runtime.local.net import links
from paddock.runtime.local.net.addresses import AddressPlan
from paddock.runtime.local.net.fabric import Fabric
from paddock.runtime.local.net.rtnetlink import Channel
from paddock.runtime.local.net.settings import FabricSettings

log = logging.getLogger(__name__)

NUMBERS = range(10)
_NUMBER_FILE = "number"


def _default(number: int, directory: Path) -> FabricSettings:
    return FabricSettings.numbered(number, str(directory))


SettingsOf = Callable[[int, Path], FabricSettings]
"""Returns the settings of a fabric by its number and the directory of its records."""


async def open_node_fabric(directory: Path, settings_of: SettingsOf = _default) -> Fabric:
    """Open the fabric that this node used before, or a free one."""
    known = _recorded_number(directory)
    if known is not None:
        try:
            return await Fabric.open(settings_of(known, directory))
        except ConflictError:
            if _has_records(directory):
                # The node's sandboxes have addresses of this fabric: no other one can be used.
                raise
            log.info("fabric is in use, choosing another one", extra=fields(number=known))
    return await _open_free(directory, settings_of)


async def _open_free(directory: Path, settings_of: SettingsOf) -> Fabric:
    problem: ConflictError | None = None
    for number in _unused_numbers(NUMBERS):
        try:
            fabric = await Fabric.open(settings_of(number, directory))
        except ConflictError as error:
            problem = error
            continue
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / _NUMBER_FILE).write_text(f"{number}\n")
        log.info("fabric chosen", extra=fields(number=number))
        return fabric
    raise problem or UnavailableError(
        f"all {len(NUMBERS)} networks for sandboxes are in use on this machine",
        hint="stop another installation, or start the node with an unused --network number",
    )


def _recorded_number(directory: Path) -> int | None:
    try:
        return int((directory / _NUMBER_FILE).read_text())
    except (FileNotFoundError, ValueError):
        # Written before numbers were stored, when there was only fabric 0.
        return 0 if _has_records(directory) else None


def _has_records(directory: Path) -> bool:
    return next(directory.glob("*.json"), None) is not None


def _unused_numbers(numbers: Iterable[int]) -> list[int]:
    """Return the numbers without sandboxes on this machine, those never used first."""
    with Channel() as channel:
        present = {network.network_address for _, network in links.list_addresses(channel)}
        names = [link.name for link in links.list_links(channel)]
    fresh: list[int] = []
    left: list[int] = []
    for number in numbers:
        settings = FabricSettings.numbered(number, "")
        plan = AddressPlan(settings.subnet, settings.link_prefix)
        if any(plan.slot_of_link(name) is not None for name in names):
            continue
        # A gateway without sandboxes belongs to a removed installation, or to one whose sandboxes
        # are all on disk.
        (left if plan.gateway in present else fresh).append(number)
    return fresh + left
