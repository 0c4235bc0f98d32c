"""`paddock doctor`: features of this machine, what is missing, and the commands that install it.

`diagnose` runs the probes of `probes`, `render` formats the report as text; `DoctorReport` is also
the JSON output.
"""

import os
import platform
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from paddock.runtime.local.doctor import probes
from paddock.runtime.local.doctor.probes import Check, CheckStatus, Importance, MachineProbe

__all__ = ["Check", "CheckStatus", "DoctorReport", "Importance", "diagnose", "render"]

_UNPRIVILEGED = "sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=65536"
_ZRAM = (
    "modprobe -q zram; device=$(zramctl --find --size 4G --algorithm lz4) && "
    "mkswap $device && swapon --priority 100 $device"
)
_UNIFIED = "mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified"


class DoctorReport(Struct, frozen=True, kw_only=True):
    """The outcome of all probes."""

    kernel: str
    machine: str
    is_root: bool
    is_usable: bool
    """Whether sandboxes can run here at all."""
    checks: tuple[Check, ...]


def diagnose(state_dir: Path, disk_reserve_bytes: int | None = None) -> DoctorReport:
    """Run all probes that apply to this user; takes about a second."""
    is_root = os.geteuid() == 0
    disk = _probe(
        "disk space", Importance.RECOMMENDED,
        lambda: probes.disk_space(state_dir, disk_reserve_bytes),
        "room for sandboxes, snapshots and images beside the reserve", None,
    )  # fmt: skip
    checks = tuple(
        probes.run_probe(probe) for probe in (*_probes(state_dir, is_root=is_root), disk)
    )
    return DoctorReport(
        kernel=platform.release(),
        machine=platform.machine(),
        is_root=is_root,
        is_usable=all(
            check.status is CheckStatus.OK for check in checks if check.need is Importance.REQUIRED
        ),
        checks=checks,
    )


def render(report: DoctorReport) -> str:
    """Format a report: one line per check, and the fix below a missing feature."""
    who = "root" if report.is_root else "an unprivileged user"
    lines = [f"kernel {report.kernel} on {report.machine}, as {who}", ""]
    width = max((len(check.name) for check in report.checks), default=0)
    for check in report.checks:
        mark = "ok     " if check.status is CheckStatus.OK else "missing"
        lines.append(f"{mark}  {check.name:<{width}}  {check.found}")
        if check.status is CheckStatus.OK:
            continue
        indent = " " * (len(mark) + width + 4)
        lines.append(f"{indent}{check.need}: {check.gives}")
        if check.fix:
            lines.append(f"{indent}run: {check.fix}")
    lines += ["", _verdict(report)]
    return "\n".join(lines) + "\n"


def _verdict(report: DoctorReport) -> str:
    missing = [check for check in report.checks if check.status is CheckStatus.MISSING]
    if not report.is_usable:
        names = ", ".join(check.name for check in missing if check.need is Importance.REQUIRED)
        return f"Sandboxes cannot run here: {names} missing."
    if lacking := [check.name for check in missing if check.need is Importance.RECOMMENDED]:
        return f"Sandboxes run here, without {', '.join(lacking)}."
    return "Sandboxes run here with all features."


def _probes(state: Path, *, is_root: bool) -> tuple[MachineProbe, ...]:
    questions = [
        _probe(
            "user namespaces", Importance.REQUIRED, probes.user_namespaces,
            "root of a sandbox has no privileges on the host", _UNPRIVILEGED,
        ),
        _probe(
            "compiler", Importance.REQUIRED, probes.compiler,
            "the init of a sandbox is compiled on this machine", "apt-get install gcc libc6-dev",
        ),
        _probe(
            "base image", Importance.RECOMMENDED, probes.base_image,
            "a root file system for sandboxes", "paddock image build-base",
        ),
    ]  # fmt: skip
    if is_root:
        questions += _root_probes(state)
    else:
        questions.append(
            _probe(
                "root", Importance.RECOMMENDED, probes.root,
                "limits, pausing, addresses, hibernation and disk limits", "sudo paddock up",
            )
        )  # fmt: skip
    questions += [
        _probe(
            "swap", Importance.OPTIONAL, probes.swap,
            "memory of frozen sandboxes is freed", _ZRAM,
        ),
    ]  # fmt: skip
    return tuple(questions)


def _root_probes(state: Path) -> tuple[MachineProbe, ...]:
    return (
        _probe(
            "overlay", Importance.REQUIRED, probes.overlay,
            "sandboxes share the layers of images", "modprobe overlay",
        ),
        _probe(
            "idmapped mounts", Importance.REQUIRED, lambda: probes.idmapped_mounts(state),
            "files have the same owners inside and on disk", None,
        ),
        _probe(
            "control groups", Importance.REQUIRED, probes.control_groups,
            "limits on CPU, memory and processes", _UNIFIED,
        ),
        _probe(
            "freeze", Importance.REQUIRED, probes.freezing,
            "sandboxes are paused in microseconds", _UNIFIED,
        ),
        _probe(
            "network namespaces", Importance.RECOMMENDED, probes.network_namespaces,
            "sandboxes have addresses and internet access", "modprobe veth",
        ),
        _probe(
            "nftables", Importance.RECOMMENDED, probes.nftables,
            "egress policies are enforced", "apt-get install nftables",
        ),
        _probe(
            "bandwidth limits", Importance.RECOMMENDED, probes.bandwidth,
            "no sandbox takes the whole network", "modprobe sch_tbf",
        ),
        _probe(
            "disk I/O limits", Importance.RECOMMENDED, probes.disk_io,
            "no sandbox takes the whole disk", None,
        ),
        _probe(
            "btrfs", Importance.RECOMMENDED, lambda: probes.btrfs(state),
            "disk limits and instant snapshots", "apt-get install btrfs-progs",
        ),
        _probe(
            "CRIU", Importance.RECOMMENDED, probes.criu,
            "sandboxes are hibernated, forked and stored with memory", "scripts/build-criu",
        ),
    )  # fmt: skip


def _probe(
    name: str, need: Importance, run: Callable[[], str], gives: str, fix: str | None
) -> MachineProbe:
    return MachineProbe(name=name, need=need, run=run, gives=gives, fix=fix)
