"""`/files`: uploads and downloads, ranges, compression, signatures, metadata, errors."""

import asyncio
import gzip
import hashlib
import json
import os
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest

from paddock.envd.config import EnvdSettings
from paddock.envd.files import upload_body
from paddock.envd.files.signature import sign
from tests.envd.rig import USER_UID, Response, Rig, open_rig

pytestmark = pytest.mark.timeout(120)

RAW = {"content_type": "application/octet-stream"}
RAW_HEADERS = {"content-type": "application/octet-stream"}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    opened = await open_rig(tmp_path)
    yield opened
    opened.envd.close()


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Rig]:
    opened = await open_rig(tmp_path, settings=EnvdSettings(access_token="sesame"))
    yield opened
    opened.envd.close()


def form(*parts: tuple[str, str, bytes], boundary: str = "b0undary") -> tuple[bytes, str]:
    body = b""
    for field, filename, data in parts:
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"; filename="{filename}"'
        )
        body += (
            head.encode() + b"\r\nContent-Type: application/octet-stream\r\n\r\n" + data + b"\r\n"
        )
    return body + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


async def test_an_upload_creates_parents_and_belongs_to_the_user(rig: Rig) -> None:
    data = os.urandom(5_000_000)

    put = await rig.request("POST", "/files?path=deep/er/a.bin", data, **RAW)
    got = await rig.request("GET", "/files?path=deep/er/a.bin")

    path = rig.home / "deep/er/a.bin"
    assert put.json() == [{"name": "a.bin", "path": str(path), "type": "file"}]
    assert hashlib.sha256(got.body).digest() == hashlib.sha256(data).digest()
    info = path.stat()
    assert stat.S_IMODE(info.st_mode) == 0o644
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
    if os.geteuid() == 0:
        assert (info.st_uid, info.st_gid, path.parent.stat().st_uid) == (USER_UID,) * 3


async def test_an_upload_replaces_an_existing_file(rig: Rig) -> None:
    await rig.request("POST", "/files?path=a", b"long content", **RAW)
    await rig.request("POST", "/files?path=a", b"short", **RAW)

    assert (rig.home / "a").read_bytes() == b"short"


async def test_a_form_writes_each_part_to_its_file_name(rig: Rig, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere/b.txt"
    tricky = b"\r\n--b0undar\r\n" * 1000
    body, kind = form(
        ("file", "sub/a.txt", tricky), ("note", "x", b"no"), ("file", str(target), b"")
    )

    answer = await rig.request("POST", "/files", body, content_type=kind)

    assert [entry["path"] for entry in answer.json()] == [str(rig.home / "sub/a.txt"), str(target)]
    assert (rig.home / "sub/a.txt").read_bytes() == tricky
    assert target.read_bytes() == b""


async def test_a_form_with_a_path_writes_its_one_file_there(rig: Rig) -> None:
    body, kind = form(("file", "ignored", b"data"))

    answer = await rig.request("POST", "/files?path=~/chosen.txt", body, content_type=kind)

    assert answer.status == 200
    assert (rig.home / "chosen.txt").read_bytes() == b"data"


async def test_two_parts_for_one_path_are_refused(rig: Rig) -> None:
    body, kind = form(("file", "a", b"1"), ("file", "./a", b"2"))

    answer = await rig.request("POST", "/files", body, content_type=kind)

    assert answer.status == 400
    assert answer.json()["code"] == 400
    assert "twice" in answer.json()["message"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "text/plain"),
        (b"x", "multipart/form-data"),
        (b"--b\r\nnonsense", "multipart/form-data; boundary=b"),
        (form(("file", "", b"1"))[0], "multipart/form-data; boundary=b0undary"),
    ],
)
async def test_malformed_uploads_are_refused(rig: Rig, body: bytes, kind: str) -> None:
    assert (await rig.request("POST", "/files", body, content_type=kind)).status == 400


async def test_a_compressed_upload_is_decompressed(rig: Rig) -> None:
    data = os.urandom(1000) * 5000

    answer = await rig.request(
        "POST", "/files?path=a", gzip.compress(data), content_encoding="gzip", **RAW
    )

    assert answer.status == 200
    assert (rig.home / "a").read_bytes() == data


@pytest.mark.parametrize(
    "body", [b"not gzip at all", gzip.compress(b"x" * 999)[:-9]], ids=["garbage", "cut off"]
)
async def test_a_broken_compressed_upload_is_refused(rig: Rig, body: bytes) -> None:
    answer = await rig.request("POST", "/files?path=a", body, content_encoding="gzip", **RAW)

    assert answer.status == 400


async def test_a_chunked_upload_that_expects_continue_receives_it(rig: Rig) -> None:
    wire = await rig.wire()
    headers = {"content-type": "application/octet-stream", "transfer-encoding": "chunked"}
    await wire.send("POST", "/files?path=a", headers | {"expect": "100-continue"})
    status, _ = await wire.head()
    assert status == 100
    for piece in (b"abc", b"def" * 100_000):
        wire.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    wire.writer.write(b"0\r\n\r\n")

    answer = await wire.response()

    assert answer.status == 200
    assert (rig.home / "a").read_bytes() == b"abc" + b"def" * 100_000
    wire.close()


async def test_a_refused_upload_is_refused_before_its_body_is_sent(rig: Rig) -> None:
    wire = await rig.wire()
    await wire.send(
        "POST",
        "/files?path=a&username=nobody",
        {
            "content-type": "application/octet-stream",
            "content-length": "5",
            "expect": "100-continue",
        },
    )

    assert (await wire.response()).status == 401
    assert await wire.reader.read() == b""
    wire.close()


async def test_downloads_have_a_content_type(rig: Rig) -> None:
    (rig.home / "page.html").write_text("<p>")
    (rig.home / "note").write_text("grüße")
    (rig.home / "blob").write_bytes(b"\0\1\2")
    (rig.home / "empty").write_bytes(b"")

    async def kind(name: str) -> str:
        return (await rig.request("GET", f"/files?path={name}")).headers["content-type"]

    assert await kind("page.html") == "text/html; charset=utf-8"
    assert await kind("note") == "text/plain; charset=utf-8"
    assert await kind("blob") == "application/octet-stream"
    empty = await rig.request("GET", "/files?path=empty", accept_encoding="gzip")
    assert (empty.headers["content-length"], empty.body) == ("0", b"")
    head = await rig.request("HEAD", "/files?path=page.html")
    assert (head.status, head.headers["content-length"]) == (200, "3")
    assert head.headers["content-disposition"] == 'inline; filename="page.html"'
    assert head.headers["vary"] == "Accept-Encoding"


@pytest.mark.parametrize(
    ("asked", "status", "body", "range_"),
    [
        ("bytes=2-4", 206, b"234", "bytes 2-4/10"),
        ("bytes=7-", 206, b"789", "bytes 7-9/10"),
        ("bytes=-2", 206, b"89", "bytes 8-9/10"),
        ("bytes=5-100", 206, b"56789", "bytes 5-9/10"),
        ("bytes=10-", 416, None, "bytes */10"),
        ("bytes=-0", 416, None, "bytes */10"),
        ("bytes=4-2", 200, b"0123456789", None),
        ("bytes=0-1,3-4", 200, b"0123456789", None),
        ("lines=1-2", 200, b"0123456789", None),
    ],
)
async def test_ranges_are_served(
    rig: Rig, asked: str, status: int, body: bytes | None, range_: str | None
):
    (rig.home / "digits").write_text("0123456789")

    answer = await rig.request("GET", "/files?path=digits", range=asked)

    assert answer.status == status
    assert answer.headers.get("content-range") == range_
    if body is not None:
        assert answer.body == body


async def test_a_range_of_a_file_of_size_0_is_the_whole_file(rig: Rig) -> None:
    (rig.home / "empty").write_bytes(b"")

    empty = await rig.request("GET", "/files?path=empty", range="bytes=0-99")
    status = await rig.request("GET", "/files?path=/proc/self/status", range="bytes=0-99")

    assert (empty.status, empty.body) == (200, b"")
    assert (status.status, status.body[:5]) == (200, b"Name:")


async def test_conditional_requests_are_answered_without_a_body(rig: Rig) -> None:
    path = rig.home / "a"
    path.write_text("x")
    os.utime(path, (1_700_000_000, 1_700_000_000))
    date = (await rig.request("GET", "/files?path=a")).headers["last-modified"]

    same = await rig.request("GET", "/files?path=a", if_modified_since=date)
    stale = await rig.request("GET", "/files?path=a", if_unmodified_since=date)
    os.utime(path, (1_700_000_005, 1_700_000_005))
    newer = await rig.request("GET", "/files?path=a", if_modified_since=date)
    refused = await rig.request("GET", "/files?path=a", if_unmodified_since=date)
    partial = await rig.request("GET", "/files?path=a", if_range=date, range="bytes=0-0")

    assert date == "Tue, 14 Nov 2023 22:13:20 GMT"
    assert [r.status for r in (same, stale, newer, refused, partial)] == [304, 200, 200, 412, 200]


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [("gzip", "gzip"), ("gzip, deflate, br", "gzip"), ("*", "gzip"), ("gzip;q=0", None),
     ("identity", None), ("gzip;q=0.2, identity", None), ("br", None)],
)  # fmt: skip
async def test_the_client_chooses_the_encoding(rig: Rig, accept: str, encoding: str | None):
    data = b"abc" * 500_000
    (rig.home / "a").write_bytes(data)

    answer = await rig.request("GET", "/files?path=a", accept_encoding=accept)

    assert answer.headers.get("content-encoding") == encoding
    assert (gzip.decompress(answer.body) if encoding else answer.body) == data


async def test_incompressible_files_are_sent_uncompressed(rig: Rig) -> None:
    (rig.home / "a").write_bytes(os.urandom(100_000))

    answer = await rig.request("GET", "/files?path=a", accept_encoding="gzip")

    assert answer.headers["content-length"] == "100000"
    assert "content-encoding" not in answer.headers


async def test_no_acceptable_encoding_is_406(rig: Rig) -> None:
    (rig.home / "a").write_text("x")

    answer = await rig.request("GET", "/files?path=a", accept_encoding="identity;q=0, br")

    assert answer.status == 406


async def test_special_files_are_refused_without_blocking(rig: Rig) -> None:
    os.mkfifo(rig.home / "fifo")
    (rig.home / "directory").mkdir()
    (rig.home / "loop").symlink_to("loop")

    async def status(method: str, path: str) -> int:
        body = b"x" if method == "POST" else None
        async with asyncio.timeout(20):
            return (await rig.request(method, f"/files?path={path}", body, **RAW)).status

    for path in ("fifo", "directory", "/dev/zero", "/dev/tty", "loop"):
        for method in ("GET", "POST"):
            assert await status(method, path) in (400, 404, 500), (method, path)
    assert await status("GET", "directory") == 400
    assert await status("GET", "fifo") == 400
    assert await status("POST", "fifo") == 400
    assert await status("GET", "/dev/zero") == 400
    assert await status("GET", "nothing") == 404
    assert await status("GET", "a%00b") == 400


async def test_files_of_size_zero_with_content_are_read(rig: Rig) -> None:
    answer = await rig.request("GET", "/files?path=/proc/cpuinfo")

    assert answer.status == 200
    assert b"processor" in answer.body


async def test_arbitrary_file_names_round_trip(rig: Rig) -> None:
    for name in (
        "ü ö",
        "a&b=c",
        "line\nbreak",
        'quo"te',
        b"\xff\xfe".decode(errors="surrogateescape"),
    ):
        target = f"/files?path={quote(name, errors='surrogateescape')}"

        put = await rig.request("POST", target, b"data", **RAW)
        got = await rig.request("GET", target)

        assert (put.status, got.status, got.body) == (200, 200, b"data")
        assert (rig.home / name).exists()


async def test_without_an_access_token_no_authorization_is_required(rig: Rig) -> None:
    assert (await rig.request("GET", "/envs")).status == 200


async def test_with_an_access_token_a_header_or_signature_is_required(secured: Rig) -> None:
    (secured.home / "a").write_text("x")

    def signed(
        operation: str, *, path: str = "a", token: str = "sesame", expires: int | None = None
    ):
        made = sign(
            path=path,
            operation=operation,  # type: ignore[arg-type]
            username="user",
            token=token,
            expiration=None if expires is None else str(expires),
        )
        more = "" if expires is None else f"&signature_expiration={expires}"
        return f"/files?path=a&username=user&signature={quote(made)}{more}"

    async def status(target: str, method: str = "GET", **headers: str) -> int:
        body = b"y" if method == "POST" else None
        return (await secured.request(method, target, body, **RAW, **headers)).status

    now = int(time.time())
    assert await status("/files?path=a") == 401
    assert await status("/files?path=a", x_access_token="wrong") == 401
    assert await status("/files?path=a", x_access_token="sesame") == 200
    assert await status(signed("read")) == 200
    assert await status(signed("read"), x_access_token="wrong") == 401
    assert await status(signed("write")) == 401
    assert await status(signed("read"), "POST") == 401
    assert await status(signed("write"), "POST") == 200
    assert await status(signed("read", path="b")) == 401
    assert await status(signed("read", token="guess")) == 401
    assert await status(signed("read", expires=now + 60)) == 200
    assert await status(signed("read", expires=now - 1)) == 401
    assert (
        await status(signed("read", expires=now + 60).replace(str(now + 60), str(now + 99))) == 401
    )


async def test_with_an_access_token_other_routes_require_the_header(secured: Rig) -> None:
    async def statuses(**headers: str) -> list[int]:
        answers: list[Response] = [
            await secured.request("GET", "/health", **headers),
            await secured.request("GET", "/metrics", **headers),
            await secured.request("GET", "/envs", **headers),
            await secured.process("List", **headers),
        ]
        return [a.status for a in answers]

    assert await statuses() == [204, 401, 401, 401]
    assert await statuses(x_access_token="nonsense") == [204, 401, 401, 401]
    assert await statuses(x_access_token="sesame") == [204, 200, 200, 200]
    assert (await secured.process("List")).json()["code"] == "unauthenticated"
    assert (await secured.request("GET", "/envs")).json()["code"] == 401


async def test_metadata_is_stored_with_the_file_and_replaced_completely(rig: Rig) -> None:
    first = await rig.request(
        "POST", "/files?path=a", b"x", X_Metadata_Author="me", x_metadata_b="2", **RAW
    )
    stat_one = await rig.files("Stat", {"path": "a"})
    await rig.request("POST", "/files?path=a", b"x", x_metadata_c="3", **RAW)
    stat_two = await rig.files("Stat", {"path": "a"})

    assert first.json()[0]["metadata"] == {"author": "me", "b": "2"}
    assert stat_one.json()["entry"]["metadata"] == {"author": "me", "b": "2"}
    assert os.getxattr(rig.home / "a", "user.e2b.c") == b"3"
    assert stat_two.json()["entry"]["metadata"] == {"c": "3"}


@pytest.mark.parametrize(
    ("key", "value"), [("k" * 247, "v"), ("k", "\x01"), ("k", "v" * 4097), ("k", "ü")]
)
async def test_bad_metadata_is_refused_and_nothing_is_written(rig: Rig, key: str, value: str):
    wire = await rig.wire()
    lines = "POST /files?path=a HTTP/1.1\r\nContent-Type: application/octet-stream\r\n"
    lines += f"X-Metadata-{key}: {value}\r\nContent-Length: 1\r\n\r\nx"
    wire.writer.write(lines.encode("latin-1"))

    assert (await wire.response()).status == 400
    assert not (rig.home / "a").exists()
    wire.close()


async def test_files_are_composed_in_order(rig: Rig) -> None:
    for name in "abc":
        (rig.home / name).write_text(name * 3)
    body = {"source_paths": ["a", "b", "c", "a"], "destination": "out/all"}

    answer = await rig.request("POST", "/files/compose", json.dumps(body).encode())
    again = await rig.request(
        "POST", "/files/compose", json.dumps(body | {"source_paths": ["nothing"]}).encode()
    )

    assert answer.json() == {"name": "all", "path": str(rig.home / "out/all"), "type": "file"}
    assert (rig.home / "out/all").read_text() == "aaabbbcccaaa"
    assert again.status == 404
    assert [p.name for p in (rig.home / "out").iterdir()] == ["all"]


async def test_a_full_disk_returns_507(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small filesystem needs root")
    small = tmp_path / "small"
    small.mkdir()
    assert os.system(f"mount -t tmpfs -o size=1m none {small}") == 0
    rig = await open_rig(tmp_path)
    try:
        told = await rig.request("POST", f"/files?path={small}/a", b"x" * 2_000_000, **RAW)
        body, kind = form(("file", f"{small}/b", b"x" * 2_000_000))
        found = await rig.request("POST", "/files", body, content_type=kind)

        assert (told.status, found.status) == (507, 507)
        assert f"{small}/b" in found.json()["message"]
        assert not (small / "a").exists()
    finally:
        rig.envd.close()
        assert os.system(f"umount -l {small}") == 0


async def test_a_path_below_a_file_is_refused(rig: Rig) -> None:
    (rig.home / "file").write_text("kept")

    answer = await rig.request("POST", "/files?path=file/deep/er", b"x", **RAW)

    assert answer.status == 400
    assert "file' exists and is not a directory" in answer.json()["message"]
    assert (rig.home / "file").read_text() == "kept"


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_an_upload_without_data_times_out(
    rig: Rig, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_body, "UPLOAD_TIMEOUT_SECONDS", 0.2)
    wire = await rig.wire()
    headers = RAW_HEADERS | {"content-length": "1000", "content-encoding": encoding}
    await wire.send("POST", "/files?path=a", headers)
    wire.writer.write(gzip.compress(b"x" * 100)[:10])

    answer = await wire.response()

    assert answer.status == 408
    assert "no data was received for 0.2 s" in answer.json()["message"]
    wire.close()


async def test_the_server_survives_a_client_that_disconnects_during_an_upload(rig: Rig) -> None:
    wire = await rig.wire()
    await wire.send("POST", "/files?path=a", RAW_HEADERS | {"content-length": "10000000"})
    wire.writer.write(b"x" * 3_000_000)
    await wire.writer.drain()
    wire.writer.transport.abort()

    assert (await rig.request("GET", "/health")).status == 204
    assert (await rig.request("POST", "/files?path=b", b"fine", **RAW)).status == 200
