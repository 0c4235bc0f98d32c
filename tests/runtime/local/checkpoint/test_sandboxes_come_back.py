"""Dump and restore of real sandboxes."""

import asyncio
import functools
import gc
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from paddock.envd.process.init_protocol import SpawnFlags
from paddock.kit.errors import UnavailableError
from paddock.runtime.host_paths import SHARED_IDS
from paddock.runtime.local.checkpoint import (
    Checkpointer,
    Restore,
    RestoreMounts,
    StoredMemory,
    mounts,
)
from paddock.runtime.local.kernel import syscalls
from tests import disks
from tests.disks import small_disk
from tests.runtime.local.checkpoint.lab import Guest, Lab, poll

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

COUNTER = """
import os, socket, time
listener = socket.create_server(("127.0.0.1", 8080))
secret = os.environ.get("SECRET", os.urandom(8).hex())
# Always the same file of the same size, so that a second restore finds the file it had open.
file = os.open("/tmp/count", os.O_WRONLY | os.O_CREAT)
count = 0
while True:
    count += 1
    os.pwrite(file, f"{count:08} {secret}".encode(), 0)
    time.sleep(0.005)
"""

TALKER = """
import os, socket, time
listener = socket.create_server(("127.0.0.1", 8081))
client = socket.create_connection(("127.0.0.1", 8081))
server, _ = listener.accept()
said = 0
while True:
    try:
        client.sendall(b"x")
        said += 1 if server.recv(1) else 0
        text = f"talking {said}"
    except OSError as error:
        text = f"closed {type(error).__name__}"
    with open("/tmp/talk.new", "w") as file:
        file.write(text)
    os.rename("/tmp/talk.new", "/tmp/talk")
    time.sleep(0.005)
"""


WATCHER = """
import ctypes, os, time
watch = ctypes.CDLL(None).inotify_init1(os.O_NONBLOCK)
os.makedirs("/tmp/watched/here")
assert ctypes.CDLL(None).inotify_add_watch(watch, b"/tmp/watched/here", 0x100) > 0  # creations
made = seen = 0
while True:
    made += 1
    with open(f"/tmp/watched/here/{made}", "w"):
        pass
    try:
        seen += len(os.read(watch, 4096)) > 0
    except BlockingIOError:
        pass  # events that were unread at the dump are not stored
    with open("/tmp/seen.new", "w") as file:
        file.write(str(seen))
    os.rename("/tmp/seen.new", "/tmp/seen")
    time.sleep(0.005)
"""


FOLLOWER = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
open("/tmp/followed", "w").close()
watch = libc.inotify_init1(0)
for place in ("/tmp/followed", *sys.argv[1:]):
    assert libc.inotify_add_watch(watch, place.encode(), 2) > 0, place
open("/tmp/events", "w").close()
while event := os.read(watch, 4096):
    if event[0] == 1:  # what it follows was written to
        with open("/tmp/events", "a") as file:
            file.write(".")
"""


async def counting(guest: Guest) -> tuple[int, str]:
    """Wait until the counter moves; return it with the process's secret."""
    first = await read_when_there(guest, "/tmp/count")
    await poll(lambda: text(guest, "/tmp/count") not in ("", first))
    count, secret = text(guest, "/tmp/count").split()
    return int(count), secret


async def read_when_there(guest: Guest, path: str) -> str:
    await poll(lambda: text(guest, path))
    return text(guest, path)


def text(guest: Guest, path: str) -> str:
    try:
        return guest.path(path).read_text()
    except FileNotFoundError:
        return ""


def connect_inside(guest: Guest, port: int) -> None:
    """Connect to a port on the sandbox's own loopback."""

    def attempt() -> None:
        there = os.open(f"/proc/{guest.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            syscalls.setns(there, syscalls.CLONE_NEWNET)
            sock = socket.socket()
            syscalls.setns(home, syscalls.CLONE_NEWNET)
            with sock:
                sock.connect(("127.0.0.1", port))
        finally:
            os.close(there)
            os.close(home)

    attempt()


def confinement(guest: Guest) -> list[str]:
    wanted = ("Uid", "Gid", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Groups")
    lines = Path(f"/proc/{guest.pid}/status").read_text().splitlines()
    return [line for line in lines if line.startswith(wanted)]


async def test_a_hibernated_sandbox_continues_where_it_was(lab: Lab):
    guest = await lab.start("one")
    started = await guest.spawn("python3", "-c", COUNTER, flags=SpawnFlags.PTY)
    before, secret = await counting(guest)
    held_before = confinement(guest)

    await lab.dump(guest, lab.storage.sandbox_memory("one"), leave_running=False)
    await poll(lambda: not lab.groups.is_populated(lab.group_of(guest)))
    await poll(lambda: not guest.is_alive())  # it still has to be reaped

    back = await lab.restore("one", lab.storage.sandbox_memory("one"), slot=guest.slot)
    after, same_secret = await counting(back)
    assert after > before
    assert same_secret == secret
    assert confinement(back) == held_before
    records = await back.attach()
    assert [(record.id, record.pid) for record in records] == [(1, started.pid)]
    connect_inside(back, 8080)
    assert (await back.run("hostname")).strip() == "one"


async def test_a_locked_sandbox_is_restored_locked(lab: Lab):
    guest = await lab.start("one", locked=True)
    record = await guest.spawn("sleep", "1000", uid=1000)
    inside = f"grep -E 'NoNewPrivs|Seccomp:|CapEff|Uid' /proc/{record.pid}/status"
    before = await guest.run("sh", "-c", inside)
    await lab.dump(guest, lab.storage.sandbox_memory("one"), leave_running=False)
    back = await lab.restore("one", lab.storage.sandbox_memory("one"))
    assert await back.run("sh", "-c", inside) == before
    assert "NoNewPrivs:\t1" in before
    assert "Seccomp:\t2" in before
    assert "Uid:\t1000" in before


async def test_output_of_a_surviving_command_reaches_a_new_reader(lab: Lab):
    guest = await lab.start("one")
    await guest.spawn("sh", "-c", "while read line; do echo got $line; done", flags=SpawnFlags.PTY)
    await lab.dump(guest, lab.storage.sandbox_memory("one"), leave_running=False)
    back = await lab.restore("one", lab.storage.sandbox_memory("one"))
    (record,) = await back.attach()
    assert record.pty is not None
    os.write(record.pty, b"hello\n")
    output = b""
    while b"got hello" not in output:
        output += await asyncio.to_thread(os.read, record.pty, 4096)


async def test_a_clone_has_its_own_ids_group_network_files_and_memory(lab: Lab):
    guest = await lab.start("one")
    await guest.spawn("python3", "-c", COUNTER)
    _, secret = await counting(guest)
    memory = lab.storage.checkpoint_memory("cp")
    await lab.dump(
        guest, memory, leave_running=True, while_frozen=lambda: lab.storage.snapshot("one", "cp")
    )
    await guest.write("/tmp/later", "written by the source after the snapshot")
    lab.storage.clone("cp", "two")

    clone = await lab.restore("two", memory)

    _, clone_secret = await counting(clone)
    assert clone_secret == secret
    assert await counting(guest)
    assert not clone.path("/tmp/later").exists()
    ranges = [Path(f"/proc/{one.pid}/uid_map").read_text().split() for one in (guest, clone)]
    assert ranges[0] == ["0", str(lab.base(guest.slot)), "65536"]
    assert ranges[1] == ["0", str(lab.base(clone.slot)), "65536"]
    assert clone.path("/tmp/count").stat().st_uid == lab.base(clone.slot)
    assert clone.pid in lab.groups.processes(lab.group_of(clone))
    for kind in ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup"):
        inodes = {
            Path(f"/proc/{one}/ns/{kind}").readlink() for one in (guest.pid, clone.pid, "self")
        }
        assert len(inodes) == 3, kind
    assert await clone.run("cat", "/proc/self/cgroup") == await guest.run(
        "cat", "/proc/self/cgroup"
    )


async def test_clones_are_created_concurrently(lab: Lab):
    guest = await lab.start("one")
    await guest.spawn("python3", "-c", COUNTER)
    await counting(guest)
    memory = lab.storage.checkpoint_memory("cp")
    await lab.dump(
        guest, memory, leave_running=True, while_frozen=lambda: lab.storage.snapshot("one", "cp")
    )

    async def clone(uid: str) -> Guest:
        lab.storage.clone("cp", uid)
        return await lab.restore(uid, memory)

    clones = await asyncio.gather(*(clone(f"clone-{number}") for number in range(5)))

    assert len({one.pid for one in clones}) == 5
    for one in clones:
        await counting(one)
        await one.write("/tmp/mine", one.uid)
    assert [text(one, "/tmp/mine") for one in clones] == [one.uid for one in clones]


async def test_inotify_watches_survive(lab: Lab):
    """Development servers and `tail -f` use them."""
    guest = await lab.start("one")
    await guest.spawn("python3", "-c", WATCHER)
    await poll(lambda: text(guest, "/tmp/seen") not in ("", "0"))
    memory = lab.storage.checkpoint_memory("cp")
    await lab.dump(
        guest, memory, leave_running=True, while_frozen=lambda: lab.storage.snapshot("one", "cp")
    )
    lab.storage.clone("cp", "two")

    clone = await lab.restore("two", memory)

    for one in (guest, clone):
        first = await read_when_there(one, "/tmp/seen")
        await poll(lambda one=one, first=first: int(text(one, "/tmp/seen") or 0) > int(first) + 1)


async def test_watches_on_single_files_and_system_directories_survive(lab: Lab):
    """Used by `tail -f`, browsers (/etc/resolv.conf, fonts) and device monitors."""
    guest = await lab.start("one")
    places = ("/", "/etc/passwd", "/usr/lib", "/usr/bin/env", "/dev", "/dev/pts", "/proc", "/sys")
    await guest.spawn("python3", "-c", FOLLOWER, *places)
    await poll(lambda: guest.path("/tmp/events").exists())
    memory = lab.storage.checkpoint_memory("cp")
    await lab.dump(
        guest, memory, leave_running=True, while_frozen=lambda: lab.storage.snapshot("one", "cp")
    )
    lab.storage.clone("cp", "two")

    clone = await lab.restore("two", memory)

    for one in (guest, clone):
        one.path("/tmp/followed").write_text("something new")
        await read_when_there(one, "/tmp/events")


async def test_connections_of_a_sandbox_to_itself_survive_its_own_restore(lab: Lab):
    guest = await lab.start("one")
    await guest.spawn("python3", "-c", TALKER)
    await read_when_there(guest, "/tmp/talk")
    await lab.dump(guest, lab.storage.sandbox_memory("one"), leave_running=False)
    guest_said = lab.storage.create("one").upper.joinpath("tmp/talk").read_text()

    back = await lab.restore("one", lab.storage.sandbox_memory("one"), keep_connections=True)

    await poll(lambda: text(back, "/tmp/talk") not in ("", guest_said))
    assert text(back, "/tmp/talk").startswith("talking")


async def test_connections_are_closed_in_a_clone_and_kept_in_the_source(lab: Lab):
    guest = await lab.start("one")
    await guest.spawn("python3", "-c", TALKER)
    await read_when_there(guest, "/tmp/talk")
    memory = lab.storage.checkpoint_memory("cp")
    await lab.dump(
        guest, memory, leave_running=True, while_frozen=lambda: lab.storage.snapshot("one", "cp")
    )
    lab.storage.clone("cp", "two")
    clone = await lab.restore("two", memory, keep_connections=False)
    await poll(lambda: text(clone, "/tmp/talk").startswith("closed"))
    said = text(guest, "/tmp/talk")
    await poll(lambda: text(guest, "/tmp/talk") not in ("", said))
    assert text(guest, "/tmp/talk").startswith("talking")


async def test_a_frozen_sandbox_is_stored_and_stays_frozen(lab: Lab):
    guest = await lab.start("one")
    await guest.spawn("python3", "-c", COUNTER)
    await counting(guest)
    lab.groups.freeze(lab.group_of(guest), frozen=True)
    await poll(lambda: lab.groups.is_frozen(lab.group_of(guest)))
    memory = lab.storage.checkpoint_memory("cp")
    await lab.dump(
        guest, memory, leave_running=True, while_frozen=lambda: lab.storage.snapshot("one", "cp")
    )
    assert lab.groups.is_frozen(lab.group_of(guest))
    lab.storage.clone("cp", "two")
    await counting(await lab.restore("two", memory))
    lab.groups.freeze(lab.group_of(guest), frozen=False)
    await counting(guest)


async def test_deleted_files_locks_shared_memory_and_sockets_survive(lab: Lab):
    program = """
import fcntl, os, socket, time
deleted = open("/tmp/deleted", "w+"); deleted.write("still here"); deleted.flush()
os.unlink("/tmp/deleted")
locked = open("/tmp/locked", "w"); fcntl.flock(locked, fcntl.LOCK_EX)
open("/dev/shm/shared", "w").write("in memory")
one, other = socket.socketpair(); one.send(b"in flight")
listener = socket.socket(socket.AF_UNIX); listener.bind("/tmp/socket"); listener.listen()
open("/tmp/ready", "w").close()
while not os.path.exists("/tmp/go"):
    time.sleep(0.005)
deleted.seek(0)
shared = open("/dev/shm/shared").read()
open("/tmp/out.new", "w").write(f"{deleted.read()}, {shared}, {other.recv(99).decode()}")
os.rename("/tmp/out.new", "/tmp/out")
time.sleep(600)
"""
    guest = await lab.start("one")
    await guest.spawn("python3", "-c", program)
    await poll(lambda: guest.path("/tmp/ready").exists())
    await lab.dump(guest, lab.storage.sandbox_memory("one"), leave_running=False)
    back = await lab.restore("one", lab.storage.sandbox_memory("one"))
    await back.write("/tmp/go", "")
    assert await read_when_there(back, "/tmp/out") == "still here, in memory, in flight"
    locked = await back.run("sh", "-c", "flock --nonblock /tmp/locked true || echo taken")
    assert locked.strip() == "taken"


async def test_a_directory_of_the_host_is_mounted_again(lab: Lab, tmp_path: Path):
    tmp_path.chmod(0o755)
    (tmp_path / "data").write_text("from outside")
    os.chown(tmp_path / "data", SHARED_IDS, SHARED_IDS)
    binds = {"/mnt/volume": str(tmp_path)}
    guest = await lab.start("one", binds=binds)
    assert await guest.run("cat", "/mnt/volume/data") == "from outside"
    await lab.dump(guest, lab.storage.sandbox_memory("one"), leave_running=False)
    with pytest.raises(UnavailableError, match="/mnt/volume"):
        await lab.restore("one", lab.storage.sandbox_memory("one"))
    back = await lab.restore("one", lab.storage.sandbox_memory("one"), binds=binds)
    assert await back.run("sh", "-c", "cat /mnt/volume/data; stat -c %u /mnt/volume/data") == (
        "from outside0\n"
    )


async def test_the_network_is_connected_before_any_process_runs(lab: Lab):
    guest = await lab.start("one")
    await guest.spawn("python3", "-c", COUNTER)
    await counting(guest)
    memory = lab.storage.checkpoint_memory("cp")
    await lab.dump(
        guest, memory, leave_running=True, while_frozen=lambda: lab.storage.snapshot("one", "cp")
    )
    lab.storage.clone("cp", "two")
    box = lab.storage.find("two")
    assert box is not None
    stored = (box.upper / "tmp/count").read_text()
    seen: list[str] = []

    def connect(pid: int) -> None:
        assert Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
        seen.append((box.upper / "tmp/count").read_text())

    await counting(await lab.restore("two", memory, connect_network=connect))
    assert seen == [stored]


async def test_a_failed_snapshot_leaves_the_sandbox_running(lab: Lab):
    guest = await lab.start("one")
    await guest.spawn("python3", "-c", COUNTER)
    await counting(guest)

    def refuse() -> None:
        raise UnavailableError("no room for the files")

    memory = lab.storage.checkpoint_memory("cp")
    with pytest.raises(UnavailableError, match="no room for the files"):
        await lab.dump(guest, memory, leave_running=False, while_frozen=refuse)
    await counting(guest)
    assert not (memory / "paddock.json").exists()


async def test_damaged_memory_is_rejected_with_a_hint(lab: Lab):
    guest = await lab.start("one")
    memory = lab.storage.sandbox_memory("one")
    await lab.dump(guest, memory, leave_running=False)
    os.truncate(memory / "pages-1.img", 4096)
    with pytest.raises(UnavailableError, match="damaged") as refused:
        await lab.restore("one", memory)
    assert refused.value.hint == "start the sandbox from its files instead"


async def test_a_failed_restore_leaves_nothing_behind(lab: Lab):
    guest = await lab.start("one")
    memory = lab.storage.sandbox_memory("one")
    await lab.dump(guest, memory, leave_running=False)
    mounts_before = lab.mounts()
    lab.checkpointer.id_namespace(lab.base(7))  # cached from here on
    gc.collect()
    fds_before = len(list(Path("/proc/self/fd").iterdir()))

    def refuse(pid: int) -> None:
        raise UnavailableError(f"no address for {pid}")

    with pytest.raises(UnavailableError, match="no address"):
        await lab.restore("one", memory, connect_network=refuse, slot=7)
    await poll(lambda: not lab.groups.is_populated("s7"))
    assert lab.mounts() == mounts_before
    assert len(list(Path("/proc/self/fd").iterdir())) <= fds_before
    await poll(lambda: lab.groups.remove("s7"))
    back = await lab.restore("one", memory)
    signal.pidfd_send_signal(back.pidfd, 0)
    assert lab.mounts() == mounts_before


async def test_a_restored_sandbox_can_be_dumped_repeatedly(lab: Lab):
    guest = await lab.start("one")
    await guest.spawn("python3", "-c", COUNTER, flags=SpawnFlags.PTY)
    last, secret = await counting(guest)
    for _ in range(3):
        await lab.dump(guest, lab.storage.sandbox_memory("one"), leave_running=False)
        guest = await lab.restore("one", lab.storage.sandbox_memory("one"), keep_connections=True)
        count, same = await counting(guest)
        assert (count > last, same) == (True, secret)
        last = count


async def test_init_is_inaccessible_from_inside_before_and_after_a_restore(lab: Lab):
    attempts = (
        "cat /proc/1/fd/101 /proc/1/maps /proc/1/mem /proc/1/environ /proc/1/syscall; "
        "ls /proc/1/root/ /proc/1/cwd/; cat /proc/1/exe; "
        "python3 -c 'import ctypes, os; fd = os.pidfd_open(1); "
        "libc = ctypes.CDLL(None, use_errno=True); "
        "print(libc.syscall(438, fd, 101, 0), ctypes.get_errno(), "
        "libc.ptrace(16, 1, 0, 0), ctypes.get_errno())'"
    )
    guest = await lab.start("one")
    before = await guest.run("sh", "-c", attempts)
    await lab.dump(guest, lab.storage.sandbox_memory("one"), leave_running=False)
    back = await lab.restore("one", lab.storage.sandbox_memory("one"))
    after = await back.run("sh", "-c", attempts)
    for output in (before, after):
        assert "-1 1 -1 1" in output
        allowed = [line for line in output.splitlines() if "ermi" not in line]
        assert allowed == ["-1 1 -1 1"]


async def test_the_host_can_unmount_disks_mounted_at_the_first_dump(lab: Lab, tmp_path: Path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        guest = await lab.start("one")
        await lab.dump(guest, lab.storage.sandbox_memory("one"), leave_running=True)
        namespace = f"/proc/self/fd/{lab.checkpointer._mount_namespace._namespace}"
        seen = subprocess.run(
            ["nsenter", f"--mount={namespace}", "cat", "/proc/self/mountinfo"],
            capture_output=True,
            text=True,
            check=True,
            pass_fds=[lab.checkpointer._mount_namespace._namespace],
        ).stdout
        points = {line.split()[4] for line in seen.splitlines()}
        assert {"/", "/proc", "/dev", "/run", "/tmp"} <= points
        assert str(disk) not in points
        assert str(lab.directory / "storage" / "pool") not in points


async def test_a_mount_that_disappears_during_the_first_dump_is_ignored(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    guest = await lab.start("one")
    disk = tmp_path / "disk"
    disk.mkdir()
    disks.mount(disk, "1m")
    read = mounts.parse_mountinfo

    def gone_when_read(text: str) -> list[mounts.MountEntry]:
        found = read(text)
        if os.path.ismount(disk):
            assert str(disk) in [one.point for one in found]
            disks.unmount(disk)
            disk.rmdir()
        return found

    monkeypatch.setattr(mounts, "parse_mountinfo", gone_when_read)
    await lab.dump(guest, lab.storage.sandbox_memory("one"), leave_running=True)
    assert not disk.exists()


async def test_failures_of_criu_have_a_reason(lab: Lab):
    guest = await lab.start("one")
    memory = lab.storage.sandbox_memory("one")
    with pytest.raises(UnavailableError, match="is gone"):
        await lab.dump(Guest("one", guest.slot, 2**22 + 1, guest.pidfd), memory, leave_running=True)
    await lab.dump(guest, memory, leave_running=False)
    box = lab.storage.find("one")
    assert box is not None
    for program, groups, said in (
        (lab.checkpointer._criu.path, ("/sys/fs/cgroup/not/there",), "could not be joined"),
        (Path("/nowhere/criu"), (), "could not be started"),
        (Path("/bin/true"), (), "status 0 and without a reply"),
    ):
        checkpointer = Checkpointer(program)
        (root,) = await lab.launcher.mount_root(
            checkpointer.id_namespace(lab.base(9)), lab.root_of(9, box.path)
        )
        mount_root = functools.partial(_copy_of, root)  # it may never be called
        request = Restore(images=memory, id_base=lab.base(9), mount_root=mount_root, groups=groups)
        with pytest.raises(UnavailableError, match=said):
            await asyncio.to_thread(checkpointer.restore, request)
        os.close(root)
        checkpointer.close()


def _copy_of(root: int, _: StoredMemory) -> RestoreMounts:
    return RestoreMounts(root=os.dup(root))
