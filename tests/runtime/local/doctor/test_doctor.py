"""The doctor probes the machine, leaves nothing behind, and reports fixes."""

import gc
import os
import time
from pathlib import Path

import msgspec
import pytest

from paddock.kit.errors import UnsupportedError
from paddock.runtime.local.doctor.probes import MachineProbe, MissingError, run_probe
from paddock.runtime.local.doctor.report import (
    Check,
    CheckStatus,
    DoctorReport,
    Importance,
    diagnose,
    render,
)


def check(
    name: str, status: CheckStatus, need: Importance = Importance.REQUIRED, fix: str | None = None
) -> Check:
    return Check(name=name, status=status, need=need, found="seen", gives="something", fix=fix)


def report(*checks: Check, is_usable: bool = True) -> DoctorReport:
    return DoctorReport(
        kernel="6.18", machine="x86_64", is_root=True, is_usable=is_usable, checks=checks
    )


@pytest.mark.sandbox
@pytest.mark.timeout(120)
@pytest.mark.skipif(os.geteuid() != 0, reason="the probes need root")
def test_a_machine_that_runs_sandboxes_is_usable_and_unchanged(tmp_path: Path):
    gc.collect()
    left, descriptors = left_by_doctors(), own_descriptors()
    found = diagnose(tmp_path / "state" / "not" / "made")
    assert own_descriptors() <= descriptors
    # Another doctor may run on this machine; it cleans up too.
    deadline = time.monotonic() + 20
    while more := left_by_doctors() - left:
        assert time.monotonic() < deadline, more
        time.sleep(0.05)
    required = [one for one in found.checks if one.need is Importance.REQUIRED]
    assert [
        (one.name, one.status, one.found) for one in required if one.status is not CheckStatus.OK
    ] == []
    assert found.is_usable
    assert {one.name for one in found.checks} >= {
        *("CRIU", "btrfs", "nftables", "swap"),
        *("bandwidth limits", "disk I/O limits"),
    }
    assert not {one.name for one in found.checks} & {"gVisor", "KVM"}, "nothing uses them"
    assert not (tmp_path / "state").exists()


def left_by_doctors() -> set[str]:
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    groups = [*Path("/sys/fs/cgroup").iterdir(), *Path("/sys/fs/cgroup/unified").glob("*")]
    names = [*mounts, *map(str, groups)]
    return {name for name in names if "paddock-doctor-" in name}


def own_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_report_survives_a_json_round_trip():
    found = report(check("CRIU", CheckStatus.MISSING, fix="scripts/build-criu"))
    assert msgspec.json.decode(msgspec.json.encode(found), type=DoctorReport) == found


def test_a_missing_feature_is_shown_with_its_fix():
    shown = render(
        report(
            check("overlay", CheckStatus.OK),
            check(
                "nftables", CheckStatus.MISSING, Importance.RECOMMENDED, "apt-get install nftables"
            ),
        )
    )
    assert "ok       overlay   seen\n" in shown
    assert "missing  nftables  seen\n" in shown
    assert "run: apt-get install nftables\n" in shown
    assert shown.endswith("Sandboxes run here, without nftables.\n")


def test_a_machine_without_a_required_feature_is_unusable():
    shown = render(report(check("overlay", CheckStatus.MISSING), is_usable=False))
    assert shown.endswith("Sandboxes cannot run here: overlay missing.\n")


def test_optional_features_do_not_affect_the_verdict():
    shown = render(report(check("swap", CheckStatus.MISSING, Importance.OPTIONAL)))
    assert shown.endswith("Sandboxes run here with all features.\n")


@pytest.mark.parametrize(
    ("problem", "found", "fix"),
    [
        (MissingError("not there"), "not there", "install it"),
        (OSError(1, "Operation not permitted"), "[Errno 1] Operation not permitted", "install it"),
        (UnsupportedError("cannot"), "cannot", "install it"),
    ],
)
def test_an_error_becomes_a_failed_check(problem: Exception, found: str, fix: str):
    def run() -> str:
        raise problem

    got = run_probe(
        MachineProbe(
            name="x", need=Importance.REQUIRED, gives="something", run=run, fix="install it"
        )
    )
    assert (got.status, got.found, got.fix) == (CheckStatus.MISSING, found, fix)


def test_a_passed_check_has_no_fix():
    got = run_probe(
        MachineProbe(
            name="x", need=Importance.REQUIRED, gives="something", run=lambda: "here", fix="no"
        )
    )
    assert (got.status, got.found, got.fix) == (CheckStatus.OK, "here", None)
