"""`paddock doctor`: what this machine can do for sandboxes, what is missing, and what installs it.

`probe` asks, `render` shows; a report encodes to JSON as it is. The single questions, each answered
by trying, are in `doctor_probes`.
"""

import os
import platform
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from paddock.runtime.local.doctor import probes
from paddock.runtime.local.doctor.probes import Check, Need, Question, Status

__all__ = ["Check", "Need", "Report", "Status", "probe", "render"]

_UNPRIVILEGED = "sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=65536"
_ZRAM = (
    "modprobe -q zram; device=$(zramctl --find --size 4G --algorithm lz4) && "
    "mkswap $device && swapon --priority 100 $device"
)
_UNIFIED = "mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified"


class Report(Struct, frozen=True, kw_only=True):
    """Everything that was asked."""

    kernel: str
    machine: str
    is_root: bool
    is_usable: bool
    """Whether sandboxes can run here at all."""
    checks: tuple[Check, ...]


def probe(state_dir: Path) -> Report:
    """Ask everything that makes sense for this user; takes about a second."""
    is_root = os.geteuid() == 0
    checks = tuple(probes.answer(question) for question in _questions(state_dir, is_root=is_root))
    return Report(
        kernel=platform.release(),
        machine=platform.machine(),
        is_root=is_root,
        is_usable=all(check.status is Status.OK for check in checks if check.need is Need.REQUIRED),
        checks=checks,
    )


def render(report: Report) -> str:
    """Show a report to people: one line for each answer, and a command below what is missing."""
    who = "root" if report.is_root else "an unprivileged user"
    lines = [f"kernel {report.kernel} on {report.machine}, as {who}", ""]
    width = max((len(check.name) for check in report.checks), default=0)
    for check in report.checks:
        mark = "ok     " if check.status is Status.OK else "missing"
        lines.append(f"{mark}  {check.name:<{width}}  {check.found}")
        if check.status is Status.OK:
            continue
        indent = " " * (len(mark) + width + 4)
        lines.append(f"{indent}{check.need}: {check.gives}")
        if check.fix:
            lines.append(f"{indent}run: {check.fix}")
    lines += ["", _verdict(report)]
    return "\n".join(lines) + "\n"


def _verdict(report: Report) -> str:
    missing = [check for check in report.checks if check.status is Status.MISSING]
    if not report.is_usable:
        names = ", ".join(check.name for check in missing if check.need is Need.REQUIRED)
        return f"Sandboxes cannot run here: {names} missing."
    if lacking := [check.name for check in missing if check.need is Need.RECOMMENDED]:
        return f"Sandboxes run here, without {', '.join(lacking)}."
    return "Sandboxes run here with everything."


def _questions(state: Path, *, is_root: bool) -> tuple[Question, ...]:
    questions = [
        _question(
            "user namespaces", Need.REQUIRED, probes.user_namespaces,
            "root of a sandbox is nobody outside", _UNPRIVILEGED,
        ),
        _question(
            "compiler", Need.REQUIRED, probes.compiler,
            "the first process of a sandbox is compiled here", "apt-get install gcc libc6-dev",
        ),
        _question(
            "base image", Need.RECOMMENDED, probes.base_image,
            "a root file system for sandboxes", "paddock image build-base",
        ),
    ]  # fmt: skip
    if is_root:
        questions += _questions_of_root(state)
    else:
        questions.append(
            _question(
                "root", Need.RECOMMENDED, probes.root,
                "limits, pausing, addresses, storing memory and limited disks", "sudo paddock up",
            )
        )  # fmt: skip
    questions += [
        _question(
            "swap", Need.OPTIONAL, probes.swap,
            "memory of frozen sandboxes is given back to the machine", _ZRAM,
        ),
        _question(
            "gVisor", Need.OPTIONAL, probes.gvisor,
            "a second wall between sandboxes and the kernel", "apt-get install runsc",
        ),
        _question(
            "KVM", Need.OPTIONAL, probes.kvm,
            "sandboxes as virtual machines", None,
        ),
    ]  # fmt: skip
    return tuple(questions)


def _questions_of_root(state: Path) -> tuple[Question, ...]:
    return (
        _question(
            "overlay", Need.REQUIRED, probes.overlay,
            "layers of images are shared by sandboxes", "modprobe overlay",
        ),
        _question(
            "idmapped mounts", Need.REQUIRED, lambda: probes.idmapped_mounts(state),
            "files belong to whom they belong inside", None,
        ),
        _question(
            "control groups", Need.REQUIRED, probes.control_groups,
            "limits on processor, memory and processes", _UNIFIED,
        ),
        _question(
            "freeze", Need.REQUIRED, probes.freezing,
            "sandboxes are paused in microseconds", _UNIFIED,
        ),
        _question(
            "network namespaces", Need.RECOMMENDED, probes.network_namespaces,
            "sandboxes have addresses and reach the internet", "modprobe veth",
        ),
        _question(
            "nftables", Need.RECOMMENDED, probes.nftables,
            "what a sandbox may connect to is decided", "apt-get install nftables",
        ),
        _question(
            "btrfs", Need.RECOMMENDED, lambda: probes.btrfs(state),
            "files are limited, and copied in no time", "apt-get install btrfs-progs",
        ),
        _question(
            "CRIU", Need.RECOMMENDED, probes.criu,
            "sandboxes are hibernated, forked and stored with their memory", "scripts/build-criu",
        ),
    )  # fmt: skip


def _question(
    name: str, need: Need, ask: Callable[[], str], gives: str, fix: str | None
) -> Question:
    return Question(name=name, need=need, ask=ask, gives=gives, fix=fix)
