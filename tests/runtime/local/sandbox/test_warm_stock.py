"""Warm sandboxes: confined like cold ones, configured at claim, never lost or leaked."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from paddock.kit.errors import InvalidError, UnavailableError
from paddock.runtime.local.node.records import (
    RecordPhase,
    SandboxRecord,
    StateDirectory,
    start_ticks,
)
from paddock.runtime.port import AgentConfig, Blueprint, EgressPolicy, InstanceState, Limits
from tests.runtime.local.inside import health, run
from tests.runtime.local.nodes import (
    TestNode,
    eventually,
    resource_name_of,
    traces,
    wait_for_full_stock,
    wait_for_warm,
)

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(240)]

KILL_STEPS = {
    "limits are applied": "sandbox.lifecycle.SandboxLifecycle._apply_differences",
    "the host name is set": "sandbox.lifecycle.set_hostname",
    "the identity files are written": "sandbox.lifecycle.rewrite_identity",
    "the record is written": "node.records.StateDirectory.write",
    "init is attached": "sandbox.sandbox.NodeSandbox.attach_init",
    "envd is attached": "envd.envd_listener.EnvdListener._attach",
    "the reply": "sandbox.warm_stock.WarmStock.mark_claimed",
}


@pytest.fixture
async def warm_node(node):
    await wait_for_warm(node)
    return node


@pytest.fixture
async def box(warm_node):
    """Create sandboxes and check that each one comes from the warm stock."""
    made = []

    async def make(**changes):
        await wait_for_warm(warm_node)
        uid = f"p{os.urandom(4).hex()}"
        made.append(uid)
        instance = await warm_node.runtime.create(Blueprint(uid=uid, image="host", **changes))
        assert resource_name_of(warm_node, uid).startswith("warm-")
        return instance

    yield make
    for uid in made:
        await warm_node.runtime.destroy(uid)


async def test_a_warm_sandbox_is_confined_like_a_cold_one(warm_node, box):
    one, other = await box(), await box()
    pids = (await warm_node.facts())["inits"]
    maps = [Path(f"/proc/{pids[i.uid]}/uid_map").read_text().split() for i in (one, other)]
    assert abs(int(maps[0][1]) - int(maps[1][1])) >= 65536
    for attempt in (
        "mount -t tmpfs none /mnt", "unshare -U true", "unshare -n true", "mknod /tmp/sda b 8 0",
        "nsenter -t 1 -m true", "hostname other", "ip link add dummy0 type dummy", "dmesg",
        "ls /proc/1/root", "cat /proc/1/environ", "chroot /proc/1/root true", "strace -p 1",
        "echo x > /proc/sys/kernel/core_pattern", "echo 1 > /sys/kernel/mm/ksm/run",
        "kill -9 1; sleep 0.1; false", "test -e /sys/fs/cgroup/cgroup.procs",
        f"ping -c 1 -W 1 {other.address.ip}", f"ls {warm_node.directory}",
    ):  # fmt: skip
        assert (await run(one, f"{attempt} 2>/dev/null")).status != 0, attempt
    assert "Seccomp:\t2" in (await run(one, "cat /proc/self/status")).out
    ids = (await run(one, "ps -e -o comm= | sort -u")).out
    assert "envd" not in ids  # envd is not visible inside


async def test_the_waiting_envd_has_no_abstract_socket(box):
    unix = (await run(await box(), "cat /proc/net/unix")).out.splitlines()[1:]
    assert not [line for line in unix if "@" in line]


async def test_a_claimed_warm_sandbox_has_the_requested_host_name(box):
    instance = await box(hostname="mine", agent=AgentConfig(sandbox_id="abc", access_token="t"))
    assert await health(instance) == 204
    said = await run(instance, "hostname; cat /etc/hostname; cat /etc/hosts", token="t")
    assert said.out.splitlines()[:2] == ["mine", "mine"]
    assert said.out.endswith(f"{instance.address.ip} mine\n")
    # The files can be changed inside.
    renamed = await run(instance, "echo x > /etc/hostname && cat /etc/hostname", token="t")
    assert renamed.out == "x\n"


async def test_a_claimed_warm_sandbox_has_the_requested_limits(warm_node, box):
    instance = await box(limits=Limits(memory_bytes=64 << 20, pids=40, disk_bytes=8 << 20))
    hog = "/usr/bin/python3 -c 'x = bytearray(400 << 20)'"
    assert (await run(instance, hog)).status != 0
    assert (await run(instance, "head -c 30000000 /dev/zero > /root/big")).status != 0
    usage = await warm_node.runtime.usage(instance.uid)
    assert usage.memory_total_bytes == 64 << 20
    assert usage.disk_total_bytes == 8 << 20


async def test_a_claimed_warm_sandbox_has_the_requested_egress_policy(warm_node, box):
    server = socket.create_server(("0.0.0.0", 0))
    open_box = await box()
    closed = await box(egress=EgressPolicy(allow_internet=False))
    gateway = (await run(open_box, "ip route show default")).out.split()[2]
    probe = f"timeout 1 bash -c '</dev/tcp/{gateway}/{server.getsockname()[1]}'"
    server.close()
    for instance in (open_box, closed):
        assert (await run(instance, probe)).status != 0  # the host is unreachable with every policy
    # Only our table: other tables on this machine may change while they are read.
    listed = await asyncio.create_subprocess_exec(
        "nft", "list", "table", "inet", f"paddock{warm_node.number}", stdout=asyncio.subprocess.PIPE
    )
    rules = (await listed.communicate())[0].decode()
    assert listed.returncode == 0
    assert open_box.address.ip in rules
    with pytest.raises(InvalidError):
        await warm_node.runtime.create(
            Blueprint(uid="wrong", image="host", egress=EgressPolicy(deny_out=("nonsense",)))
        )
    assert await warm_node.runtime.inspect("wrong") is None


async def test_a_claimed_warm_sandbox_survives_every_pause(warm_node, box):
    runtime = warm_node.runtime
    instance = await box()
    await run(instance, "echo kept > /root/kept")
    await runtime.freeze(instance.uid)
    await runtime.thaw(instance.uid)
    if (await runtime.capabilities()).can_checkpoint:
        await runtime.hibernate(instance.uid)
        await runtime.restore(instance.uid)
    await runtime.stop(instance.uid)
    again = await runtime.restore(instance.uid)
    assert (await run(again, "cat /root/kept")).out == "kept\n"


async def test_another_kind_is_created_cold(warm_node):
    instance = await warm_node.runtime.create(
        Blueprint(uid="locked", image="host", privileges="locked")
    )
    assert await health(instance) == 204
    assert resource_name_of(warm_node, "locked") == ""
    await warm_node.runtime.destroy("locked")


@pytest.fixture
async def own_node():
    node = TestNode()
    await node.start()
    yield node
    await node.stop()


async def test_a_killed_warm_sandbox_is_not_claimed(own_node):
    await own_node.runtime.create(Blueprint(uid="first", image="host"))
    await wait_for_full_stock(own_node)  # no refill while the processes are listed
    inits = set(traces(own_node.state, own_node.number)["processes"])
    inits -= {str(pid) for pid in (await own_node.facts())["inits"].values()}
    lives = {int(pid): start_ticks(int(pid)) for pid in inits}
    for pid in lives:
        os.kill(pid, signal.SIGKILL)
    # A killed process exits only when it is scheduled again, which may take a while;
    # then its pid may be reused.
    await eventually(lambda: all(start_ticks(pid) != lives[pid] for pid in lives), seconds=30)
    for number in range(3):
        instance = await own_node.runtime.create(Blueprint(uid=f"n{number}", image="host"))
        assert await health(instance) == 204
        assert (await run(instance, "echo lives")).out == "lives\n"


@pytest.mark.faults
@pytest.mark.parametrize("step", KILL_STEPS.values(), ids=KILL_STEPS)
async def test_a_kill_at_any_step_of_a_claim_loses_and_leaks_nothing(own_node, step, tmp_path):
    """The node kills itself at a step of the claim; the next node recovers."""
    runtime = own_node.runtime
    own_node.kill()
    own_node.prelude = _kill_node_at(step, tmp_path / "now")
    await own_node.start()
    await runtime.create(Blueprint(uid="first", image="host"))
    await wait_for_full_stock(own_node)
    (tmp_path / "now").touch()
    creating = asyncio.ensure_future(runtime.create(Blueprint(uid="victim", image="host")))
    await own_node.wait_until_it_ends()
    own_node.prelude = ""
    await own_node.start()
    try:
        instance = await creating  # the driver retries
    except UnavailableError:  # on a busy machine the node may start later than the retries
        instance = await runtime.create(Blueprint(uid="victim", image="host"))
    assert instance.state is InstanceState.RUNNING
    assert await health(instance) == 204
    assert (await run(instance, "hostname")).out == "victim\n"
    assert {one.uid for one in await runtime.instances()} == {"first", "victim"}
    for uid in ("first", "victim"):
        await runtime.destroy(uid)

    async def only_warm_stock_is_left() -> bool:
        left, facts = traces(own_node.state, own_node.number), await own_node.facts()
        boxes = list((own_node.state / "storage" / "records" / "boxes").glob("*.json"))
        return facts["warm"] == 8 == len(left["processes"]) and facts["warm_sandboxes"] == len(
            left["links"]
        ) == len(boxes)

    await eventually(only_warm_stock_is_left, seconds=30)


def _kill_node_at(step: str, flag: Path) -> str:
    """Return code that kills the node at a step once the flag file exists."""
    package, module, *path, name = step.split(".")
    return f"""
import importlib, os
holder = importlib.import_module("paddock.runtime.local.{package}.{module}")
for part in {path!r}:
    holder = getattr(holder, part)
real = getattr(holder, {name!r})
def last(*given, **named):
    if os.path.exists({str(flag)!r}):
        os.kill(os.getpid(), 9)
    return real(*given, **named)
setattr(holder, {name!r}, last)
"""


async def test_the_newest_complete_record_is_read(tmp_path):
    # given a record that was written three times
    directory = StateDirectory(tmp_path)
    directory.prepare()
    blueprint = Blueprint(uid="a", image="host", name="x" * 500)
    record = SandboxRecord(
        uid="a", blueprint=blueprint, state=InstanceState.CREATING, slot=1,
        agent=AgentConfig(), egress=EgressPolicy(),
    )  # fmt: skip
    small = SandboxRecord(
        uid="a", blueprint=Blueprint(uid="a"), state=InstanceState.RUNNING, slot=2,
        agent=AgentConfig(), egress=EgressPolicy(), phase=RecordPhase.SETTLED,
    )  # fmt: skip
    for one in (record, record, small):
        directory.write(one)
    # when another process reads it, the last one counts, though it is shorter than the first
    assert dict(StateDirectory(tmp_path).read_all()) == {"a": small}
    # and when the last was cut off, the one before does
    path = tmp_path / "sandboxes" / "a" / "record.0"
    path.write_bytes(path.read_bytes()[:100])
    reader = StateDirectory(tmp_path)
    assert dict(reader.read_all()) == {"a": record}
    # and what is written next comes after both
    reader.write(small)
    assert dict(StateDirectory(tmp_path).read_all()) == {"a": small}
