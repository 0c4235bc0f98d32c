"""Clones have an identity of their own, from their first moment; pauses keep it."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from paddock.runtime.local.images import ImageStore
from paddock.runtime.local.node.records import StateDirectory
from paddock.runtime.port import AgentConfig, Blueprint, Instance
from tests.runtime.local.images.small_roots import shell_root
from tests.runtime.local.inside import run, start
from tests.runtime.local.nodes import TestNode, eventually, wait_for_warm

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(240)]

LOOK = """
echo machine $(cat /etc/machine-id)
echo dbus $(cat /var/lib/dbus/machine-id)
echo hostname $(hostname) $(cat /etc/hostname)
echo boot $(cat /proc/sys/kernel/random/boot_id)
echo generation $(cat /run/paddock/generation)
echo id $(cat /run/e2b/.E2B_SANDBOX_ID)
echo mac $(cat /sys/class/net/eth0/address)
echo ip $(hostname -I)
"""
PER_BOOT = {"boot"}
LOG = "/root/hooks"
HOOK = f"""#!/bin/sh
echo "$PADDOCK_GENERATION" "$(cat /run/paddock/generation)" "$(id -u)" >> {LOG}
"""


async def look(instance: Instance, token: str) -> dict[str, str]:
    outcome = await run(instance, LOOK, token=token)
    assert (outcome.status, outcome.error) == (0, "")
    return dict(line.split(" ", 1) for line in outcome.out.splitlines())


def blueprint(uid: str, **fields: object) -> Blueprint:
    agent = AgentConfig(sandbox_id=f"id-{uid}", access_token=f"token-of-{uid}")
    return Blueprint(uid=uid, image="host", agent=agent, **fields)


async def text(instance: Instance, path: str, token: str) -> str:
    return (await run(instance, f"cat {path} 2>/dev/null", token=token)).out


@pytest.fixture
async def source(node: TestNode):
    """A sandbox with a hook, and with a copy of its machine id as D-Bus makes it."""
    made = await node.runtime.create(blueprint("source"))
    script = f"""
mkdir -p /etc/paddock/clone.d /var/lib/dbus && cp /etc/machine-id /var/lib/dbus/ &&
cat > /etc/paddock/clone.d/10-note <<'X' && chmod 755 /etc/paddock/clone.d/10-note
{HOOK}
X
"""
    outcome = await run(made, script, token="token-of-source")
    assert outcome.status == 0, outcome
    yield made
    for uid in ("source", "one", "two", "three", "four"):
        await node.runtime.destroy(uid)
    for stored in await node.runtime.checkpoints():
        await node.runtime.delete_checkpoint(stored.id)


async def test_clones_share_no_identity_with_their_source_or_each_other(node, source):
    runtime = node.runtime
    before = await look(source, "token-of-source")
    forks = await runtime.fork("source", (blueprint("one"), blueprint("two")))
    assert all(isinstance(fork, Instance) for fork in forks), forks
    await runtime.snapshot("source", "memory", memory=True, keep_running=True)
    await runtime.snapshot("source", "files", memory=False, keep_running=True)
    third = await runtime.create(blueprint("three", checkpoint_id="memory"))
    fourth = await runtime.create(blueprint("four", checkpoint_id="files"))
    assert await look(source, "token-of-source") == before  # a snapshot changes nothing
    clones = dict(zip(("one", "two", "three", "four"), (*forks, third, fourth), strict=True))
    seen = {"source": before}
    for uid, clone in clones.items():
        seen[uid] = await look(clone, f"token-of-{uid}")
        with pytest.raises(AssertionError, match="401"):
            await look(clone, "token-of-source")
    for name in before:
        values = [of[name] for of in seen.values()]
        assert len(set(values)) == len(values), (name, values)
    for uid, of in seen.items():
        assert of["hostname"] == f"id-{uid} id-{uid}"
        assert of["id"] == f"id-{uid}"
        assert of["dbus"] == of["machine"]
        assert len(of["machine"]) == 32

    # Pauses of each kind keep the identity, except that a restart changes the boot id.
    for uid in ("one", "four"):
        await runtime.freeze(uid)
        await runtime.thaw(uid)
        await runtime.hibernate(uid)
        assert await look(await runtime.restore(uid), f"token-of-{uid}") == seen[uid]
        await runtime.stop(uid)
        after = await look(await runtime.restore(uid), f"token-of-{uid}")
        differences = {name for name in after if after[name] != seen[uid][name]}
        assert PER_BOOT <= differences <= PER_BOOT | {"ip", "mac"}


async def test_hooks_run_once_per_clone_and_never_on_resume(node, source):
    runtime = node.runtime
    assert await text(source, LOG, "token-of-source") == ""
    one, two = await runtime.fork("source", (blueprint("one"), blueprint("two")))
    await runtime.snapshot("source", "files", memory=False, keep_running=True)
    three = await runtime.create(blueprint("three", checkpoint_id="files"))
    for uid, clone in (("one", one), ("two", two), ("three", three)):
        generation = (await look(clone, f"token-of-{uid}"))["generation"]
        assert await text(clone, LOG, f"token-of-{uid}") == f"{generation} {generation} 0\n"
    await runtime.freeze("one")
    await runtime.thaw("one")
    await runtime.hibernate("one")
    await runtime.restore("one")
    await runtime.stop("one")
    again = await runtime.restore("one")
    assert len((await text(again, LOG, "token-of-one")).splitlines()) == 1
    await runtime.hibernate("source")
    restored = await runtime.restore("source")
    assert await text(restored, LOG, "token-of-source") == ""
    # A clone of a clone is one more clone.
    (four,) = await runtime.fork("two", (blueprint("four"),))
    assert len((await text(four, LOG, "token-of-four")).splitlines()) == 2


async def test_a_restored_process_sees_the_new_generation_at_once(node, source):
    program = """
def read(path):
    with open(path) as file:
        return file.read().strip()
with open("/root/ready", "w"): pass
last = None
while True:
    # The boot id of a clone is mounted before its processes run: it marks that moment.
    now = read("/proc/sys/kernel/random/boot_id"), read("/run/paddock/generation")
    if now != last:
        with open("/root/seen", "a") as file:
            print(*now, file=file)
    last = now
"""
    await run(source, f"cat > /root/watch.py <<'X'\n{program}\nX", token="token-of-source")
    await start_watch(source)
    (clone,) = await node.runtime.fork("source", (blueprint("one"),))
    await asyncio.sleep(0.5)
    before, after = await look(source, "token-of-source"), await look(clone, "token-of-one")
    old, new = ((of["boot"], of["generation"]) for of in (before, after))
    seen = {
        uid: [tuple(line.split()) for line in lines.splitlines()]
        for uid, lines in {
            "source": await text(source, "/root/seen", "token-of-source"),
            "one": await text(clone, "/root/seen", "token-of-one"),
        }.items()
    }
    assert seen["source"] == [old]
    between = (old[0], new[1])  # it was stopped between the two reads
    assert [pair for pair in seen["one"] if pair != between] == [old, new]


async def start_watch(instance: Instance) -> None:
    script = "setsid python3 /root/watch.py >/dev/null 2>&1 & sleep 0.3; test -e /root/ready"
    assert (await run(instance, script, token="token-of-source")).status == 0


async def test_failing_and_hanging_hooks_are_reported_and_bounded():
    own = TestNode("--clone-hook-seconds", "1")
    await own.start()
    try:
        made = await own.runtime.create(Blueprint(uid="s", image="host"))
        hooks = """
mkdir -p /etc/paddock/clone.d && cd /etc/paddock/clone.d
printf '#!/bin/sh\\necho said; exit 3\\n' > 1-fails
printf 'no program' > 2-not-executable && chmod 644 2-not-executable
printf '#!/no/such/program\\n' > 3-broken
printf '#!/bin/sh\\nsleep 60\\n' > 4-hangs
printf '#!/bin/sh\\ntouch /root/late\\n' > 5-late
ln -s /etc/paddock/clone.d 6-directory; ln -s /proc/1/root/bin/true 7-link
chmod 755 1-fails 3-broken 4-hangs 5-late
"""
        assert (await run(made, hooks)).status == 0
        began = asyncio.get_running_loop().time()
        (clone,) = await own.runtime.fork("s", (Blueprint(uid="c", image="host"),))
        assert isinstance(clone, Instance), clone
        assert asyncio.get_running_loop().time() - began < 10
        assert (await run(clone, "test -e /root/late")).status != 0
        lines = await own.runtime.logs("c")
        assert "said" in [line.message for line in lines]
        reasons = {
            Path(line.fields["hook"]).name: line.fields["reason"]
            for line in lines
            if line.message == "clone hook failed"
        }
        assert reasons["1-fails"] == "exit status 3"
        assert "3-broken" in reasons
        assert reasons["4-hangs"].startswith("killed after")
        assert reasons["5-late"] == "not run: no time left"
        assert "2-not-executable" not in reasons
        assert "6-directory" not in reasons
        assert own.log.read_text().count("clone hook failed") == len(reasons)
        assert (await run(clone, "pgrep -f 4-hangs")).status != 0
        await own.runtime.destroy("c")
        await own.runtime.destroy("s")
    finally:
        await own.stop()


async def test_a_clone_that_ends_while_its_hooks_run_is_not_returned(node, source):
    hook = "/etc/paddock/clone.d/99-slow"
    script = f"printf '#!/bin/sh\\nsleep 9\\n' > {hook}; chmod 755 {hook}"
    assert (await run(source, script, token="token-of-source")).status == 0
    forking = asyncio.create_task(node.runtime.fork("source", (blueprint("one"),)))
    records = StateDirectory(node.state)

    async def is_started() -> int:
        record = dict(records.read_all()).get("one")
        return record.init.pid if record is not None and record.init is not None else 0

    os.kill(await eventually(is_started), signal.SIGKILL)
    (clone,) = await forking
    assert isinstance(clone, str), clone
    assert await node.runtime.inspect("one") is None


async def test_a_node_killed_while_hooks_run_runs_them_again():
    own = TestNode()
    await own.start()
    try:
        made = await own.runtime.create(Blueprint(uid="s", image="host"))
        script = """
mkdir -p /etc/paddock/clone.d
cd /etc/paddock/clone.d && printf '#!/bin/sh\\necho x >> /root/hooks; sleep 4\\n' > 1 && chmod 755 1
"""
        assert (await run(made, script)).status == 0
        await own.runtime.snapshot("s", "cp", memory=True, keep_running=True)
        again = Blueprint(uid="c", image="host", checkpoint_id="cp")
        creating = asyncio.create_task(own.runtime.create(again))
        await asyncio.sleep(2)
        own.kill()
        await own.start()
        # The driver repeats the call, which creates the clone anew: its hooks have run once.
        clone = await creating
        assert (await run(clone, "cat /root/hooks")).out == "x\n"
        await own.runtime.delete_checkpoint("cp")
        await own.runtime.destroy("c")
        await own.runtime.destroy("s")
    finally:
        await own.stop()


async def test_sandboxes_of_one_image_differ_warm_and_cold(node, tmp_path):
    root = shell_root(tmp_path / "root")
    (root / "etc").mkdir()
    (root / "etc/machine-id").write_text("1" * 32 + "\n")
    (root / "etc/machine-id").chmod(0o444)
    plain = shell_root(tmp_path / "plain")
    linked = shell_root(tmp_path / "linked")
    (linked / "etc").mkdir()
    (linked / "etc/machine-id").symlink_to("/run/machine-id")
    (linked / "var").mkdir()
    (linked / "run").symlink_to("/var/run")
    store = ImageStore(node.state / "images")
    ids: list[str] = []
    made: list[str] = []
    try:
        for name, tree in (("with-id", root), ("without-id", plain), ("linked-id", linked)):
            store.add(tree, name)
            for _ in range(2):
                made.append(f"i{len(made)}")
                box = await node.runtime.create(Blueprint(uid=made[-1], image=name))
                done = await start(box, ["/bin/sh", "-c", "cat /etc/machine-id"])
                assert (done.status, done.error) == (0, "")
                ids.append(done.out)
        await wait_for_warm(node)
        for _ in range(2):
            made.append(f"i{len(made)}")
            box = await node.runtime.create(Blueprint(uid=made[-1], image="host"))
            ids.append((await run(box, "cat /etc/machine-id")).out)
        assert len(set(ids)) == len(ids)
        assert all(len(one) == 33 for one in ids)
    finally:
        for uid in made:
            await node.runtime.destroy(uid)


async def test_a_hostile_sandbox_makes_its_clones_write_nothing_outside(node, source, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("machine-id", "generation"):
        (outside / name).write_text("of the machine")
    script = f"""
rm -rf /etc/machine-id /run/paddock /var/lib/dbus /etc/paddock/clone.d
ln -s {outside}/machine-id /etc/machine-id
ln -s {outside} /run/paddock
ln -s {outside} /var/lib/dbus
ln -s /proc/1/root/../../../../../bin /etc/paddock/clone.d
"""
    assert (await run(source, script, token="token-of-source")).status == 0
    (clone,) = await node.runtime.fork("source", (blueprint("one"),))
    assert isinstance(clone, Instance), clone
    assert {path.name: path.read_text() for path in outside.iterdir()} == {
        "machine-id": "of the machine", "generation": "of the machine",
    }  # fmt: skip
    done = await run(
        clone, "cat /etc/machine-id /run/paddock/generation; test ! -L /run/paddock",
        token="token-of-one",
    )  # fmt: skip
    assert done.status == 0
    assert [len(line) for line in done.out.splitlines()] == [32, 36]


async def test_a_process_that_has_the_files_open_is_cloned(node, source):
    script = "exec 3< /etc/machine-id 4< /run/paddock/generation; sleep 600"
    await begin_as(source, script)
    (clone,) = await node.runtime.fork("source", (blueprint("one"),))
    assert isinstance(clone, Instance), clone


async def begin_as(instance: Instance, script: str) -> None:
    done = await run(
        instance, f"setsid bash -c '{script}' >/dev/null 2>&1 & sleep 0.2", token="token-of-source"
    )
    assert done.status == 0
