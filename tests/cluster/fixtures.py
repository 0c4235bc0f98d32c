"""One cluster for a whole test run, shared by all pytest workers.

A keeper process runs the cluster. Each worker holds a shared lock on a file while it uses the
cluster. The keeper waits for the exclusive lock, which it gets when all workers have finished or
were killed. Then it stops the cluster.

`kube_cluster` and `kube_namespace` are available to every test through tests/conftest.py.
`PADDOCK_TEST_KUBE=<file>` reuses a cluster of `python -m tests.cluster.control_plane --json`.
"""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.cluster.binaries import ROOT, BinariesMissingError, directory_with
from tests.cluster.control_plane import CONTROLLER_MANAGER, SCHEDULER, KubeCluster
from tests.cluster.definitions import install
from tests.cluster.info import ClusterInfo
from tests.cluster.node import machine

START_SECONDS = 170.0
REQUIRE = "PADDOCK_REQUIRE_KUBERNETES"
"""If set, cluster tests fail instead of being skipped when something is missing."""

_users_here: Counter[Path] = Counter()
"""A module that imports the fixtures has its own instances; the last one waits for the end."""


@contextlib.contextmanager
def cluster_for_nodes(**options: bool) -> Iterator[KubeCluster]:
    """A control plane with a scheduler, for one module with real nodes."""
    if os.geteuid() != 0:
        pytest.skip("a real kubelet needs root")
    try:
        machine.check_programs()
        with KubeCluster(components=(CONTROLLER_MANAGER, SCHEDULER), **options) as made:
            yield made
    except BinariesMissingError as error:
        if os.environ.get(REQUIRE) and "PADDOCK_KUBE_ASSETS" not in os.environ:
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def kube_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterInfo]:
    """A control plane with Paddock's CRDs."""
    if given := os.environ.get("PADDOCK_TEST_KUBE"):
        info = ClusterInfo(**json.loads(Path(given).read_text()))
        install(info)
        yield info
        return
    try:
        directory_with(["etcd", "kube-apiserver", "kubectl", CONTROLLER_MANAGER], build=False)
    except BinariesMissingError as error:
        if os.environ.get(REQUIRE):
            pytest.fail(str(error))
        pytest.skip(str(error))
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # workers have subdirectories of the run's directory
    with shared(base / "kube") as info:
        yield info


@pytest.fixture
def kube_namespace(kube_cluster: ClusterInfo) -> Iterator[str]:
    """A namespace for one test."""
    name = f"test-{uuid.uuid4().hex[:10]}"
    kube_cluster.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    kube_cluster.request("DELETE", f"/api/v1/namespaces/{name}")


@contextlib.contextmanager
def shared(directory: Path) -> Iterator[ClusterInfo]:
    """Use the cluster of a directory; start its keeper if needed."""
    directory.mkdir(parents=True, exist_ok=True)
    description = directory / "cluster.json"
    with (directory / "users").open("w") as users:
        with (directory / "starting").open("w") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            # A stopping keeper holds this lock; afterwards a new one is started.
            fcntl.flock(users, fcntl.LOCK_SH)
            if not description.exists():
                _start_keeper(directory)
                _wait_for(description)
        info = ClusterInfo(**json.loads(description.read_text()))
        try:
            _users_here[directory] += 1
            yield info
        finally:
            _users_here[directory] -= 1
    if "PYTEST_XDIST_WORKER" not in os.environ and not _users_here[directory]:
        _wait_for_end(info.pid)


def _start_keeper(directory: Path) -> None:
    with (directory / "keeper.log").open("wb") as log:
        subprocess.run(
            # Detached: the keeper may outlive the worker that started it.
            ["setsid", "--fork", sys.executable, "-m", "tests.cluster.fixtures", str(directory)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=True,
        )


def _wait_for(description: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    failed = description.with_name("failed")
    while not description.exists():
        if failed.exists() or time.monotonic() > deadline:
            log = description.with_name("keeper.log").read_text()
            failed.unlink(missing_ok=True)
            raise RuntimeError(f"no cluster: {log}")
        time.sleep(0.05)


def _wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.05)


def keep(directory: Path) -> None:
    """Run a cluster as long as a worker holds the users' lock."""
    description = directory / "cluster.json"
    with KubeCluster() as cluster:
        draft = description.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(cluster.info)))
        draft.rename(description)
        with (directory / "users").open("w") as users:
            fcntl.flock(users, fcntl.LOCK_EX)
            description.unlink()
            cluster.stop()


if __name__ == "__main__":
    try:
        keep(Path(sys.argv[1]))
    except BaseException:
        (Path(sys.argv[1]) / "failed").touch()
        raise
