"""Every kind of file is unchanged after every kind of pause."""

import json
import os

import pytest

from paddock.runtime.port import Blueprint, Instance
from tests.runtime.local.inside import run

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

PLACES = ("/root", "/home", "/tmp", "/var/tmp", "/srv", "/etc")
MEMORY = "/dev/shm"
"""On tmpfs: lost by a pause that keeps files only."""

MAKE = """
import os
home = "/root/kept"
os.mkdir(home)
os.chdir(home)
for number in range(300):
    os.makedirs(f"deep/{number % 7}/{number % 11}", exist_ok=True)
    open(f"deep/{number % 7}/{number % 11}/{number}", "w").write("x" * number)
open("large", "wb").write(os.urandom(3 << 20))  # not synced
with open("sparse", "wb") as file:
    file.seek(5 << 20)
    file.write(b"end")
open("empty", "w").close()
open("na\\u00efve \\U0001f600 " + "n" * 200, "w").write("name")
os.symlink("nowhere", "dangling")
os.link("large", "linked")
os.mkfifo("pipe")
os.setxattr("empty", "user.note", b"kept")
for name, mode in (("secret", 0o600), ("program", 0o6755), ("closed", 0o000)):
    open(name, "w").write(name)
    os.chmod(name, mode)
os.chown("secret", 1000, 1000)
os.utime("secret", ns=(10**18 + 7, 10**18 + 7))
os.mkdir("sticky")
os.chmod("sticky", 0o1777)
# Files of the image: changed, removed, replaced by an empty directory, moved.
open("/etc/passwd", "a").write("# and a line\\n")
os.remove("/etc/debian_version")
for root, names, files in os.walk("/etc/skel", topdown=False):
    for name in files:
        os.remove(f"{root}/{name}")
    for name in names:
        os.rmdir(f"{root}/{name}")
os.rmdir("/etc/skel")
os.mkdir("/etc/skel")
os.rename("/etc/profile", "/etc/profile.moved")
for place in ("/tmp", "/var/tmp", "/srv", "/home", "/dev/shm"):
    open(f"{place}/also", "w").write(place)
"""

LOOK = """
import hashlib, json, os, stat, sys
OWN = {"/etc/hostname", "/etc/hosts", "/etc/resolv.conf"}  # rewritten by the node at every start
def seen(path):
    it = os.lstat(path)
    said = [oct(it.st_mode), it.st_uid, it.st_gid, it.st_nlink]
    if stat.S_ISLNK(it.st_mode):
        return [*said, os.readlink(path)]
    if stat.S_ISREG(it.st_mode):
        whole = hashlib.sha256(open(path, "rb").read()).hexdigest()
        notes = {name: os.getxattr(path, name).hex() for name in os.listxattr(path)}
        # CRIU packs tmpfs with tar, which stores whole seconds only.
        exact = 10**9 if path.startswith("/dev/shm") else 1
        return [*said, it.st_size, it.st_mtime_ns // exact, whole, notes]
    return said
found = {}
for place in sys.argv[1:]:
    for root, names, files in os.walk(place):
        for path in (root, *(f"{root}/{name}" for name in (*names, *files))):
            if path not in OWN and path not in found:
                found[path] = seen(path)
print(json.dumps(found))
"""


async def python(instance: Instance, code: str, *arguments: str) -> str:
    """Run a Python program inside without writing it to a file of the sandbox."""
    words = " ".join(arguments)
    done = await run(instance, f"python3 - {words} <<'END'\n{code}\nEND")
    assert not done.error, done.error
    return done.out


@pytest.mark.parametrize("pause", ["freeze", "hibernate", "stop"])
async def test_every_kind_of_file_is_unchanged_after_a_pause(node, pause: str) -> None:
    if pause == "hibernate" and not (await node.runtime.capabilities()).can_checkpoint:
        pytest.skip("memory cannot be stored on this machine")
    uid = f"f{os.urandom(4).hex()}"
    instance = await node.runtime.create(Blueprint(uid=uid, image="host"))
    try:
        await python(instance, MAKE)
        places = PLACES if pause == "stop" else (*PLACES, MEMORY)
        before = json.loads(await python(instance, LOOK, *places))
        assert len(before) > 350
        for _ in range(2):
            await getattr(node.runtime, pause)(uid)
            resume = node.runtime.thaw if pause == "freeze" else node.runtime.restore
            again = await resume(uid)
            assert json.loads(await python(again, LOOK, *places)) == before
    finally:
        await node.runtime.destroy(uid)
