"""The stock of sandbox directories: take, rename, refill, remove."""

import socket

import pytest

from paddock.runtime.local.sandbox.socket_dirs import CONTROL_SOCKET, ENVD_SOCKET, SocketDirs
from tests.runtime.local.nodes import eventually


@pytest.fixture
def stock(tmp_path):
    dirs = SocketDirs(tmp_path / "stock")
    dirs.open()
    yield dirs
    dirs.close()


async def test_a_taken_directory_is_reachable_at_its_new_path(stock, tmp_path):
    place = tmp_path / "sandbox"

    sockets = stock.take(str(place))

    assert sockets is not None
    for name, listener in ((ENVD_SOCKET, sockets.envd), (CONTROL_SOCKET, sockets.control)):
        with socket.socket(socket.AF_UNIX) as caller, listener:
            caller.connect(str(place / name))
            assert (place / name).stat().st_mode & 0o777 == 0o600
    assert (place / "record.0").read_bytes() == b""


async def test_the_stock_is_refilled(stock, tmp_path):
    def ready() -> int:
        return len(list((tmp_path / "stock").iterdir()))

    before = ready()
    for number in range(before):
        for one in stock.take(str(tmp_path / str(number))):
            one.close()
    assert ready() == 0
    assert stock.take(str(tmp_path / "more")) is None

    await eventually(lambda: ready() == before)


async def test_directories_of_a_killed_node_are_removed(tmp_path):
    left = tmp_path / "stock" / "left"
    left.mkdir(parents=True)
    dirs = SocketDirs(tmp_path / "stock")

    dirs.open()

    assert not left.exists()
    dirs.close()
    assert not (tmp_path / "stock").exists()


async def test_a_removed_directory_is_skipped(stock, tmp_path):
    for path in list((tmp_path / "stock").iterdir()):
        path.rename(tmp_path / f"stolen-{path.name}")

    assert stock.take(str(tmp_path / "sandbox")) is None
    assert not (tmp_path / "sandbox").exists()
