"""Stored images are pushed to a real registry; other tools and stores get the same content."""

import asyncio
import json
import os
import resource
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from paddock.kit.errors import (
    DiskFullError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    PaddockError,
    UnavailableError,
    UnsupportedError,
)
from paddock.runtime.local.images.registry import pusher as pusher_module
from paddock.runtime.local.images.registry.puller import LayerProgress, Puller
from paddock.runtime.local.images.registry.pusher import Pusher
from paddock.runtime.local.images.registry.settings import ANY_HOST, RegistrySettings
from paddock.runtime.local.images.store import ImageStore
from tests.ports import free_port
from tests.runtime.local.images import builders
from tests.runtime.local.images.registry.servers import (
    PASSWORD,
    USER,
    Registry,
    TokenServer,
    basic_auth,
    registry,
    write_config,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners are set, which needs root")

ANYWHERE = RegistrySettings(private=frozenset({ANY_HOST}))
LOWER = builders.tar(
    builders.directory("bin"),
    builders.entry("bin/sh", b"shell", mode=0o4755),
    builders.entry("bin/bash", kind=b"1", link="bin/sh"),
    builders.directory("home/user", mode=0o700, uid=1000),
    builders.entry("home/user/ü", b"x", uid=1000, xattrs={"user.note": "kept"}),
    builders.directory("tmp", mode=0o1777),
    builders.directory("opt/old"),
    builders.entry("opt/old/a", b"a"),
)
UPPER = builders.tar(
    builders.entry("etc/motd", b"hello"),
    builders.entry("bin/.wh.bash"),
    builders.entry("opt/old/.wh..wh..opq"),
    builders.entry("opt/old/b", b"b"),
    builders.entry("etc/link", kind=b"2", link="/etc/motd"),
    builders.entry("run/pipe", kind=b"6"),
)
MakePusher = Callable[..., Pusher]


@pytest.fixture
def make_pusher(store: ImageStore, tmp_path: Path) -> MakePusher:
    """Return a function that creates a pusher of the store."""

    def make(settings: RegistrySettings = ANYWHERE) -> Pusher:
        return Pusher(store, tmp_path / "downloads", settings)

    return make


@pytest.fixture
def stored(store: ImageStore, tmp_path: Path) -> str:
    """Import an image with everything that layers can have; return its name."""
    layout = builders.oci_layout(tmp_path / "layout", (LOWER, UPPER))
    return store.add(layout, "tools").name


async def test_an_image_that_was_pushed_is_pulled_with_the_same_content(
    server: Registry, store: ImageStore, make_pusher: MakePusher, stored: str, tmp_path: Path
) -> None:
    pushed = await make_pusher().push(stored, f"{server.host}/pushed:1")
    other = ImageStore(tmp_path / "other")
    pulled = await Puller(other, tmp_path / "d", ANYWHERE).pull(pushed.name, team="t")
    assert pulled.digest == pushed.digest
    original = store.resolve(stored)
    assert pulled.image.config == original.config
    assert [_tree(path) for path in pulled.image.layers] == [
        _tree(path) for path in original.layers
    ]
    assert "bin/bash" in _tree(original.layers[0])


async def test_other_tools_read_what_was_pushed(
    server: Registry, store: ImageStore, make_pusher: MakePusher, stored: str, tmp_path: Path
) -> None:
    pushed = await make_pusher().push(stored, f"{server.host}/skopeo:1")
    found = json.loads(_skopeo("inspect", "--tls-verify=false", f"docker://{pushed.name}"))
    assert found["Digest"] == pushed.digest
    assert found["Env"] == ["PATH=/usr/bin:/bin", "EMPTY=", "TWO=a=b"]
    assert (found["Os"], len(found["Layers"])) == ("linux", 2)
    _skopeo(
        "copy", "--src-tls-verify=false", f"docker://{pushed.name}", f"oci:{tmp_path / 'copy'}:t:1"
    )
    copied = store.add(tmp_path / "copy", "copied")
    assert [_tree(path) for path in copied.layers] == [
        _tree(path) for path in store.resolve(stored).layers
    ]


async def test_what_the_registry_has_is_not_sent_again(
    server: Registry, make_pusher: MakePusher, stored: str
) -> None:
    first = await make_pusher().push(stored, f"{server.host}/again:1")
    before = len(server.requests('"POST /v2/again/blobs/uploads/'))
    seen: list[LayerProgress] = []
    second = await make_pusher().push(stored, f"{server.host}/again:2", on_progress=seen.append)
    assert (first.sent_bytes > 0, second.sent_bytes) == (True, 0)
    assert second.digest == first.digest
    assert before == 3  # two layers and the config
    assert len(server.requests('"POST /v2/again/blobs/uploads/')) == before
    assert [one.state for one in seen if one.state == "present"] == ["present", "present"]


async def test_each_layer_reports_its_progress(
    server: Registry, store: ImageStore, make_pusher: MakePusher, tmp_path: Path
) -> None:
    layer = builders.tar(builders.entry("big", os.urandom(3 << 20)))
    store.add(builders.oci_layout(tmp_path / "big", (layer,)), "big")
    seen: list[LayerProgress] = []
    await make_pusher().push("big", f"{server.host}/progress:1", on_progress=seen.append)
    states = list(dict.fromkeys(one.state for one in seen))
    assert states == ["waiting", "packing", "uploading", "uploaded"]
    assert len({one.digest for one in seen}) == 1
    assert all(one.done_bytes <= one.total_bytes for one in seen)


async def test_a_large_image_is_pushed_without_holding_it_in_memory(
    server: Registry, store: ImageStore, make_pusher: MakePusher, tmp_path: Path
) -> None:
    tree = tmp_path / "large"
    tree.mkdir()
    with (tree / "file").open("wb") as file:
        for _ in range(96):
            file.write(os.urandom(1 << 20))
    store.add_directory(tree, "large", in_place=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pushed = await make_pusher().push("large", f"{server.host}/large:1")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert pushed.sent_bytes > 96 << 20
    assert grown < 40 << 20


async def test_a_registry_with_passwords_needs_those_of_the_operator(
    make_pusher: MakePusher, stored: str, tmp_path: Path
) -> None:
    with registry(tmp_path / "basic", auth=basic_auth(tmp_path / "basic")) as server:
        with pytest.raises(ForbiddenError, match=r"pushing .*/a:1' is denied") as caught:
            await make_pusher().push(stored, f"{server.host}/a:1")
        assert "registry_config" in (caught.value.hint or "")
        file = write_config(tmp_path, server.host, USER, PASSWORD)
        settings = RegistrySettings(docker_config=file)
        assert (await make_pusher(settings).push(stored, f"{server.host}/a:1")).sent_bytes


async def test_a_token_that_allows_pushes_is_requested(
    make_pusher: MakePusher, stored: str, tmp_path: Path
) -> None:
    tokens = TokenServer(tmp_path / "tokens")
    runner = await tokens.serve()
    try:
        with registry(tmp_path / "registry", auth=tokens.auth) as server:
            file = write_config(tmp_path, server.host, USER, PASSWORD)
            settings = RegistrySettings(docker_config=file, private=frozenset({ANY_HOST}))
            pushed = await make_pusher(settings).push(stored, f"{server.host}/private/a:1")
            assert pushed.digest.startswith("sha256:")
    finally:
        await runner.cleanup()
    assert {one["scope"] for one in tokens.asked} == {"repository:private/a:pull,push"}
    assert len(tokens.asked) == 1


async def test_a_push_is_not_sent_to_a_mirror(
    server: Registry, make_pusher: MakePusher, stored: str
) -> None:
    mirror = f"http://127.0.0.1:{free_port()}"
    settings = RegistrySettings(mirrors={server.host: (mirror,)})
    assert (await make_pusher(settings).push(stored, f"{server.host}/direct:1")).sent_bytes


@pytest.mark.parametrize(
    ("name", "reference", "kind", "text"),
    [
        ("missing", "{host}/a:1", NotFoundError, "there is no image missing:latest"),
        ("tools", "{host}/UPPER:1", InvalidError, "not a reference to an image"),
        ("tools", "{host}/a@sha256:" + "0" * 64, InvalidError, "names a digest"),
    ],
)
async def test_what_cannot_be_pushed_is_refused_before_anything_is_sent(
    name: str,
    reference: str,
    kind: type[PaddockError],
    text: str,
    server: Registry,
    make_pusher: MakePusher,
    stored: str,
) -> None:
    with pytest.raises(kind, match=text):
        await make_pusher().push(name, reference.format(host=server.host))


async def test_a_registry_that_does_not_answer_is_named(
    make_pusher: MakePusher, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pusher_module, "_BACKOFF_SECONDS", ())
    host = f"127.0.0.1:{free_port()}"
    with pytest.raises(UnavailableError, match=f"{host} cannot be reached"):
        await make_pusher().push(stored, f"{host}/a:1")


async def test_an_upload_that_breaks_is_sent_again(
    make_pusher: MakePusher, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pusher_module, "_BACKOFF_SECONDS", (0.0, 0.0))
    fake = _FakeRegistry(broken_uploads=1)
    async with fake:
        pushed = await make_pusher().push(stored, f"{fake.host}/a:1")
    assert pushed.digest in fake.manifests
    assert fake.uploads == 4  # three blobs, one of them twice


async def test_a_push_that_fails_changes_no_tag(
    make_pusher: MakePusher, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pusher_module, "_BACKOFF_SECONDS", (0.0, 0.0))
    fake = _FakeRegistry(broken_uploads=9)
    async with fake:
        with pytest.raises(UnavailableError):
            await make_pusher().push(stored, f"{fake.host}/a:1")
    assert fake.manifests == set()


@pytest.mark.parametrize(
    ("location", "kind", "text"),
    [
        ("http://169.254.169.254/latest/", ForbiddenError, "169.254.169.254"),
        ("http://registry.example/upload", ForbiddenError, "without TLS"),
        ("file:///etc/passwd", InvalidError, "redirects to 'file:"),
        ("", InvalidError, "does not say where to upload to"),
    ],
)
async def test_a_hostile_registry_cannot_choose_where_layers_are_sent(
    location: str, kind: type[PaddockError], text: str, make_pusher: MakePusher, stored: str
) -> None:
    fake = _FakeRegistry(location=location)
    async with fake:
        with pytest.raises(kind, match=text):
            await make_pusher(RegistrySettings()).push(stored, f"{fake.host}/a:1")


async def test_credentials_are_not_sent_to_another_host_of_uploads(
    make_pusher: MakePusher, stored: str, tmp_path: Path
) -> None:
    other = _FakeRegistry()
    async with other:
        fake = _FakeRegistry(location=f"{other.url}/v2/a/put/", password=PASSWORD)
        async with fake:
            file = write_config(tmp_path, fake.host, USER, PASSWORD)
            settings = RegistrySettings(docker_config=file, private=frozenset({ANY_HOST}))
            await make_pusher(settings).push(stored, f"{fake.host}/a:1")
    assert other.uploads == 3
    assert other.authorizations == {None}
    assert fake.authorizations > {None}


async def test_a_redirect_of_an_upload_is_refused(make_pusher: MakePusher, stored: str) -> None:
    fake = _FakeRegistry(redirect="http://elsewhere.example/")
    async with fake:
        with pytest.raises(UnsupportedError, match=r"redirects a POST to 'elsewhere\.example'"):
            await make_pusher().push(stored, f"{fake.host}/a:1")


async def test_a_push_stops_before_the_disk_is_full(
    server: Registry, store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class _Full:
        def ensure_room(self, action: str, wanted_bytes: int = 0) -> None:
            raise DiskFullError(f"cannot {action}: the disk is full")

    monkeypatch.setattr(pusher_module, "_RESERVE_STEP_BYTES", 1000)
    tree = tmp_path / "random"
    tree.mkdir()
    (tree / "file").write_bytes(os.urandom(100_000))
    store.add_directory(tree, "random", in_place=True)
    push = Pusher(store, tmp_path / "downloads", ANYWHERE, reserve=_Full())  # type: ignore[arg-type]
    with pytest.raises(DiskFullError, match="cannot pack"):
        await push.push("random", f"{server.host}/full:1")
    assert list((tmp_path / "downloads").iterdir()) == []


async def test_no_layer_is_removed_during_a_push(
    store: ImageStore, make_pusher: MakePusher, stored: str
) -> None:
    fake = _FakeRegistry(waits=True)
    async with fake:
        pushing = asyncio.create_task(make_pusher().push(stored, f"{fake.host}/a:1"))
        await fake.reached.wait()
        store.delete(stored)
        assert store.collect() == ()
        fake.go.set()
        await pushing
    assert len(store.collect()) >= 2


class _FakeRegistry:
    """A registry that misbehaves where a test wants it."""

    def __init__(
        self,
        *,
        location: str | None = None,
        redirect: str = "",
        password: str = "",
        broken_uploads: int = 0,
        waits: bool = False,
    ) -> None:
        self._location = location
        self._redirect = redirect
        self._password = password
        self._broken = broken_uploads
        self.host = f"127.0.0.1:{free_port()}"
        self.url = f"http://{self.host}"
        self.uploads = 0
        self.manifests: set[str] = set()
        self.authorizations: set[str | None] = set()
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        if not waits:
            self.go.set()

    async def __aenter__(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", int(self.host.rpartition(":")[2])).start()

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.reached.set()
        await self.go.wait()
        self.authorizations.add(request.headers.get("Authorization"))
        if self._password and "Authorization" not in request.headers:
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="x"'})
        if request.method == "HEAD":
            return web.Response(status=404)
        if request.method == "POST":
            if self._redirect:
                return web.Response(status=307, headers={"Location": self._redirect})
            location = "/v2/a/put/" if self._location is None else self._location
            return web.Response(status=202, headers={"Location": location} if location else {})
        if "/manifests/" in request.path:
            self.manifests.add(pusher_module.digest_of(await request.read()))
            return web.Response(status=201)
        self.uploads += 1
        if self._broken:
            self._broken -= 1
            assert request.transport is not None
            request.transport.close()
        await request.read()
        return web.Response(status=201)


def _tree(layer: Path) -> dict[str, tuple[object, ...]]:
    """Return everything about the files of a layer that an image has."""
    found: dict[str, tuple[object, ...]] = {}
    links: dict[int, str] = {}
    for path in (layer, *sorted(layer.rglob("*"))):
        info, name = path.lstat(), str(path.relative_to(layer))
        content: object = None
        if stat.S_ISREG(info.st_mode):
            content = path.read_bytes()
        elif stat.S_ISLNK(info.st_mode):
            content = path.readlink()
        attributes = {
            key: os.getxattr(path, key, follow_symlinks=False)
            for key in os.listxattr(path, follow_symlinks=False)
        }
        first = links.setdefault(info.st_ino, name)
        owner = (info.st_uid, info.st_gid, info.st_mode, info.st_rdev)
        found[name] = (*owner, info.st_mtime if content else None, content, attributes, first)
    return found


def _skopeo(*arguments: str) -> str:
    program = shutil.which("skopeo")
    assert program is not None
    done = subprocess.run(
        [program, "--insecure-policy", *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout
