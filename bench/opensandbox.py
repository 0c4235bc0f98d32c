"""OpenSandbox's own server on podman's Docker-compatible socket, where both are installed.

What is measured is `POST /v1/sandboxes` to the answer that the sandbox runs: it is set against our
own create, which ends as early, never against a command's output. The daemon that it puts into
sandboxes comes as an image from a registry; a stand-in that only sleeps takes its place, which
costs it nothing. `scripts/install-rivals` installs the server; `OPENSANDBOX_SERVER` names another.

    python bench/opensandbox.py [COUNT]
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floors import AbsentError, image, program, rootfs, run
from rivals import private_mounts, removed_file, removed_group

if TYPE_CHECKING:
    from reporting import Report

_RUNTIME = """#!{python}
# podman's API gives every container limits that not every root may set.
import json, os, sys
given = sys.argv[1:]
if "--bundle" in given:
    path = given[given.index("--bundle") + 1] + "/config.json"
    spec = json.load(open(path))
    spec["process"]["rlimits"] = []
    json.dump(spec, open(path, "w"))
os.execvp("crun", ["crun", *given])
"""
_ENGINE = """
[engine]
runtime = "bench"
cgroup_manager = "cgroupfs"
lock_type = "file"
events_logger = "none"
[engine.runtimes]
bench = ["{home}/runtime"]
"""
_BLOBS = Path("/var/lib/containers/cache/blob-info-cache-v1.boltdb")
"""podman's import writes it, whatever the storage is."""
_GROUP = "libpod_parent"
"""podman's API offers no other control group."""
_SERVER = """
[server]
host = "127.0.0.1"
port = {port}
[runtime]
type = "docker"
execd_image = "localhost/base:latest"
[store]
type = "sqlite"
path = "{home}/server.db"
[docker]
network_mode = "host"
[ingress]
mode = "direct"
"""
_WANTED = {
    "image": {"uri": "localhost/base:latest"},
    "entrypoint": ["tail", "-f", "/dev/null"],
    "timeout": 600,
    "resourceLimits": {"cpu": "500m", "memory": "512Mi"},
}
NAME, EACH = "opensandbox_create", "opensandbox_each_ms"
SNAPSHOT, CLONE = "opensandbox_snapshot", "opensandbox_clone"


class Server:
    """A running server: creates, pauses, resumes and deletes sandboxes."""

    def __init__(self, port: int) -> None:
        self._port = port

    def create(self, snapshot: str | None = None) -> str:
        wanted = {**_WANTED, "snapshotId": snapshot}
        if snapshot is not None:
            del wanted["image"]
        made = self._ask("POST", "/v1/sandboxes", wanted)
        assert made["status"]["state"] == "Running", made
        return made["id"]

    def snapshot(self, sandbox: str) -> str:
        """Snapshot the files of a sandbox; return the snapshot's id when it is ready."""
        made = self._ask("POST", f"/v1/sandboxes/{sandbox}/snapshots", {})
        while made["status"]["state"] == "Creating":
            time.sleep(0.01)
            made = self._ask("GET", f"/v1/snapshots/{made['id']}")
        assert made["status"]["state"] == "Ready", made
        return made["id"]

    def delete_snapshot(self, snapshot: str) -> None:
        self._ask("DELETE", f"/v1/snapshots/{snapshot}")

    def delete(self, sandbox: str) -> None:
        self._ask("DELETE", f"/v1/sandboxes/{sandbox}")

    def pause(self, sandbox: str) -> None:
        self._ask("POST", f"/v1/sandboxes/{sandbox}/pause")

    def resume(self, sandbox: str) -> None:
        self._ask("POST", f"/v1/sandboxes/{sandbox}/resume")

    def answers(self) -> bool:
        try:
            self._ask("GET", "/health")
        except OSError:
            return False
        return True

    def _ask(self, method: str, path: str, body: object = None) -> dict:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"{}")


def measure(report: "Report", count: int) -> None:
    """Add its creates to a report, or why they are absent."""
    samples: list[float] = []
    try:
        with serving(report) as server:
            for _ in range(count):
                with report.trying(NAME):
                    began = time.perf_counter()
                    made = server.create()
                    samples.append(time.perf_counter() - began)
                    server.delete(made)
            report.spread(NAME, samples, failed=count - len(samples), is_ours=False)
    except AbsentError as error:
        report.absent(NAME, str(error))


def together(report: "Report", count: int) -> None:
    """Add the cost of each of many concurrent creates, until the last one runs."""
    try:
        with serving(report) as server, ThreadPoolExecutor(count) as pool:
            began = time.perf_counter()
            asked = [pool.submit(server.create) for _ in range(count)]
            made = [one.result() for one in asked if one.exception() is None]
            wall = time.perf_counter() - began
            for box in made:
                with report.trying("an end"):
                    server.delete(box)
    except AbsentError as error:
        report.absent(EACH, str(error))
        return
    if made:
        report.figure(EACH, wall / len(made) * 1e3, f"mean of {len(made)} at once")
        report.figure(f"opensandbox_{count}_success", len(made) / count, f"of {count}")
    else:
        report.absent(EACH, f"all of {count} at once failed: {asked[0].exception()!r}")


def snapshots(report: "Report", rounds: int) -> None:
    """Add snapshots of files, and creates from them."""
    stored: list[float] = []
    cloned: list[float] = []
    try:
        with serving(report) as server:
            box = server.create()
            for _ in range(rounds):
                with report.trying(SNAPSHOT):
                    began = time.perf_counter()
                    snapshot = server.snapshot(box)
                    stored.append(time.perf_counter() - began)
                    began = time.perf_counter()
                    clone = server.create(snapshot)
                    cloned.append(time.perf_counter() - began)
                    server.delete(clone)
                    server.delete_snapshot(snapshot)
            server.delete(box)
    except AbsentError as error:
        report.absent(SNAPSHOT, str(error))
        return
    for name, samples in ((SNAPSHOT, stored), (CLONE, cloned)):
        report.spread(name, samples, failed=rounds - len(samples), is_ours=False)


@contextlib.contextmanager
def serving(report: "Report | None" = None) -> Generator[Server]:
    """Start it on podman's socket; `AbsentError` if that is not possible."""
    server = program(os.environ.get("OPENSANDBOX_SERVER", "opensandbox-server"))
    if report is not None and report.is_quick:
        raise AbsentError("left out of a quick look: it takes half a minute to set up")
    for needed in ("podman", "crun", "iptables"):
        try:
            image(needed)
        except AbsentError as error:
            raise AbsentError(f"it needs {needed}: {error}") from None
    with contextlib.ExitStack() as stack:
        stack.enter_context(removed_group(_GROUP))
        stack.enter_context(removed_file(_BLOBS))
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paddock-opensandbox-")))
        try:
            inside = stack.enter_context(private_mounts(network=True))
            running = stack.enter_context(_running(home, server, inside))
            running.delete(running.create())  # The first one fills the cache.
        except (OSError, subprocess.CalledProcessError) as error:
            raise AbsentError(f"it does not run here: {error!r}") from error
        yield running


@contextlib.contextmanager
def _running(home: Path, server: str, inside: list[str]) -> Generator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (home / "runtime").write_text(_RUNTIME.format(python=sys.executable))
    (home / "runtime").chmod(0o755)
    (home / "containers.conf").write_text(_ENGINE.format(home=home))
    (home / "server.toml").write_text(_SERVER.format(home=home, port=port))
    environment = os.environ | {
        "CONTAINERS_CONF": str(home / "containers.conf"),
        "DOCKER_HOST": f"unix://{home}/podman.sock",
        "OPENSANDBOX_INSECURE_SERVER": "YES",
    }
    places = (("--root", "images"), ("--runroot", "run"), ("--tmpdir", "state"))
    podman = [*inside, "podman"]
    podman += [word for flag, name in places for word in (flag, f"{home}/{name}")]
    quiet = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started: list[subprocess.Popen[Any]] = []
    try:
        _images(home, podman, environment)
        service = [*podman, "system", "service", "-t", "0", f"unix://{home}/podman.sock"]
        started.append(subprocess.Popen(service, **quiet))
        _until((home / "podman.sock").exists)
        command = [server, "--config", str(home / "server.toml")]
        started.append(subprocess.Popen(command, **quiet))
        running = Server(port)
        _until(running.answers)
        yield running
    finally:
        for process in started[1:]:
            process.terminate()
            process.wait()
        run([*podman, "rm", "--all", "--force", "--time", "0"], environment)
        for process in started[:1]:
            process.terminate()
            process.wait()


def _images(home: Path, podman: list[str], environment: dict[str, str]) -> None:
    """Build one image from our base image and the stand-in for the daemon."""
    added, names = home / "added", ("execd", "bootstrap.sh")
    added.mkdir()
    (added / "execd").write_text("#!/bin/sh\nexec sleep 1000000\n")
    (added / "bootstrap.sh").write_text('#!/bin/sh\nexec "$@"\n')
    for name in names:
        (added / name).chmod(0o755)
    skipped = [f"--exclude=./{name}" for name in ("proc", "sys", "dev")]
    with subprocess.Popen(
        ["tar", *skipped, "-c", "-C", str(rootfs()), ".", "-C", str(added), *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as packed:
        made = [*podman, "import", "-q", "-", "localhost/base:latest"]
        subprocess.run(made, stdin=packed.stdout, env=environment, check=True, capture_output=True)


def _until(holds) -> None:
    end = time.monotonic() + 60
    while not holds():
        if time.monotonic() > end:
            raise OSError("it did not start within a minute")
        time.sleep(0.1)


if __name__ == "__main__":
    with serving() as started:
        for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 10):
            at = time.perf_counter()
            one = started.create()
            print(f"created in {(time.perf_counter() - at) * 1e3:.1f} ms")
            started.delete(one)
