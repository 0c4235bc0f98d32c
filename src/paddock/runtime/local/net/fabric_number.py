"""Which of a machine's numbered fabrics a node takes: the one it had, else the first free one.

The number is kept beside the records: sandboxes that outlive the node have addresses of that
fabric. A fabric with sandboxes in it belongs to somebody, though no node may run it now.
"""

import logging
from collections.abc import Iterable
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
_NOTE = "number"


async def open_own(directory: Path) -> Fabric:
    """Open the fabric that this node had last, or take one that nobody has."""
    known = _known(directory)
    if known is not None:
        try:
            return await Fabric.open(FabricSettings.numbered(known, str(directory)))
        except ConflictError:
            if _has_records(directory):
                # Its sandboxes have addresses there: it must be that one or none.
                raise
            log.info("fabric is taken, another one is chosen", extra=fields(number=known))
    return await _open_free(directory)


async def _open_free(directory: Path) -> Fabric:
    problem: ConflictError | None = None
    for number in _unused(NUMBERS):
        try:
            fabric = await Fabric.open(FabricSettings.numbered(number, str(directory)))
        except ConflictError as error:
            problem = error
            continue
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / _NOTE).write_text(f"{number}\n")
        log.info("fabric chosen", extra=fields(number=number))
        return fabric
    raise problem or UnavailableError(
        f"all {len(NUMBERS)} networks for sandboxes are taken on this machine",
        hint="stop another installation, or give the node --network with a number of its own",
    )


def _known(directory: Path) -> int | None:
    try:
        return int((directory / _NOTE).read_text())
    except (FileNotFoundError, ValueError):
        # From before numbers were kept: there was only one.
        return 0 if _has_records(directory) else None


def _has_records(directory: Path) -> bool:
    return next(directory.glob("*.json"), None) is not None


def _unused(numbers: Iterable[int]) -> list[int]:
    """Give those that no sandbox of this machine is in; first those that never were used."""
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
        # A gateway without sandboxes may be of an installation that is gone, or of one that
        # keeps sandboxes on disk alone.
        (left if plan.gateway in present else fresh).append(number)
    return fresh + left
