"""The benchmark of images measures pulls of a real registry, also without what it compares with."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.runtime.local.images import builders
from tests.runtime.local.images.registry.servers import push, registry

ROOT = Path(__file__).parents[2]

sys.path.insert(0, str(ROOT / "bench"))
import images  # noqa: E402
import reporting  # noqa: E402

sys.path.remove(str(ROOT / "bench"))

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners are set, which needs root")


@pytest.mark.parametrize("has_rival", [True, False])
def test_a_small_image_is_pulled_and_compared(
    has_rival: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_rival and shutil.which("umoci") is None:
        pytest.skip("umoci is not installed: scripts/install-rivals")
    if not has_rival:
        monkeypatch.setattr(images.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["images.py", "--quick"])
    report = reporting.Report("images", images.__doc__, images.options)
    layout = builders.oci_layout(tmp_path / "layout", images.layers(4))
    (tmp_path / "rounds").mkdir()
    with registry(tmp_path / "registry") as server:
        push(layout, server, images.NAME)
        images.measure(report, server, tmp_path / "rounds", 1)
    pulls = report.figures["pull_and_unpack"]
    assert isinstance(pulls, dict)
    assert pulls["success"] == 1
    peak = report.figures["peak_memory_mb"]
    assert isinstance(peak, float)
    assert 10 < peak < 150
    assert ("throughput_to_skopeo_umoci" in report.ratios) is has_rival
    assert ("skopeo_umoci" in report.missing) is not has_rival
    assert list((tmp_path / "rounds").iterdir()) == []
