"""The doctor tries things out, leaves nothing behind, and says what to do."""

import gc
import os
import time
from pathlib import Path

import msgspec
import pytest

from paddock.kit.errors import UnsupportedError
from paddock.runtime.local.doctor.probes import MissingError, Question, answer
from paddock.runtime.local.doctor.report import Check, Need, Report, Status, probe, render


def check(name: str, status: Status, need: Need = Need.REQUIRED, fix: str | None = None) -> Check:
    return Check(name=name, status=status, need=need, found="seen", gives="something", fix=fix)


def report(*checks: Check, is_usable: bool = True) -> Report:
    return Report(kernel="6.18", machine="x86_64", is_root=True, is_usable=is_usable, checks=checks)


@pytest.mark.sandbox
@pytest.mark.timeout(120)
@pytest.mark.skipif(os.geteuid() != 0, reason="the machine's abilities are tried as root")
def test_a_machine_that_runs_sandboxes_is_found_usable_and_left_as_it_was(tmp_path: Path):
    gc.collect()
    left, descriptors = left_by_doctors(), own_descriptors()
    found = probe(tmp_path / "state" / "not" / "made")
    assert own_descriptors() <= descriptors
    # Another doctor may be at work on this machine, and takes its things away, too.
    deadline = time.monotonic() + 20
    while more := left_by_doctors() - left:
        assert time.monotonic() < deadline, more
        time.sleep(0.05)
    required = [one for one in found.checks if one.need is Need.REQUIRED]
    assert [
        (one.name, one.status, one.found) for one in required if one.status is not Status.OK
    ] == []
    assert found.is_usable
    assert {one.name for one in found.checks} >= {
        "CRIU",
        "btrfs",
        "nftables",
        "swap",
        "gVisor",
        "KVM",
    }
    assert not (tmp_path / "state").exists()


def left_by_doctors() -> set[str]:
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    groups = [*Path("/sys/fs/cgroup").iterdir(), *Path("/sys/fs/cgroup/unified").glob("*")]
    names = [*mounts, *map(str, groups)]
    return {name for name in names if "paddock-doctor-" in name}


def own_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_report_is_json_as_it_is():
    found = report(check("CRIU", Status.MISSING, fix="scripts/build-criu"))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Report) == found


def test_what_is_missing_is_shown_with_the_command_that_installs_it():
    shown = render(
        report(
            check("overlay", Status.OK),
            check("nftables", Status.MISSING, Need.RECOMMENDED, "apt-get install nftables"),
        )
    )
    assert "ok       overlay   seen\n" in shown
    assert "missing  nftables  seen\n" in shown
    assert "run: apt-get install nftables\n" in shown
    assert shown.endswith("Sandboxes run here, without nftables.\n")


def test_a_machine_without_something_required_is_called_unusable():
    shown = render(report(check("overlay", Status.MISSING), is_usable=False))
    assert shown.endswith("Sandboxes cannot run here: overlay missing.\n")


def test_optional_things_do_not_spoil_the_verdict():
    shown = render(report(check("KVM", Status.MISSING, Need.OPTIONAL)))
    assert shown.endswith("Sandboxes run here with everything.\n")


@pytest.mark.parametrize(
    ("problem", "found", "fix"),
    [
        (MissingError("not there"), "not there", "install it"),
        (OSError(1, "Operation not permitted"), "[Errno 1] Operation not permitted", "install it"),
        (UnsupportedError("cannot"), "cannot", "install it"),
    ],
)
def test_a_refusal_of_the_machine_becomes_an_answer(problem: Exception, found: str, fix: str):
    def ask() -> str:
        raise problem

    got = answer(
        Question(name="x", need=Need.REQUIRED, gives="something", ask=ask, fix="install it")
    )
    assert (got.status, got.found, got.fix) == (Status.MISSING, found, fix)


def test_nothing_is_to_be_fixed_where_all_is_well():
    got = answer(
        Question(name="x", need=Need.REQUIRED, gives="something", ask=lambda: "here", fix="no")
    )
    assert (got.status, got.found, got.fix) == (Status.OK, "here", None)
