"""A registry cannot make the puller reach, store or reveal what it should not."""

import asyncio
import contextlib
import gzip
import hashlib
import json
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from paddock.kit.errors import (
    ForbiddenError,
    InvalidError,
    NotFoundError,
    RateLimitedError,
    UnavailableError,
    UnsupportedError,
)
from paddock.runtime.local.images import limits
from paddock.runtime.local.images.registry import download
from paddock.runtime.local.images.registry.guard import is_private
from paddock.runtime.local.images.registry.settings import RegistrySettings
from paddock.runtime.local.images.store import ImageStore
from paddock.runtime.port import RegistryCredentials
from tests.ports import free_ports
from tests.runtime.local.images import builders
from tests.runtime.local.images.registry.conftest import LAYERS, MakePuller

Handler = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]
SECRET = RegistryCredentials(username="alice", password="never tell")


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Misbehaving:
    """A registry with one image, which handles requests for its layers as a test wants."""

    def __init__(self) -> None:
        self.port, self.other_port = free_ports(2)
        self.layers = [gzip.compress(layer) for layer in LAYERS]
        self.config = builders.config_blob(LAYERS)
        self.layer_type = "application/vnd.oci.image.layer.v1.tar+gzip"
        self.on_blob: Handler | None = None
        self.on_manifest: Handler | None = None
        self.on_other: Handler | None = None
        self.seen: list[tuple[int, str, dict[str, str]]] = []
        self.sizes: dict[int, int] = {}

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}/app:1"

    @property
    def manifest(self) -> bytes:
        layers = [
            {
                "digest": _digest(layer),
                "size": self.sizes.get(number, len(layer)),
                "mediaType": self.layer_type,
            }
            for number, layer in enumerate(self.layers)
        ]
        config = {"digest": _digest(self.config), "size": len(self.config)}
        return json.dumps({"schemaVersion": 2, "config": config, "layers": layers}).encode()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        port = request.transport.get_extra_info("sockname")[1]  # type: ignore[union-attr]
        self.seen.append((port, request.path, dict(request.headers)))
        if port == self.other_port:
            assert self.on_other is not None
            return await self.on_other(request, b"")
        if "/manifests/" in request.path:
            if self.on_manifest is not None:
                return await self.on_manifest(request, self.manifest)
            return web.Response(body=self.manifest)
        blobs = {_digest(data): data for data in (self.config, *self.layers)}
        data = blobs[request.path.rpartition("/")[2]]
        if data is not self.config and self.on_blob is not None:
            return await self.on_blob(request, data)
        return web.Response(body=data)


@pytest.fixture
async def bad() -> AsyncGenerator[Misbehaving]:
    registry = Misbehaving()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", registry.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    for port in (registry.port, registry.other_port):
        await web.TCPSite(runner, "127.0.0.1", port).start()
    yield registry
    await runner.cleanup()


def _nothing_is_left(store: ImageStore, directory: Path) -> None:
    assert store.images() == () or all("127.0.0.1" not in one.name for one in store.images())
    store.collect()
    layers = list((directory / "images/layers").iterdir())
    assert layers == []


def _sizes_of_parts(directory: Path) -> list[int]:
    """Return the sizes of interrupted downloads."""
    found = [0]
    for part in (directory / "downloads").rglob("*.part"):
        with contextlib.suppress(FileNotFoundError):
            found.append(part.stat().st_size)
    return found


async def test_an_interrupted_download_continues_where_it_stopped(
    bad: Misbehaving, make_puller: MakePuller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(download, "_BACKOFF_SECONDS", (0.0,))
    bad.layers[0] = gzip.compress(LAYERS[0], 0) + gzip.compress(b"\0" * 400_000, 0)
    padded = LAYERS[0] + b"\0" * 400_000
    bad.config = builders.config_blob((padded, LAYERS[1]))
    ranges: list[str | None] = []

    async def cut(request: web.Request, data: bytes) -> web.StreamResponse:
        if data is bad.layers[1]:
            return web.Response(body=data)
        ranges.append(request.headers.get("Range"))
        start = int((request.headers.get("Range") or "bytes=0-")[6:-1])
        response = web.StreamResponse(status=206 if start else 200)
        response.content_length = len(data) - start
        if start:
            response.headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        await response.prepare(request)
        await response.write(data[start : start + 150_000])
        if start + 150_000 < len(data):
            assert request.transport is not None
            while max(_sizes_of_parts(tmp_path)) < start + 150_000:
                await asyncio.sleep(0.01)
            request.transport.close()
        return response

    bad.on_blob = cut
    assert (await make_puller().pull(bad.name, team="t")).is_new
    assert ranges[0] is None
    assert len(ranges) == 3
    assert ranges[1:] == ["bytes=150000-", "bytes=300000-"]


async def test_a_server_without_ranges_is_read_from_the_start_again(
    bad: Misbehaving, make_puller: MakePuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_BACKOFF_SECONDS", (0.0,))
    attempts = 0

    async def cut_once(request: web.Request, data: bytes) -> web.StreamResponse:
        nonlocal attempts
        attempts += 1
        response = web.StreamResponse()
        response.content_length = len(data)
        await response.prepare(request)
        await response.write(data[:20] if attempts == 1 else data)
        if attempts == 1:
            assert request.transport is not None
            request.transport.close()
        return response

    bad.on_blob = cut_once
    assert (await make_puller().pull(bad.name, team="t")).is_new


async def test_a_download_that_never_gets_further_fails(
    bad: Misbehaving,
    store: ImageStore,
    make_puller: MakePuller,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(download, "_BACKOFF_SECONDS", (0.0,))

    async def short(_: web.Request, data: bytes) -> web.StreamResponse:
        return web.Response(body=data[:10])

    bad.on_blob = short
    with pytest.raises(UnavailableError, match="interrupted"):
        await make_puller().pull(bad.name, team="t")
    _nothing_is_left(store, tmp_path)


async def test_a_layer_with_another_digest_is_refused(
    bad: Misbehaving, store: ImageStore, make_puller: MakePuller, tmp_path: Path
) -> None:
    async def other(_: web.Request, data: bytes) -> web.StreamResponse:
        return web.Response(body=bytes(len(data)))

    bad.on_blob = other
    with pytest.raises(InvalidError, match="instead of sha256"):
        await make_puller().pull(bad.name, team="t")
    _nothing_is_left(store, tmp_path)
    assert not list((tmp_path / "downloads").glob("*.part"))


async def test_a_layer_whose_content_is_not_that_of_the_config_is_refused(
    bad: Misbehaving, store: ImageStore, make_puller: MakePuller, tmp_path: Path
) -> None:
    bad.config = builders.config_blob((LAYERS[0], builders.tar(builders.entry("x", b"x"))))
    with pytest.raises(InvalidError, match="damaged"):
        await make_puller().pull(bad.name, team="t")
    _nothing_is_left(store, tmp_path)


async def test_a_download_that_a_power_failure_has_damaged_is_downloaded_again(
    bad: Misbehaving, make_puller: MakePuller, tmp_path: Path
) -> None:
    async def missing(_: web.Request, data: bytes) -> web.StreamResponse:
        return web.Response(status=404)

    bad.on_blob = missing
    with pytest.raises(NotFoundError):
        await make_puller().pull(bad.name, team="t")
    [scope] = (tmp_path / "downloads").iterdir()
    for layer, damaged in zip(bad.layers, (bytes(len(bad.layers[0])), b""), strict=True):
        (scope / _digest(layer).removeprefix("sha256:")).write_bytes(damaged)
    bad.on_blob = None
    with pytest.raises(InvalidError):
        await make_puller().pull(bad.name, team="t")
    assert (await make_puller().pull(bad.name, team="t")).is_new


async def test_a_lock_that_is_held_is_not_removed(tmp_path: Path) -> None:
    """Or another download would lock a new file of that name, and write the same blob."""
    downloads = download.DownloadDirectory(tmp_path)
    held, free = "sha256:" + "1" * 64, "sha256:" + "2" * 64
    async with downloads.locked(held):
        for digest in (held, free):
            for suffix in (".lock", ".part"):
                path = downloads.path(digest).with_suffix(suffix)
                path.touch()
                os.utime(path, (1.0, 1.0))
        download.remove_old(tmp_path)
        left = sorted(path.name[:1] + path.suffix for path in tmp_path.iterdir())
        assert left[:2] == ["1.lock", "1.part"]
        assert "2.part" not in left


async def test_who_waits_for_a_lock_that_is_removed_takes_the_new_one(tmp_path: Path) -> None:
    downloads = download.DownloadDirectory(tmp_path)
    digest = "sha256:" + "1" * 64
    lock = downloads.path(digest).with_suffix(".lock")

    async def hold() -> None:
        async with downloads.locked(digest):
            assert lock.exists()

    async with downloads.locked(digest):
        waiting = asyncio.create_task(hold())
        await asyncio.sleep(0)
        lock.unlink()
    await waiting


async def test_an_endless_layer_ends_at_its_size(
    bad: Misbehaving, store: ImageStore, make_puller: MakePuller, tmp_path: Path
) -> None:
    async def endless(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(bytes(100_000))
        return response

    bad.on_blob = endless
    with pytest.raises(InvalidError, match="sent more than"):
        await make_puller().pull(bad.name, team="t")
    _nothing_is_left(store, tmp_path)


async def test_the_ratio_of_a_pull_counts_what_is_downloaded_not_what_the_manifest_says(
    bad: Misbehaving, make_puller: MakePuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer is stored already: nobody checks how large the manifest says it is."""
    monkeypatch.setattr(limits, "_RATIO_FROM_BYTES", 1 << 20)
    puller = make_puller()
    bad.layers, bad.config = bad.layers[:1], builders.config_blob(LAYERS[:1])
    await puller.pull(bad.name, team="t")
    zeros = builders.tar(builders.entry("zeros", bytes(4 << 20)))
    bad.layers = [bad.layers[0], gzip.compress(zeros)]
    bad.sizes = {0: 1 << 40}
    bad.config = builders.config_blob((LAYERS[0], zeros))
    with pytest.raises(InvalidError, match="more than 200 bytes per byte"):
        await puller.pull(bad.name, team="t")


async def test_an_endless_manifest_is_refused(bad: Misbehaving, make_puller: MakePuller) -> None:
    async def endless(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(bytes(100_000))
        return response

    bad.on_manifest = endless
    with pytest.raises(InvalidError, match="sent more than"):
        await make_puller().pull(bad.name, team="t")


async def test_a_manifest_by_digest_is_verified(bad: Misbehaving, make_puller: MakePuller) -> None:
    with pytest.raises(InvalidError, match="instead of sha256:0000"):
        await make_puller().pull(f"127.0.0.1:{bad.port}/app@sha256:{'0' * 64}", team="t")


async def test_credentials_are_not_sent_to_the_target_of_a_redirect(
    bad: Misbehaving, make_puller: MakePuller
) -> None:
    async def redirect(request: web.Request, _: bytes) -> web.StreamResponse:
        if "Authorization" not in request.headers:
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="x"'})
        raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{bad.other_port}{request.path}")

    async def serve(request: web.Request, _: bytes) -> web.StreamResponse:
        digest = request.path.rpartition("/")[2]
        return web.Response(body={_digest(layer): layer for layer in bad.layers}[digest])

    bad.on_blob, bad.on_other = redirect, serve
    assert (await make_puller().pull(bad.name, credentials=SECRET, team="t")).is_new
    sent = [headers for port, _, headers in bad.seen if port == bad.other_port]
    assert len(sent) == 2
    assert not any("Authorization" in headers for headers in sent)


@pytest.mark.parametrize(
    "target",
    [
        *("http://169.254.169.254/latest/meta-data", "https://169.254.169.254/latest"),
        *("https://10.0.0.1/x", "https://[::ffff:10.0.0.1]/x", "https://[fd00::1]/x"),
        *("file:///etc/passwd", "https://localhost/x"),
    ],
)
async def test_a_redirect_to_a_private_address_is_refused(
    bad: Misbehaving, store: ImageStore, make_puller: MakePuller, tmp_path: Path, target: str
) -> None:
    async def redirect(_: web.Request, data: bytes) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": target})

    bad.on_blob = redirect
    settings = RegistrySettings(private=frozenset({f"127.0.0.1:{bad.port}"}))
    with pytest.raises((ForbiddenError, InvalidError), match=r"private|TLS|redirects to"):
        await make_puller(settings).pull(bad.name, team="t")
    _nothing_is_left(store, tmp_path)
    files = [path for path in (tmp_path / "downloads").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) == 0


async def test_redirects_are_bounded(bad: Misbehaving, make_puller: MakePuller) -> None:
    async def redirect(request: web.Request, _: bytes) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect(request.path)

    bad.on_blob = redirect
    with pytest.raises(UnavailableError, match="redirects too often"):
        await make_puller().pull(bad.name, team="t")


async def test_a_registry_with_a_private_address_is_refused_unless_it_is_listed(
    bad: Misbehaving, make_puller: MakePuller
) -> None:
    for name in (bad.name, bad.name.replace("127.0.0.1", "localhost")):
        with pytest.raises(ForbiddenError, match="private address"):
            await make_puller(RegistrySettings()).pull(name, team="t")
    assert bad.seen == []


async def test_credentials_of_the_operators_netrc_are_never_sent(
    bad: Misbehaving, make_puller: MakePuller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login operator password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    await make_puller().pull(bad.name, team="t")
    assert bad.seen
    assert not any("Authorization" in headers for _, _, headers in bad.seen)


def _use_proxy(bad: Misbehaving, monkeypatch: pytest.MonkeyPatch, *, exceptions: str = "") -> None:
    """Set the proxy of the environment to one that answers as the registry does."""

    async def answer(request: web.Request, _: bytes) -> web.StreamResponse:
        if "/manifests/" in request.path:
            return web.Response(body=bad.manifest)
        blobs = {_digest(data): data for data in (bad.config, *bad.layers)}
        return web.Response(body=blobs[request.path.rpartition("/")[2]])

    bad.on_other = answer
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://localhost:{bad.other_port}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, exceptions)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "nowhere.localhost.invalid"])
async def test_a_proxy_is_not_asked_for_a_private_address(
    bad: Misbehaving, make_puller: MakePuller, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    _use_proxy(bad, monkeypatch)
    name = bad.name.replace("127.0.0.1", host)
    settings = RegistrySettings(insecure=frozenset({name.partition("/")[0]}))
    with pytest.raises(ForbiddenError, match=r"private address|cannot be resolved here"):
        await make_puller(settings).pull(name, team="t")
    assert bad.seen == []


async def test_a_host_without_a_proxy_is_checked_also_if_it_is_the_proxy(
    bad: Misbehaving, make_puller: MakePuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use_proxy(bad, monkeypatch, exceptions="localhost")
    with pytest.raises(ForbiddenError, match="private address"):
        await make_puller(RegistrySettings()).pull(f"localhost:{bad.other_port}/app:1", team="t")
    assert bad.seen == []


@pytest.mark.parametrize(("exceptions", "is_direct"), [("", False), ("127.0.0.1", True)])
async def test_pulls_use_the_proxy_of_the_environment_and_its_exceptions(
    bad: Misbehaving,
    make_puller: MakePuller,
    monkeypatch: pytest.MonkeyPatch,
    exceptions: str,
    is_direct: bool,
) -> None:
    _use_proxy(bad, monkeypatch, exceptions=exceptions)
    settings = RegistrySettings(private=frozenset({f"127.0.0.1:{bad.port}"}))
    assert (await make_puller(settings).pull(bad.name, team="t")).is_new
    assert {port for port, _, _ in bad.seen} == {bad.port if is_direct else bad.other_port}


async def test_operators_pull_names_that_only_their_proxy_resolves(
    bad: Misbehaving, make_puller: MakePuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use_proxy(bad, monkeypatch)
    settings = RegistrySettings(insecure=frozenset({"only-the-proxy.invalid"}))
    assert (await make_puller(settings).pull("only-the-proxy.invalid/app:1", team=None)).is_new


async def test_a_token_server_with_a_private_address_is_refused(
    bad: Misbehaving, make_puller: MakePuller
) -> None:
    async def challenge(_: web.Request, data: bytes) -> web.StreamResponse:
        realm = 'Bearer realm="https://169.254.169.254/token",service="x"'
        return web.Response(status=401, headers={"WWW-Authenticate": realm})

    bad.on_manifest = challenge
    settings = RegistrySettings(private=frozenset({f"127.0.0.1:{bad.port}"}))
    with pytest.raises(ForbiddenError, match="private address"):
        await make_puller(settings).pull(bad.name, credentials=SECRET, team="t")


async def test_a_token_server_without_tls_gets_no_credentials(
    bad: Misbehaving, make_puller: MakePuller
) -> None:
    async def challenge(_: web.Request, data: bytes) -> web.StreamResponse:
        realm = 'Bearer realm="http://tokens.example/token",service="x"'
        return web.Response(status=401, headers={"WWW-Authenticate": realm})

    bad.on_manifest = challenge
    with pytest.raises(ForbiddenError, match="without TLS"):
        await make_puller().pull(bad.name, credentials=SECRET, team="t")


async def test_the_limit_of_a_registry_is_reported_with_its_time(
    bad: Misbehaving, make_puller: MakePuller
) -> None:
    async def limited(_: web.Request, data: bytes) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": "17"})

    bad.on_manifest = limited
    with pytest.raises(RateLimitedError) as caught:
        await make_puller().pull(bad.name, team="t")
    assert caught.value.retry_after_seconds == 17


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"schemaVersion": 1}, UnsupportedError, "schema version 1"),
        ({"layers": []}, InvalidError, "not that of an image"),
        ({"layers": [{"digest": "md5:00", "size": 1}]}, InvalidError, "malformed digest"),
        ({"layers": [{"digest": "sha256:../../x", "size": 1}]}, InvalidError, "malformed digest"),
        (
            {"layers": [{"digest": "sha256:" + "a" * 64, "size": -1}]},
            InvalidError,
            "negative size",
        ),
        ({"config": 7}, InvalidError, "cannot be read"),
    ],
)
async def test_a_malformed_manifest_is_refused(
    bad: Misbehaving, make_puller: MakePuller, change: dict, error: type[Exception], text: str
) -> None:
    async def malformed(_: web.Request, data: bytes) -> web.StreamResponse:
        return web.json_response({**json.loads(data), **change})

    bad.on_manifest = malformed
    with pytest.raises(error, match=text):
        await make_puller().pull(bad.name, team="t")


@pytest.mark.parametrize(
    "media_type",
    [
        "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
        "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
        "application/vnd.cncf.helm.chart.content.v1",
    ],
)
async def test_layers_that_are_no_files_of_the_registry_are_refused(
    bad: Misbehaving, make_puller: MakePuller, media_type: str
) -> None:
    bad.layer_type = media_type
    with pytest.raises(UnsupportedError, match="a layer of"):
        await make_puller().pull(bad.name, team="t")


async def test_an_image_larger_than_the_disk_is_refused_before_the_download(
    bad: Misbehaving, make_puller: MakePuller
) -> None:
    bad.sizes[0] = 1 << 60
    with pytest.raises(UnavailableError, match="MiB left"):
        await make_puller().pull(bad.name, team="t")
    config = _digest(bad.config)
    assert [path for _, path, _ in bad.seen if "/blobs/" in path and config not in path] == []


async def test_a_pull_that_is_cancelled_leaves_no_image_and_no_layer(
    bad: Misbehaving, store: ImageStore, make_puller: MakePuller, tmp_path: Path
) -> None:
    is_there, go_on = asyncio.Event(), asyncio.Event()

    async def slow(_: web.Request, data: bytes) -> web.StreamResponse:
        if data is bad.layers[1]:
            is_there.set()
            await go_on.wait()
        return web.Response(body=data)

    bad.on_blob = slow
    task = asyncio.create_task(make_puller().pull(bad.name, team="t"))
    await is_there.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    _nothing_is_left(store, tmp_path)
    bad.on_blob = None
    assert (await make_puller().pull(bad.name, team="t")).is_new


async def test_a_pull_that_is_killed_leaves_no_image_and_no_layer_and_continues(
    bad: Misbehaving, store: ImageStore, make_puller: MakePuller, tmp_path: Path
) -> None:
    bad.layers[1] = gzip.compress(LAYERS[1], 0) + gzip.compress(b"\0" * 400_000, 0)
    bad.config = builders.config_blob((LAYERS[0], LAYERS[1] + b"\0" * 400_000))
    go_on = asyncio.Event()
    ranges: list[str | None] = []

    async def stuck(request: web.Request, data: bytes) -> web.StreamResponse:
        if data is not bad.layers[1]:
            return web.Response(body=data)
        ranges.append(request.headers.get("Range"))
        start = int((ranges[-1] or "bytes=0-")[6:-1])
        response = web.StreamResponse(status=206 if start else 200)
        response.content_length = len(data) - start
        if start:
            response.headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        await response.prepare(request)
        await response.write(data[start : start + 150_000])
        await go_on.wait()
        await response.write(data[start + 150_000 :])
        return response

    bad.on_blob = stuck
    program = (
        "import asyncio, pathlib, sys\n"
        "from paddock.runtime.local.images.registry.puller import Puller\n"
        "from paddock.runtime.local.images.registry.settings import RegistrySettings\n"
        "from paddock.runtime.local.images.store import ImageStore\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "store = ImageStore(root / 'images')\n"
        "puller = Puller(store, root / 'downloads', RegistrySettings(private=frozenset('*')))\n"
        "asyncio.run(puller.pull(sys.argv[2], team='t'))\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(tmp_path), bad.name
    )

    def is_halfway() -> bool:
        parts = (tmp_path / "downloads").rglob("*.part")
        layers = (tmp_path / "images/layers").glob("sha256-*")
        return any(part.stat().st_size >= 150_000 for part in parts) and any(layers)

    async with asyncio.timeout(60):
        while not is_halfway():
            assert process.returncode is None
            await asyncio.sleep(0.02)
    process.kill()
    await process.wait()
    go_on.set()
    assert "127.0.0.1" not in str([image.name for image in store.images()])
    assert store.collect()
    _nothing_is_left(store, tmp_path)
    assert (await make_puller().pull(bad.name, team="t")).is_new
    assert ranges == [None, "bytes=150000-"]


async def test_a_missing_image_of_a_mirror_comes_from_the_registry(
    bad: Misbehaving, make_puller: MakePuller
) -> None:
    async def missing(_: web.Request, data: bytes) -> web.StreamResponse:
        return web.Response(status=404)

    bad.on_other = missing
    host = f"127.0.0.1:{bad.port}"
    settings = RegistrySettings(
        mirrors={host: (f"http://127.0.0.1:{bad.other_port}",)}, private=frozenset({"*"})
    )
    pulled = await make_puller(settings).pull(bad.name, credentials=SECRET, team="t")
    assert pulled.is_new
    mirrored = [headers for port, _, headers in bad.seen if port == bad.other_port]
    assert mirrored
    assert not any("Authorization" in headers for headers in mirrored)
    bad.on_manifest = missing
    with pytest.raises(NotFoundError):
        await make_puller(settings).pull(bad.name.replace("app", "other"), team="t")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *((one, True) for one in ("10.1.2.3", "127.0.0.1", "169.254.169.254", "100.64.0.1")),
        *((one, True) for one in ("::1", "fe80::1", "fd00::1", "::ffff:10.0.0.1", "0.0.0.0")),
        *((one, True) for one in ("64:ff9b::a00:1", "2002:a00:1::1", "224.0.0.1", "fe80::1%2")),
        *((one, False) for one in ("8.8.8.8", "2606:4700::1111", "64:ff9b::808:808")),
    ],
)
def test_private_addresses_in_every_form(address: str, expected: bool) -> None:
    assert is_private(address) is expected
