"""The probe accepts only a CRIU that dumps and restores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paddock.runtime.local.checkpoint import find_criu, probe
from paddock.runtime.local.checkpoint.probe import candidates

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="CRIU needs root"),
]
SOURCE = Path(sys.modules["paddock.runtime.local.checkpoint.probe"].__file__ or "")


def fake(directory: Path, body: str) -> Path:
    program = directory / "criu"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return program


def test_a_program_that_fails_to_dump_is_rejected_with_its_error(tmp_path: Path):
    assert probe(fake(tmp_path, "echo no such luck >&2; exit 1")) == "dump failed: no such luck"


def test_a_program_that_cannot_be_started_is_rejected(tmp_path: Path):
    reason = probe(tmp_path / "nowhere")
    assert reason is not None
    assert "No such file" in reason


def test_a_program_that_does_nothing_is_rejected(tmp_path: Path):
    assert probe(fake(tmp_path, "exit 0"), seconds=1) is not None


def test_the_probe_runs_in_a_separate_network_namespace(tmp_path: Path):
    program, reason = find_criu()
    if program is None:
        pytest.skip(f"no CRIU works on this machine ({reason}); run scripts/build-criu")
    here = Path("/proc/self/ns/net").readlink()
    script = f'readlink /proc/self/ns/net >> {tmp_path}/networks; exec {program} "$@"'
    assert probe(fake(tmp_path, script)) is None
    dumped, restored = (tmp_path / "networks").read_text().split()
    assert dumped == restored != str(here)
    assert Path("/proc/thread-self/ns/net").readlink() == here


def test_the_newest_build_is_tried_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for version in ("4.9", "4.10.1", "4.2.1"):
        (tmp_path / version).mkdir()
        fake(tmp_path / version, "exit 1")
    found = [path.parent.name for path in candidates(tmp_path) if path.is_relative_to(tmp_path)]
    assert found == ["4.10.1", "4.9", "4.2.1"]
    monkeypatch.setenv("PADDOCK_CRIU", str(tmp_path / "4.9" / "criu"))
    assert candidates(tmp_path)[0] == tmp_path / "4.9" / "criu"


def test_the_probe_runs_without_paddock_installed():
    program, reason = find_criu()
    if program is None:
        pytest.skip(f"no CRIU works on this machine ({reason}); run scripts/build-criu")
    done = subprocess.run(
        ["python3", "-I", SOURCE, program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ok\n")
