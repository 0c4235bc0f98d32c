"""Rates of network and disk: no sandbox exceeds its template, and none the installation."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.kit.errors import InvalidError
from paddock.resources.kinds.template import Resources, SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import ObjectMeta
from paddock.runtime import blueprint, rates, support
from paddock.runtime.local.kernel import block_devices
from paddock.runtime.local.kernel.cgroups import CgroupLayout, Cgroups
from paddock.runtime.local.node.node_context import DEFAULT_LIMITS
from paddock.runtime.port import Limits
from paddock.runtime.rate_settings import rates_of
from paddock.settings import Settings

ALL = (*rates.NETWORK, *rates.DISK)
_rate = st.one_of(st.none(), st.integers(0, 10**12))
_limits = st.builds(Limits, **dict.fromkeys(ALL, _rate))


@given(_limits, _limits)
def test_no_rate_exceeds_a_ceiling(wanted: Limits, ceiling: Limits) -> None:
    found = rates.capped(wanted, ceiling)
    for name in ALL:
        asked, most, rate = (getattr(one, name) or 0 for one in (wanted, ceiling, found))
        if most:
            assert 0 < rate <= most
        assert rate == (min(asked, most) if asked and most else asked or most)


def test_a_sandbox_cannot_exceed_its_template() -> None:
    template = Resources(ingress_bandwidth="8M", io_read_bandwidth="1Mi", io_write_iops=100)
    own = Resources(memory="1Gi", ingress_bandwidth="1G", egress_bandwidth="1M", io_write_iops=5)
    found = blueprint.sandbox_limits(own, template)
    assert (found.ingress_bandwidth, found.egress_bandwidth) == (8_000_000, 1_000_000)
    assert (found.io_read_bandwidth, found.io_write_iops) == (1 << 20, 5)
    assert found.memory_bytes == 1 << 30
    assert blueprint.sandbox_limits(None, template).ingress_bandwidth == 8_000_000


def test_the_settings_are_the_rates_of_a_node_by_default() -> None:
    found = rates_of(Settings())
    assert {name: getattr(found, name) for name in ALL} == {
        name: getattr(DEFAULT_LIMITS, name) for name in ALL
    }
    with pytest.raises(InvalidError, match="sandbox_egress_bandwidth"):
        rates_of(Settings(sandbox_egress_bandwidth="fast"))


def test_pods_refuse_rates_at_apply() -> None:
    resources = Resources(ingress_bandwidth="8M", io_write_iops=5)
    template = SandboxTemplate(
        metadata=ObjectMeta(name="t"), spec=SandboxTemplateSpec(resources=resources)
    )
    problems = support.problems(support.KUBERNETES, template)
    assert [problem.path for problem in problems] == [
        "spec.resources.ingressBandwidth", "spec.resources.ioWriteIops",
    ]  # fmt: skip
    assert not support.problems(support.LOCAL, template)


@pytest.mark.parametrize("is_v2", [True, False])
def test_disk_rates_are_written_for_each_disk(tmp_path: Path, is_v2: bool) -> None:
    mount = tmp_path / "cgroup"
    group = mount / "paddock-n/s1"
    group.mkdir(parents=True)
    names = (
        ["io.max"] if is_v2 else
        [f"blkio.throttle.{way}_{unit}_device" for way in ("read", "write")
         for unit in ("bps", "iops")]
    )  # fmt: skip
    for name in names:
        (group / name).touch()
    layout = (
        CgroupLayout(str(mount), frozenset({"io"}), {}) if is_v2 else
        CgroupLayout(str(mount), frozenset(), {"blkio": str(mount)})
    )  # fmt: skip
    groups = Cgroups("n", layout)
    groups.disks = ("7:0",)
    groups.limit_io("s1", Limits(io_read_bandwidth=1, io_write_iops=4))
    written = {path.name: path.read_text() for path in group.iterdir()}
    if is_v2:
        assert written == {"io.max": "7:0 rbps=1 wbps=max riops=max wiops=4"}
    else:
        assert written == {
            "blkio.throttle.read_bps_device": "7:0 1",
            "blkio.throttle.write_bps_device": "7:0 0",
            "blkio.throttle.read_iops_device": "7:0 0",
            "blkio.throttle.write_iops_device": "7:0 4",
        }


def test_disks_are_whole_disks_and_memory_has_none(tmp_path: Path) -> None:
    for disk in block_devices.disks_of(tmp_path, Path("/")):
        assert not Path(f"/sys/dev/block/{disk}/partition").exists()
    assert block_devices.disks_of(Path("/proc")) == ()


def test_limits_written_by_older_versions_are_read() -> None:
    assert msgspec.json.decode(b'{"pids":5}', type=Limits) == Limits(pids=5)
