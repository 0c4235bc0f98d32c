"""Builders of images in the formats of other tools."""

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def entry(
    name: str,
    data: bytes = b"",
    *,
    kind: bytes = tarfile.REGTYPE,
    link: str = "",
    mode: int = 0o644,
    uid: int = 0,
    xattrs: dict[str, str] | None = None,
) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.size = len(data)
    member.linkname = link
    member.mode = mode
    member.uid = member.gid = uid
    member.mtime = 1_700_000_000
    member.pax_headers = {f"SCHILY.xattr.{key}": value for key, value in (xattrs or {}).items()}
    return member, data


def directory(name: str, *, mode: int = 0o755, uid: int = 0) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, kind=tarfile.DIRTYPE, mode=mode, uid=uid)


def tar(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, data in entries:
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


CONFIG = {
    "Env": ["PATH=/usr/bin:/bin", "EMPTY=", "TWO=a=b"],
    "User": "1000",
    "WorkingDir": "/srv",
    "Cmd": ["run", "me"],
}


def config_blob(
    layers: Sequence[bytes],
    config: Mapping[str, object] = CONFIG,
    platform: Mapping[str, str] | None = None,
) -> bytes:
    diff_ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    document = {
        **(platform or {"architecture": "amd64", "os": "linux"}),
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }
    return json.dumps(document).encode()


def oci_layout(
    target: Path,
    layers: Sequence[bytes],
    *,
    name: str | None = "app:1",
    zstd: bool = False,
    config: Mapping[str, object] = CONFIG,
    platform: Mapping[str, str] | None = None,
) -> Path:
    """Write an OCI layout with compressed layers; the platform is linux/amd64 by default."""
    blobs = target / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        media_type = f"application/vnd.oci.image.{kind}"
        return {"digest": f"sha256:{digest}", "size": len(data), "mediaType": media_type}

    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": put(config_blob(layers, config, platform), "config.v1+json"),
        "layers": [
            put(_zstd(layer), "layer.v1.tar+zstd")
            if zstd
            else put(gzip.compress(layer), "layer.v1.tar+gzip")
            for layer in layers
        ],
    }
    descriptor = put(json.dumps(manifest).encode(), "manifest.v1+json")
    if name:
        descriptor["annotations"] = {"org.opencontainers.image.ref.name": name}
    (target / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (target / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [descriptor]}))
    return target


def _zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-c"], input=data, capture_output=True, check=True).stdout


def tar_of(directory_: Path, target: Path) -> Path:
    with tarfile.open(target, "w") as archive:
        archive.add(directory_, arcname=".")
    return target


def docker_save(target: Path, layers: Sequence[bytes], *, tags: Sequence[str]) -> Path:
    """Write an archive as `docker save` does, equal layers linked to each other."""
    config = config_blob(layers)
    entries = [entry("config.json", config)]
    names: list[str] = []
    first: dict[bytes, str] = {}
    for number, layer in enumerate(layers):
        name = f"{number:064d}/layer.tar"
        names.append(name)
        if layer in first:
            entries.append(entry(name, kind=tarfile.SYMTYPE, link=f"../{first[layer]}"))
        else:
            first[layer] = name
            entries.append(entry(name, layer))
    manifest = [{"Config": "config.json", "RepoTags": list(tags), "Layers": names}]
    entries.append(entry("manifest.json", json.dumps(manifest).encode()))
    target.write_bytes(tar(*entries))
    return target
