"""`paddock kube` handles the errors of `kubectl`."""

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
"""The discovery of the server lags behind its CRDs."""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that fails for a kind the first two times; it writes one line per call."""
    calls, error = tmp_path / "calls", tmp_path / "error"
    calls.touch()
    error.write_text(NOT_YET)
    program = tmp_path / "kubectl"
    program.write_text(
        f'#!/bin/sh\ncat >/dev/null\necho "$1" >>{calls}\n'
        f"[ $(wc -l <{calls}) -gt 2 ] || {{ cat {error} >&2; exit 1; }}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(kubectl, "RETRY_SECONDS", 0.01)
    return calls


def test_apply_waits_until_the_server_lists_new_kinds(calls: Path) -> None:
    Kubectl(None, None).apply_when_served([POOL])
    assert calls.read_text().split() == ["apply"] * 3


def test_missing_kinds_are_reported(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubectl, "SERVED_SECONDS", 0.0)
    with pytest.raises(UnsupportedError, match='no matches for kind "SandboxPool"'):
        Kubectl(None, None).apply_when_served([POOL])
    assert calls.read_text().split() == ["apply"]
