"""Behaviour of the local driver beyond the contract, checked inside real sandboxes."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from paddock.kit.errors import InvalidError, NotFoundError
from paddock.runtime.local.images import base_directory
from paddock.runtime.local.net.netns import socket_in
from paddock.runtime.port import AgentConfig, Blueprint, Instance, Limits
from tests.runtime.local.inside import begin, run
from tests.runtime.local.nodes import eventually

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

# Overwritten in place by one write: a reader never finds an empty file.
COUNT = "i=0; while true; do i=$((i+1)); printf '%09d\\n' $i 1<>/tmp/count; sleep 0.01; done"


@pytest.fixture
async def make(node):
    made = []

    async def create(**changes) -> Instance:
        uid = changes.pop("uid", f"l{os.urandom(4).hex()}")
        made.append(uid)
        changes.setdefault("image", "host")
        return await node.runtime.create(Blueprint(uid=uid, **changes))

    create.also = made.append
    yield create
    for uid in made:
        await node.runtime.destroy(uid)
    for stored in await node.runtime.checkpoints():
        await node.runtime.delete_checkpoint(stored.id)


async def count(instance) -> int:
    return int((await run(instance, "cat /tmp/count")).out or 0)


async def test_an_invalid_uid_is_refused(make):
    for uid in ("../x", "", "a/b", ".hidden", "x" * 64):
        with pytest.raises(InvalidError):
            await make(uid=uid)


async def test_an_unknown_image_is_refused_with_a_hint(make):
    with pytest.raises(NotFoundError) as caught:
        await make(image="nowhere")
    assert caught.value.hint


async def test_a_warm_pool_member_has_its_envd_before_the_first_call(node, make):
    instance = await make(agent=AgentConfig(is_reserved=True))

    await node.runtime.start(instance.uid)

    control = Path(instance.address.envd.removeprefix("unix:")).with_name("control.sock")
    assert await eventually(control.exists)
    await node.runtime.configure(instance.uid, AgentConfig(sandbox_id="mine"))
    assert (await run(instance, "echo $E2B_SANDBOX_ID")).out == "mine\n"


async def test_host_name_and_address_are_set_inside(make):
    instance = await make(hostname="my-box")
    out = (await run(instance, "hostname; cat /etc/hostname; getent hosts my-box")).out.split()
    assert out[:2] == ["my-box", "my-box"]
    assert instance.address.ip in out


async def test_users_and_homes_are_those_of_the_image(make):
    instance = await make()
    assert (await run(instance, "id -un; pwd", user="user")).out == "user\n/home/user\n"
    assert (await run(instance, "id -u", user="root")).out == "0\n"
    assert (await run(instance, "touch ~/mine && stat -c %U ~/mine", user="user")).out == "user\n"


async def test_the_token_of_a_claim_is_required_at_once(node, make):
    instance = await make()
    await run(instance, "true")
    await node.runtime.configure(instance.uid, AgentConfig(access_token="s3", env={"WHO": "me"}))
    with pytest.raises(AssertionError):
        await run(instance, "true")
    assert (await run(instance, "echo $WHO", token="s3")).out == "me\n"


async def test_start_and_ready_commands_run_and_their_output_is_logged(node, make):
    instance = await make(
        start_command="echo hello from $GREETED; echo oh >&2; sleep 0.2; touch /tmp/up; sleep 99",
        ready_command="test -e /tmp/up",
        ready_timeout_seconds=20,
        env={"GREETED": "here"},
    )
    await node.runtime.start(instance.uid)
    assert (await run(instance, "test -e /tmp/up && echo up")).out == "up\n"
    lines = {(line.level, line.message) for line in await node.runtime.logs(instance.uid)}
    assert {("info", "hello from here"), ("error", "oh")} <= lines
    await node.runtime.start(instance.uid)
    assert (await run(instance, "pgrep -fc 'sleep 99$'")).out.strip() in ("1", "2")


async def test_a_frozen_sandbox_uses_no_cpu_and_continues_when_thawed(node, make):
    instance = await make()
    await begin(instance, COUNT)
    await eventually(lambda: _is_counting(instance))
    await node.runtime.freeze(instance.uid)
    group = await _group(node, instance)
    before = _cpu(group)
    await asyncio.sleep(0.3)
    assert _cpu(group) - before < 5000
    await node.runtime.thaw(instance.uid)
    first = await count(instance)
    await eventually(lambda: _is_beyond(instance, first))


async def _is_counting(instance) -> bool:
    return await count(instance) > 3


async def _is_beyond(instance, number) -> bool:
    return await count(instance) > number


async def _group(node, instance) -> Path:
    pid = (await node.facts())["inits"][instance.uid]
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    path = next(line for line in lines if line.startswith("0::"))[3:]
    mounts = Path("/proc/mounts").read_text().splitlines()
    unified = next(m.split()[1] for m in mounts if " cgroup2 " in m)
    return Path(unified + path)


def _cpu(group: Path) -> int:
    return int((group / "cpu.stat").read_text().split("usage_usec")[1].split()[0])


async def test_processes_and_files_continue_after_hibernation(node, make):
    if not (await node.runtime.capabilities()).can_checkpoint:
        pytest.skip("memory cannot be stored on this machine")
    instance = await make()
    pid = await begin(instance, COUNT)
    await eventually(lambda: _is_counting(instance))
    await node.runtime.hibernate(instance.uid)
    assert instance.uid not in (await node.facts())["inits"]
    again = await node.runtime.restore(instance.uid)
    first = await count(again)
    assert first > 3
    assert again.address.ip == instance.address.ip
    await eventually(lambda: _is_beyond(again, first))
    assert (await run(again, f"kill -0 {pid} && echo same")).out == "same\n"


async def test_forks_have_their_own_memory_files_and_address(node, make):
    if not (await node.runtime.capabilities()).can_checkpoint:
        pytest.skip("memory cannot be stored on this machine")
    parent = await make()
    await begin(parent, COUNT)
    await eventually(lambda: _is_counting(parent))
    blueprints = tuple(Blueprint(uid=f"k{os.urandom(4).hex()}", hostname=f"kid{n}") for n in (1, 2))
    for blueprint in blueprints:
        make.also(blueprint.uid)
    kids = await node.runtime.fork(parent.uid, blueprints)
    assert all(isinstance(kid, Instance) for kid in kids), kids
    assert len({parent.address.ip, *(kid.address.ip for kid in kids)}) == 3
    for number, kid in enumerate(kids, 1):
        first = await count(kid)
        assert first > 3
        await eventually(lambda kid=kid, first=first: _is_beyond(kid, first))
        out = (await run(kid, "hostname; ip -4 -o addr show eth0")).out
        assert out.startswith(f"kid{number}\n")
        assert kid.address.ip in out
    await run(kids[0], "echo one > /tmp/mine")
    assert (await run(kids[1], "test -e /tmp/mine || echo no")).out == "no\n"


async def test_a_stopped_sandbox_keeps_only_its_files(node, make):
    instance = await make()
    await run(instance, "echo kept > /root/file; sleep 999 >/dev/null 2>&1 &")
    await node.runtime.stop(instance.uid)
    again = await node.runtime.restore(instance.uid)
    assert (await run(again, "cat /root/file; pgrep -c sleep")).out == "kept\n0\n"


async def test_a_checkpoint_has_the_files_of_its_time(node, make):
    parent = await make()
    await run(parent, "echo before > /root/file")
    await node.runtime.snapshot(parent.uid, "cp-files", memory=False, keep_running=True)
    await run(parent, "echo after > /root/file")
    child = await make(checkpoint_id="cp-files")
    assert (await run(child, "cat /root/file")).out == "before\n"
    assert (await run(parent, "cat /root/file")).out == "after\n"


async def test_ports_on_loopback_are_reachable_through_the_network_namespace(node, make):
    instance = await make()
    server = 'import socket as s; l = s.create_server(("127.0.0.1", 8000)); '
    server += 'c, _ = l.accept(); c.sendall(b"hi")'
    await begin(instance, f"/usr/bin/python3 -c '{server}'")
    netns = await node.runtime.netns(instance.uid)

    async def connects() -> bytes:
        with socket_in(netns, socket.AF_INET) as sock:
            sock.settimeout(20)
            try:
                sock.connect(("127.0.0.1", 8000))
            except ConnectionRefusedError:
                return b""
            return sock.recv(2)

    try:
        assert await eventually(connects) == b"hi"
    finally:
        os.close(netns)


async def test_limits_are_enforced_by_the_kernel(node, make):
    instance = await make(limits=Limits(cpu_millis=200, memory_bytes=96 << 20, pids=50))
    spin = "import time; t = time.monotonic(); [0 for _ in range(8 * 10**6)]; "
    spin += "print(time.process_time() / (time.monotonic() - t))"
    share = float((await run(instance, f"/usr/bin/python3 -c '{spin}'")).out)
    assert share < 0.6
    usage = await node.runtime.usage(instance.uid)
    assert usage.cpu_seconds > 0
    assert usage.memory_total_bytes == 96 << 20


async def test_the_base_image_runs_with_sudo(make):
    if not base_directory().exists():
        pytest.skip("the base image is not built on this machine")
    instance = await make(image="base")
    assert (await run(instance, "sudo -n id -u", user="user")).out == "0\n"
    assert "Python 3" in (await run(instance, "python3 --version", user="user")).out


async def test_many_sandboxes_start_concurrently(node, make):
    made = await asyncio.gather(*(make() for _ in range(24)))
    assert len({one.address.ip for one in made}) == 24
    outs = await asyncio.gather(*(run(one, "echo $$") for one in made))
    assert all(out.status == 0 for out in outs)
