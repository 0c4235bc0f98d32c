"""An image whose layer has more than 1 GB, made in seconds, and a process of its own that pulls it.

Most of the layer is zeros, compressed once and repeated as members of the gzip file; the rest is
stored as it is, so that more than 200 MB are downloaded.
"""

import asyncio
import gzip
import hashlib
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from paddock.runtime.local.images.registry.puller import Puller
from paddock.runtime.local.images.registry.settings import ANY_HOST, RegistrySettings
from paddock.runtime.local.images.store import ImageStore

MIB = 1 << 20
ZEROS_MIB, NOISE_MIB = 752, 208
_PIECE = 16 * MIB


def write_layout(target: Path) -> Path:
    """Write the OCI layout of the image."""
    blobs = target / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    plain, packed = hashlib.sha256(), hashlib.sha256()
    with (blobs / "layer").open("wb") as file:
        for data, member in _members():
            plain.update(data)
            packed.update(member)
            file.write(member)
    (blobs / "layer").rename(blobs / packed.hexdigest())
    config = {
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{plain.hexdigest()}"]},
    }
    layer = _descriptor(blobs / packed.hexdigest(), "layer.v1.tar+gzip")
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": _put(blobs, config, "config.v1+json"),
        "layers": [layer],
    }
    index = {"schemaVersion": 2, "manifests": [_put(blobs, manifest, "manifest.v1+json")]}
    (target / "index.json").write_text(json.dumps(index))
    (target / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return target


def peak_of_a_pull(reference: str, directory: Path) -> int:
    """Pull in a new process, and return the most memory it had, in bytes."""
    command = [sys.executable, "-m", __name__, reference, str(directory)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    return int(done.stdout)


def _members() -> Iterator[tuple[bytes, bytes]]:
    """Yield pieces of the tar, each with its member of the gzip file."""
    zeros = bytes(_PIECE)
    packed = gzip.compress(zeros, 1)
    yield _stored(_header("zeros", ZEROS_MIB * MIB))
    for _ in range(ZEROS_MIB * MIB // _PIECE):
        yield zeros, packed
    noise = hashlib.shake_256(b"noise").digest(MIB) * (_PIECE // MIB)
    stored = gzip.compress(noise, 0)
    yield _stored(_header("noise", NOISE_MIB * MIB))
    for _ in range(NOISE_MIB * MIB // _PIECE):
        yield noise, stored
    yield _stored(bytes(2 * tarfile.BLOCKSIZE))


def _stored(data: bytes) -> tuple[bytes, bytes]:
    return data, gzip.compress(data, 0)


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf()


def _put(blobs: Path, document: object, kind: str) -> dict[str, object]:
    data = json.dumps(document).encode()
    path = blobs / hashlib.sha256(data).hexdigest()
    path.write_bytes(data)
    return _descriptor(path, kind)


def _descriptor(path: Path, kind: str) -> dict[str, object]:
    media_type = f"application/vnd.oci.image.{kind}"
    return {"digest": f"sha256:{path.name}", "size": path.stat().st_size, "mediaType": media_type}


async def _pull(reference: str, directory: Path) -> None:
    store = ImageStore(directory / "images")
    settings = RegistrySettings(private=frozenset({ANY_HOST}))
    await Puller(store, directory / "downloads", settings).pull(reference, team="t")


if __name__ == "__main__":
    asyncio.run(_pull(sys.argv[1], Path(sys.argv[2])))
    [peak] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(int(peak) << 10)
