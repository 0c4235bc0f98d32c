"""Pull and unpack an image from a registry on loopback: time, throughput, peak memory.

    python bench/images.py [--quick] [--megabytes 500]

Each round starts with an empty store and pulls an image of several layers, half of which can be
compressed. Beside it, in turns in the same run: `skopeo copy` and `umoci unpack`, which give a
directory with the same files. Both are timed as processes, from their start to their end. A round
of the whole image takes about 25 s; after some minutes no further one begins. Needs root,
docker-registry and skopeo.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from reporting import ROOT, Report

sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.runtime.local.images import builders  # noqa: E402
from tests.runtime.local.images.registry.servers import Registry, push, registry  # noqa: E402

LAYERS = 5
FILE_BYTES = 64 << 10
ROUNDS = 10
LEAST_ROUNDS = 3
SECONDS = 240
"""After this time no further round begins, unless they are too few."""
NAME = "images/bench:1"
PULL = """
import asyncio, json, re, sys
from pathlib import Path
from paddock.runtime.local.images.registry.puller import Puller
from paddock.runtime.local.images.registry.settings import RegistrySettings
from paddock.runtime.local.images.store import ImageStore
root = Path(sys.argv[1])
puller = Puller(ImageStore(root), root / "downloads", RegistrySettings())
asyncio.run(puller.pull(sys.argv[2], team=None))
status = Path("/proc/self/status").read_text()
print(json.dumps({"peak_kib": int(re.search(r"VmHWM:\\s+(\\d+)", status)[1])}))
"""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, default=500, help="unpacked size of the image")


def layers(megabytes: int) -> list[bytes]:
    """Return the tars of an image: files of one size, of random bytes and of text in turn."""
    source = random.Random(1)
    text = (b"the quick brown fox jumps over the lazy dog %d\n" % megabytes) * FILE_BYTES
    count = (megabytes << 20) // FILE_BYTES // LAYERS
    return [
        builders.tar(
            builders.directory(f"layer-{layer}"),
            *(
                builders.entry(
                    f"layer-{layer}/{number}",
                    source.randbytes(FILE_BYTES) if number % 2 else text[:FILE_BYTES],
                )
                for number in range(count)
            ),
        )
        for layer in range(LAYERS)
    ]


def ours(server: Registry, target: Path) -> tuple[float, float]:
    """Pull with Paddock; return the seconds and the peak memory in MB."""
    command = [sys.executable, "-c", PULL, str(target), f"{server.host}/{NAME}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return time.perf_counter() - began, json.loads(done.stdout)["peak_kib"] / 1000


def theirs(server: Registry, target: Path) -> float:
    """Copy with skopeo and unpack with umoci; return the seconds."""
    target.mkdir()
    image = f"{target / 'layout'}:bench"
    copy = ["skopeo", "--insecure-policy", "copy", "--quiet", "--src-tls-verify=false"]
    commands: Sequence[list[str]] = (
        [*copy, f"docker://{server.host}/{NAME}", f"oci:{image}"],
        ["umoci", "unpack", "--image", image, str(target / "bundle")],
    )
    began = time.perf_counter()
    for command in commands:
        subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def measure(report: Report, server: Registry, scratch: Path, rounds: int) -> None:
    has_rival = shutil.which("umoci") is not None
    if not has_rival:
        report.absent("skopeo_umoci", "umoci is not installed: scripts/install-rivals")
    pulls: list[float] = []
    peaks: list[float] = []
    copies: list[float] = []
    tried, began = 0, time.monotonic()
    for number in range(rounds):
        if number >= LEAST_ROUNDS and time.monotonic() - began > SECONDS:
            report.note(f"{number} of {rounds} rounds after {SECONDS} s: no further one begins")
            break
        tried += 1
        target = scratch / f"round-{number}"
        with report.trying("a pull"):
            seconds, peak = ours(server, target)
            pulls.append(seconds)
            peaks.append(peak)
        shutil.rmtree(target, ignore_errors=True)
        if has_rival:
            with report.trying("skopeo and umoci"):
                copies.append(theirs(server, target))
            shutil.rmtree(target, ignore_errors=True)
    report.spread("pull_and_unpack", pulls, failed=tried - len(pulls))
    if has_rival:
        failed = tried - len(copies)
        report.spread("skopeo_umoci", copies, failed=failed, is_ours=False)
    if peaks:
        report.figure("peak_memory_mb", max(peaks), f"largest of {len(peaks)}")
    # Throughput: their time divided by ours.
    report.ratio("throughput_to_skopeo_umoci", "skopeo_umoci", "pull_and_unpack")


def main() -> None:
    report = Report("images", __doc__, options)
    megabytes = min(report.given.megabytes, 100) if report.is_quick else report.given.megabytes
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        layout = builders.oci_layout(scratch / "layout", layers(megabytes))
        report.note("the image is made")
        report.figure("image_mb", megabytes)
        with registry(scratch / "registry") as server:
            push(layout, server, NAME)
            measure(report, server, scratch, LEAST_ROUNDS if report.is_quick else ROUNDS)
    report.finish()


if __name__ == "__main__":
    main()
