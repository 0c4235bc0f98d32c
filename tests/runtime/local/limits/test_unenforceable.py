"""A rate that the machine cannot enforce is refused or reported, never silently ignored."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddock.kit.errors import UnsupportedError
from paddock.runtime.local.doctor import probes
from paddock.runtime.local.kernel.cgroups import CgroupLayout, Cgroups
from paddock.runtime.local.net import netns, shaping
from paddock.runtime.local.net.rtnetlink import Channel, NetlinkError
from paddock.runtime.local.node.rate_support import CACHED_WRITES, check_rates, limits_note
from paddock.runtime.port import Blueprint, InstanceState, Limits
from tests.runtime.local.nodes import TestNode

WITHOUT_RATES = """
from paddock.runtime.local.kernel import block_devices
from paddock.runtime.local.net import shaping
shaping.unavailable_reason = lambda: "the kernel lacks tbf"
block_devices.disks_of = lambda *directories: ()
"""
NO_DISK = "the files of sandboxes are not on a disk"
SLOW_NETWORK, SLOW_DISK = Limits(egress_bandwidth=8_000_000), Limits(io_read_iops=100)


def context(*, no_tbf: str = "", no_io: str = "", is_v2: bool = True, fabric: bool = True) -> Any:
    groups = SimpleNamespace(io_unavailable_reason=no_io, limits_cached_writes=is_v2)
    link = SimpleNamespace(rates_unavailable_reason=no_tbf) if fabric else None
    return SimpleNamespace(cgroups=groups, fabric=link)


def test_only_requested_rates_are_refused() -> None:
    check_rates(context(no_tbf="no tbf", no_io="no io"), Limits(pids=5, ingress_bandwidth=0))
    check_rates(context(no_tbf="no tbf"), SLOW_DISK)
    check_rates(context(no_io="no io"), SLOW_NETWORK)
    # Without a network there is no traffic.
    check_rates(context(fabric=False), SLOW_NETWORK)
    with pytest.raises(UnsupportedError, match="cannot limit bandwidth: no tbf"):
        check_rates(context(no_tbf="no tbf"), SLOW_NETWORK)
    with pytest.raises(UnsupportedError, match="cannot limit disk I/O: no io") as refused:
        check_rates(context(no_io="no io"), SLOW_DISK)
    assert "paddock doctor" in (refused.value.hint or "")


def test_limits_of_writes_have_a_note_with_cgroup_v1() -> None:
    assert limits_note(context(is_v2=False), Limits(io_write_bandwidth=5)) == CACHED_WRITES
    assert limits_note(context(is_v2=False), Limits(io_write_iops=5)) == CACHED_WRITES
    assert not limits_note(context(is_v2=False), Limits(io_read_iops=5))
    assert not limits_note(context(is_v2=True), Limits(io_write_iops=5))


@pytest.mark.parametrize(
    ("controllers", "disks", "reason"),
    [
        ({}, ("7:0",), "no io or blkio controller"),
        ({"blkio": "blkio"}, (), NO_DISK),
        # A kernel without throttling has the controller, but not its files.
        ({"blkio": "blkio"}, ("7:0",), "cannot write '7:0 1048576' to .*read_bps_device"),
    ],
)
def test_disk_io_is_tried_before_it_is_relied_on(
    tmp_path: Path, controllers: dict[str, str], disks: tuple[str, ...], reason: str
) -> None:
    mounts = {name: str(tmp_path / at) for name, at in controllers.items()}
    for mount in (str(tmp_path / "v2"), *mounts.values()):
        Path(mount, "paddock-n").mkdir(parents=True)
    groups = Cgroups("n", CgroupLayout(str(tmp_path / "v2"), frozenset(), mounts))
    groups.open_io(disks)
    with pytest.raises(UnsupportedError, match=reason):
        check_rates(context(no_io=groups.io_unavailable_reason), SLOW_DISK)
    assert groups.disks == ()
    assert not list(tmp_path.glob("*/paddock-n/*"))


def test_a_kernel_without_tbf_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(channel: Channel, index: int, rate: int) -> None:
        raise NetlinkError(2, "limit the rate of link 1")

    monkeypatch.setattr(shaping, "set_rate", refuse)
    monkeypatch.setattr(netns, "create", lambda: netns.open_for_pid(os.getpid()))
    assert "modprobe sch_tbf" in shaping.unavailable_reason()
    with pytest.raises(probes.MissingError, match="sch_tbf"):
        probes.bandwidth()


@pytest.fixture
async def own() -> AsyncIterator[TestNode]:
    made = TestNode()
    await made.start()
    yield made
    for instance in await made.runtime.instances():
        await made.runtime.destroy(instance.uid)
    await made.stop()


@pytest.mark.sandbox
@pytest.mark.timeout(120)
async def test_a_node_refuses_what_its_kernel_cannot_enforce(own: TestNode) -> None:
    runtime = own.runtime
    can = await runtime.capabilities()
    assert can.can_limit_bandwidth
    assert can.can_limit_io
    await runtime.create(Blueprint(uid="stored", image="host", limits=SLOW_NETWORK))
    await runtime.hibernate("stored")
    own.kill()
    own.prelude = WITHOUT_RATES
    await own.start()
    can = await runtime.capabilities()
    assert not any((can.can_limit_bandwidth, can.can_limit_io, can.can_limit_cached_writes))
    assert can.reasons["can_limit_bandwidth"] == "the kernel lacks tbf"
    assert can.reasons["can_limit_io"] == can.reasons["can_limit_cached_writes"] == NO_DISK
    for limits, reason in ((SLOW_NETWORK, "the kernel lacks tbf"), (SLOW_DISK, NO_DISK)):
        with pytest.raises(UnsupportedError, match=reason):
            await runtime.create(Blueprint(uid="slow", image="host", limits=limits))
    with pytest.raises(UnsupportedError, match="the kernel lacks tbf"):
        await runtime.restore("stored")
    assert (await runtime.inspect("stored")).state is InstanceState.HIBERNATED
    # The defaults of the node are no request.
    made = await runtime.create(Blueprint(uid="default", image="host"))
    assert made.state is InstanceState.RUNNING
    log = own.log.read_text()
    assert "bandwidth of sandboxes is not limited" in log
    assert "disk I/O of sandboxes is not limited" in log


@pytest.mark.sandbox
@pytest.mark.timeout(120)
async def test_partly_enforced_limits_are_reported(own: TestNode) -> None:
    can = await own.runtime.capabilities()
    limits = Limits(io_write_bandwidth=1 << 20)
    made = await own.runtime.create(Blueprint(uid="slow", image="host", limits=limits))
    reason = can.reasons.get("can_limit_cached_writes", "")
    assert bool(reason) is not can.can_limit_cached_writes
    assert made.limits_note == reason
