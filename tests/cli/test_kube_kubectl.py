"""What `paddock kube` makes of what `kubectl` says."""

from pathlib import Path

import pytest

from paddock.cli.kube import kubectl
from paddock.cli.kube.kubectl import Kubectl
from paddock.kit.errors import UnsupportedError

POOL = {"apiVersion": "paddock.dev/v1alpha1", "kind": "SandboxPool", "metadata": {"name": "base"}}
NOT_YET = """
error: resource mapping not found for name: "base" namespace: "default" from "STDIN": \
no matches for kind "SandboxPool" in version "paddock.dev/v1alpha1"
ensure CRDs are installed first
"""
"""A server's discovery is behind its definitions."""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that does not know a kind the first two times; each call is a line."""
    calls, said = tmp_path / "calls", tmp_path / "said"
    calls.touch()
    said.write_text(NOT_YET)
    program = tmp_path / "kubectl"
    program.write_text(
        f'#!/bin/sh\ncat >/dev/null\necho "$1" >>{calls}\n'
        f"[ $(wc -l <{calls}) -gt 2 ] || {{ cat {said} >&2; exit 1; }}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(kubectl, "LOOK_SECONDS", 0.01)
    return calls


def test_kinds_that_a_busy_server_does_not_tell_of_yet_are_waited_for(calls: Path) -> None:
    Kubectl(None, None).apply_when_served([POOL])
    assert calls.read_text().split() == ["apply"] * 3


def test_kinds_that_are_not_there_are_named(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubectl, "SERVED_SECONDS", 0.0)
    with pytest.raises(UnsupportedError, match='no matches for kind "SandboxPool"'):
        Kubectl(None, None).apply_when_served([POOL])
    assert calls.read_text().split() == ["apply"]
