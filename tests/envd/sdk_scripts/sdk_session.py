"""Typical use of the E2B SDK against one envd; run by the SDK's interpreter.

Usage: sdk_session.py URL TOKEN. Prints `done` at the end; any failed expectation is an exception.
"""

import asyncio
import io
import sys
import time
import urllib.error
import urllib.request

from e2b import (
    AsyncSandbox,
    CommandExitException,
    FileNotFoundException,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    TimeoutException,
)
from e2b.connection_config import ConnectionConfig
from packaging.version import Version

url, token = sys.argv[1:3]
common = {
    "sandbox_id": "isbx",
    "envd_version": Version("0.6.13"),
    "envd_access_token": token,
    "sandbox_domain": None,
    "traffic_access_token": None,
}


def config() -> ConnectionConfig:
    return ConnectionConfig(
        api_key="e2b_" + "0" * 40,
        sandbox_url=url,
        extra_sandbox_headers={"X-Access-Token": token},
    )


def expect(kind: type[BaseException], action, *args, **kwargs) -> BaseException:
    try:
        action(*args, **kwargs)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


def commands(box: Sandbox) -> None:
    done = box.commands.run("echo out; echo err >&2; echo $FOO", envs={"FOO": "bar"})
    assert (done.stdout, done.stderr, done.exit_code) == ("out\nbar\n", "err\n", 0)
    failed = expect(CommandExitException, box.commands.run, "exit 7")
    assert failed.exit_code == 7
    expect(TimeoutException, box.commands.run, "sleep 20", timeout=1)
    expect(InvalidArgumentException, box.commands.run, "true", cwd="/nowhere")
    heard: list[str] = []
    box.commands.run("printf ü; sleep 0.1; printf ß", on_stdout=heard.append)
    assert "".join(heard) == "üß"

    handle = box.commands.run("cat; echo over", background=True, stdin=True)
    assert handle.pid in [p.pid for p in box.commands.list()]
    box.commands.send_stdin(handle.pid, "hello\n")
    box.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "hello\nover\n"

    handle = box.commands.run("sleep 60 & sleep 60", background=True, timeout=0)
    again = box.commands.connect(handle.pid)
    began = time.monotonic()
    assert box.commands.kill(handle.pid) is True
    killed = expect(CommandExitException, again.wait)
    assert time.monotonic() - began < 40  # and not when its children end
    assert killed.exit_code == -1, killed
    assert box.commands.kill(handle.pid) is False
    expect(NotFoundException, box.commands.connect, 3_999_999)
    big = box.commands.run("head -c 20000000 /dev/zero | tr '\\0' x")
    assert len(big.stdout) == 20_000_000


def terminals(box: Sandbox) -> None:
    terminal = box.pty.create(PtySize(rows=30, cols=100), timeout=0)
    box.pty.send_stdin(terminal.pid, b"stty size; exit\n")
    heard: list[bytes] = []
    terminal.wait(on_pty=heard.append)
    assert b"30 100" in b"".join(heard)


def files(box: Sandbox) -> None:
    assert box.is_running()
    info = box.files.write("deep/dir/a.txt", "grüße")
    assert info.path.endswith("/deep/dir/a.txt")
    assert box.files.read("deep/dir/a.txt") == "grüße"
    assert box.files.read("deep/dir/a.txt", gzip=True) == "grüße"
    box.files.write("empty", b"")
    assert box.files.read("empty") == ""
    blob = bytes(range(256)) * 20_000
    box.files.write("blob", blob, gzip=True)
    assert bytes(box.files.read("blob", format="bytes")) == blob
    box.files.write("stream", io.BytesIO(blob))
    assert b"".join(box.files.read("stream", format="stream")) == blob
    box.files.write("form", blob, use_octet_stream=False)
    assert bytes(box.files.read("form", format="bytes")) == blob
    many = box.files.write_files([{"path": f"many/{n}", "data": str(n)} for n in range(20)])
    assert len(many) == 20
    assert [e.name for e in box.files.list("many")] == sorted(str(n) for n in range(20))
    box.files.write("meta", "x", metadata={"author": "me"})
    assert box.files.get_info("meta").metadata == {"author": "me"}

    assert box.files.make_dir("new") is True
    assert box.files.make_dir("new") is False
    assert box.files.exists("new")
    assert not box.files.exists("old")
    entry = box.files.get_info("new")
    assert (entry.type, entry.permissions, entry.owner) == (FileType.DIR, "drwxr-xr-x", "user")
    box.files.rename("empty", "new/renamed")
    assert [e.name for e in box.files.list("new")] == ["renamed"]
    box.files.remove("new")
    assert not box.files.exists("new/renamed")
    expect(FileNotFoundException, box.files.read, "nothing")
    expect(InvalidArgumentException, box.files.read, "deep")

    watched = box.files.watch_dir("deep", recursive=True)
    box.files.write("deep/b.txt", "x")
    events = [(e.name, e.type.value) for e in watched.get_new_events()]
    assert events == [("b.txt", "create"), ("b.txt", "chmod"), ("b.txt", "write")], events
    watched.stop()


def signed_urls(box: Sandbox) -> None:
    box.files.write("signed", "by url")
    link = box.download_url("signed", user="user", use_signature_expiration=60)
    with urllib.request.urlopen(link) as answer:
        assert answer.read() == b"by url"
    wrong = link.replace("path=signed", "path=blob")
    refused = expect(urllib.error.HTTPError, urllib.request.urlopen, wrong)
    assert refused.code == 401


async def asynchronous() -> None:
    box = AsyncSandbox(**common, connection_config=config())
    results = await asyncio.gather(*(box.commands.run(f"echo {n}") for n in range(50)))
    assert [r.stdout for r in results] == [f"{n}\n" for n in range(50)]
    await box.files.make_dir("watched")
    seen: list[tuple[str, str]] = []
    handle = await box.files.watch_dir("watched", lambda e: seen.append((e.name, e.type.value)))
    await box.files.write("watched/f", "x")
    async with asyncio.timeout(30):
        while len(seen) < 3:
            await asyncio.sleep(0.01)
    assert seen == [("f", "create"), ("f", "chmod"), ("f", "write")]
    await handle.stop()


def main() -> None:
    box = Sandbox(**common, connection_config=config())
    for part in (commands, terminals, files, signed_urls):
        part(box)
    asyncio.run(asynchronous())
    print("done")


main()
