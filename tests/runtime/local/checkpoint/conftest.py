import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paddock.runtime.local.checkpoint import find_criu
from paddock.runtime.local.images.base import minimal_rootfs
from paddock.runtime.local.storage import btrfs_image_unavailable_reason
from tests.runtime.local.checkpoint.lab import Lab


@pytest.fixture(scope="session")
def machine_can() -> None:
    program, reason = find_criu()
    if program is None:
        pytest.skip(f"no CRIU works on this machine ({reason}); run scripts/build-criu")
    if reason := btrfs_image_unavailable_reason():
        pytest.skip(f"this machine cannot create a btrfs image: {reason}")
    if not minimal_rootfs().is_dir():
        pytest.skip("the base image is not built; run `paddock image build-base`")


@pytest.fixture(scope="session")
def init_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layer with init, compiled once for all tests."""
    return tmp_path_factory.mktemp("init")


@pytest.fixture
async def lab(machine_can: None, init_layers: Path) -> AsyncIterator[Lab]:
    directory = Path(tempfile.mkdtemp(prefix="paddock-checkpoint-"))
    directory.chmod(0o755)
    lab = Lab(directory, init_layers)
    yield lab
    await lab.close()
    shutil.rmtree(directory, ignore_errors=True)
