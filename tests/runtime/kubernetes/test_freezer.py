"""The node agent: freezes a pod's processes by its cgroup, on both versions."""

import asyncio
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from paddock.app.roles.node import serving
from paddock.kit.errors import NotFoundError, UnsupportedError
from paddock.runtime.kubernetes.freezer import CGROUPS, find_cgroup, freeze
from tests.ports import free_ports


@pytest.mark.parametrize(
    "name",
    [
        "kubepods/besteffort/pod{dashed}",
        "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{scored}.slice",
        "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{scored}.slice",
    ],
)
def test_the_cgroup_of_a_pod_is_found_with_every_naming_scheme(tmp_path: Path, name: str) -> None:
    uid = str(uuid.uuid4())
    place = tmp_path / name.format(dashed=uid, scored=uid.replace("-", "_"))
    place.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").touch()
    assert find_cgroup(uid, root=tmp_path) == place
    with pytest.raises(NotFoundError, match="has no cgroup on this node"):
        find_cgroup(str(uuid.uuid4()), root=tmp_path)


def test_a_node_without_freezer_cgroups_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no freezer cgroups"):
        find_cgroup("u", root=tmp_path)


class Fleeting(type(Path())):  # type: ignore[misc]
    """A cgroup tree in which some cgroups are removed just before they are listed."""

    def iterdir(self) -> Iterator[Path]:
        if self.name.startswith("ending"):
            shutil.rmtree(self)
        return super().iterdir()


async def test_cgroups_that_are_removed_in_between_are_ignored(tmp_path: Path) -> None:
    uid = str(uuid.uuid4())
    base = tmp_path / "freezer" / "kubepods"
    for name in ("../ending-before", f"pod{uid}/ending-inside", f"pod{uid}/main"):
        (base / name).mkdir(parents=True)
    await freeze(uid, frozen=True, root=Fleeting(tmp_path))
    states = [base / f"pod{uid}" / name / "freezer.state" for name in (".", "main")]
    assert [state.read_text() for state in states] == ["FROZEN"] * 2
    assert not list(tmp_path.rglob("ending-*")), "they were listed"


@pytest.fixture
def pod() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A process in a cgroup as a kubelet creates it."""
    version_2 = (CGROUPS / "cgroup.controllers").exists()
    base = CGROUPS if version_2 else CGROUPS / "freezer"
    uid = str(uuid.uuid4())
    place = base / f"paddock-test-{os.getpid()}" / f"pod{uid}" / "container"
    try:
        place.mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"cgroups cannot be made here: {error}")
    process = subprocess.Popen(["sleep", "600"])
    (place / "cgroup.procs").write_text(str(process.pid))
    yield uid, process
    process.kill()
    process.wait()
    for each in (place, place.parent, place.parent.parent):
        _remove(each)


def _remove(place: Path) -> None:
    deadline = time.monotonic() + 20
    while place.exists():
        try:
            place.rmdir()
        except OSError:
            assert time.monotonic() < deadline, f"{place} is still in use"
            time.sleep(0.01)


def _waits_for(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.sandbox
async def test_processes_of_a_frozen_pod_are_stopped_until_it_is_thawed(
    pod: tuple[str, subprocess.Popen[bytes]],
) -> None:
    uid, process = pod
    await freeze(uid, frozen=True)
    assert _waits_for(process.pid) == "D" or (CGROUPS / "cgroup.controllers").exists()
    process.terminate()
    await asyncio.sleep(0)
    assert process.poll() is None, "a signal does not reach it"
    await freeze(uid, frozen=False)
    assert await asyncio.to_thread(process.wait, 10) == -15


@pytest.mark.sandbox
async def test_the_agent_requires_the_token(
    pod: tuple[str, subprocess.Popen[bytes]],
) -> None:
    uid, _ = pod
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/freeze"
    order = {"pod_uid": uid, "frozen": True}
    async with serving(("secret",), "127.0.0.1", port), aiohttp.ClientSession() as http:
        async with http.post(url, json=order) as answer:
            assert answer.status == 401
        http.headers["Authorization"] = "Bearer secret"
        for frozen in (True, True, False):
            async with http.post(url, json={**order, "frozen": frozen}) as answer:
                assert answer.status == 204
        async with http.post(url, json={**order, "pod_uid": "nobody"}) as answer:
            assert answer.status == 404
