"""Attaching, detaching, restarting, crashing: nothing is left behind, nothing is lost."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paddock.kit.errors import ConflictError, InvalidError, UnavailableError
from paddock.runtime.local.net import fabric_state, netns
from paddock.runtime.local.net.fabric import Fabric, FabricSettings
from paddock.runtime.local.net.nft import ProgramFirewall
from paddock.runtime.port import EgressPolicy
from tests.runtime.local.net.lab import CLOSED, OTHER_WEB, WEB, Lab, echo, eventually, outcome
from tests.runtime.local.nodes import fabric_number, release_fabric_number

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

ONLY_WEB = EgressPolicy(allow_internet=False, allow_out=(WEB,))


def links(lab: Lab) -> set[str]:
    return {one["ifname"] for one in json.loads(lab.run(lab.host, "ip -j link"))}


def elements(lab: Lab) -> int:
    """Count what the sets hold for sandboxes, not what the kernel counts by itself."""
    listing = json.loads(lab.run(lab.host, "nft -j list table inet paddock"))["nftables"]
    counted = 0
    for entry in listing:
        found = entry.get("set") or entry.get("map")
        if found and found["name"] not in ("never", "private", "flows", "queries"):
            counted += len(found.get("elem", ()))
    return counted


async def test_two_hundred_come_and_go_without_a_trace(lab: Lab):
    before = links(lab), elements(lab)
    spaces = [netns.create() for _ in range(200)]
    policy = EgressPolicy(deny_out=("198.51.100.16/28", "192.0.2.0/24"))
    places = [
        await lab.fabric.attach(f"box-{number}", space, policy=policy)
        for number, space in enumerate(spaces)
    ]
    assert len({place.ip for place in places}) == 200
    assert len(links(lab)) == len(before[0]) + 200
    # Sandboxes with the same networks share them, so that changes stay cheap.
    assert lab.run(lab.host, "nft list set inet paddock denied").count("/") == 2
    assert await outcome(spaces[0], WEB) == await outcome(spaces[199], WEB) == "open"

    await asyncio.gather(*(lab.fabric.detach(f"box-{number}") for number in range(200)))

    assert (links(lab), elements(lab)) == before
    assert list((lab.directory / "net").iterdir()) == []
    assert lab.fabric.attached() == ()
    assert "213" not in lab.run(spaces[0], "ip -br link")
    for space in spaces:
        os.close(space)


async def test_attaching_twice_is_attaching_once(lab: Lab):
    box = await lab.sandbox(ONLY_WEB)
    before = links(lab), elements(lab)

    again = await lab.fabric.attach(box.uid, box.netns_fd)

    assert again == box.attachment == lab.fabric.inspect(box.uid)
    assert (links(lab), elements(lab)) == before
    assert await box.outcome(WEB) == "open"
    assert await box.outcome(OTHER_WEB) == "ECONNREFUSED"


async def test_attaching_again_with_another_namespace_moves_the_sandbox(lab: Lab):
    box = await lab.sandbox(ONLY_WEB)
    space = netns.create()
    lab.stack.callback(os.close, space)

    moved = await lab.fabric.attach(box.uid, space)

    assert moved.ip == box.ip
    assert await outcome(space, WEB) == "open"
    assert await outcome(space, OTHER_WEB) == "ECONNREFUSED"
    assert "eth0" not in lab.run(box.netns_fd, "ip -br link")


async def test_detaching_the_unknown_is_no_error_and_twice_is_once(lab: Lab):
    box = await lab.sandbox()
    await lab.fabric.detach("nobody")
    await asyncio.gather(lab.fabric.detach(box.uid), lab.fabric.detach(box.uid))
    await lab.fabric.detach(box.uid)

    assert lab.fabric.inspect(box.uid) is None
    assert await box.outcome(WEB) == "ENETUNREACH"


async def test_a_hibernated_sandbox_keeps_address_and_policy_also_over_a_restart(lab: Lab):
    box = await lab.sandbox(ONLY_WEB)
    empty = links(lab) - {box.attachment.link}
    await lab.fabric.detach(box.uid, keep_address=True)
    assert (links(lab), elements(lab)) == (empty, 0)
    assert lab.fabric.inspect(box.uid) is None
    await lab.fabric.close()
    await lab.open()

    await lab.fabric.release_all_unknown({box.uid})
    again = await lab.fabric.attach(box.uid, lab.stack.enter_context(Space()).fd)

    assert again == box.attachment
    with pytest.raises(ConflictError):
        await lab.fabric.attach("thief", lab.host, box.attachment.slot)
    await lab.fabric.set_policy(box.uid, CLOSED)


async def test_the_first_packet_to_a_new_sandbox_arrives_however_busy_the_kernel_is(lab: Lab):
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            os.close(netns.create())

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        with netns.socket_in(lab.host, socket.AF_INET, socket.SOCK_DGRAM) as host:
            for number in range(25):
                space = lab.stack.enter_context(Space()).fd
                with netns.socket_in(space, socket.AF_INET, socket.SOCK_DGRAM) as inside:
                    inside.bind(("0.0.0.0", 99))
                    inside.settimeout(10)
                    place = await lab.fabric.attach(f"busy-{number}", space)
                    host.sendto(b"first", (place.ip, 99))
                    assert inside.recv(10) == b"first"
    finally:
        stop.set()
        thread.join()


async def test_a_slot_can_be_asked_for_and_belongs_to_one(lab: Lab):
    first = await lab.fabric.attach("first", lab.stack.enter_context(Space()).fd, 77)
    assert (first.slot, first.ip) == (77, "10.213.0.79")

    with pytest.raises(ConflictError, match="slot 77 belongs to sandbox first"):
        await lab.fabric.attach("second", lab.host, 77)
    with pytest.raises(ConflictError, match="has slot 77"):
        await lab.fabric.attach("first", lab.host, 78)
    with pytest.raises(InvalidError):
        await lab.fabric.attach("second", lab.host, 70000)


async def test_a_failed_attachment_leaves_nothing(lab: Lab):
    before = links(lab), elements(lab)
    with (
        Path("/dev/null").open() as not_a_namespace,
        pytest.raises(OSError, match="network namespace"),
    ):
        await lab.fabric.attach("broken", not_a_namespace.fileno())
    with pytest.raises(InvalidError):
        await lab.fabric.attach("../escape", lab.host)
    with pytest.raises(InvalidError):
        await lab.fabric.attach("bad", lab.host, policy=EgressPolicy(allow_out=("300.1.1.1",)))

    assert (links(lab), elements(lab)) == before
    assert lab.fabric.attached() == ()


async def test_a_restart_keeps_connections_policies_names_and_adopts_everything(lab: Lab):
    lab.names.addresses = {"example.com": [OTHER_WEB]}
    box = await lab.sandbox(ONLY_WEB)
    named = await lab.sandbox(EgressPolicy(allow_internet=False, allow_out=("example.com",)))
    await named.ask("example.com")
    with await box.connect(WEB) as kept:
        await echo(kept)
        await lab.fabric.close()
        assert await echo(kept) == b"hello"  # Without us the network goes on.
        assert await box.outcome(OTHER_WEB) == "ECONNREFUSED"

        await lab.open()

        assert await echo(kept) == b"hello"
    assert lab.fabric.inspect(box.uid) == box.attachment
    assert await box.outcome(WEB) == "open"
    assert await box.outcome(OTHER_WEB) == "ECONNREFUSED"
    assert await named.outcome(OTHER_WEB) == "open"
    assert (await named.ask("example.com")).addresses == [OTHER_WEB]
    assert (await named.ask("example.org")).code == 5
    await lab.fabric.set_policy(named.uid, CLOSED)
    assert await named.outcome(OTHER_WEB) == "ECONNREFUSED"


async def test_a_restart_mends_a_firewall_that_somebody_flushed(lab: Lab):
    box = await lab.sandbox(ONLY_WEB)
    await lab.fabric.close()
    lab.run(lab.host, "nft flush ruleset")

    await lab.open()

    assert await box.outcome(WEB) == "open"
    assert await box.outcome(OTHER_WEB) == "ECONNREFUSED"


async def test_a_change_mends_a_firewall_that_somebody_flushed(lab: Lab):
    box, neighbour = await lab.sandbox(), await lab.sandbox(CLOSED)
    lab.run(lab.host, "nft flush ruleset")

    await lab.fabric.set_policy(box.uid, ONLY_WEB)

    assert await box.outcome(WEB) == "open"
    assert await box.outcome(OTHER_WEB) == "ECONNREFUSED"
    assert await neighbour.outcome(WEB) == "ECONNREFUSED"


async def test_a_sandbox_whose_record_is_lost_or_broken_is_closed(lab: Lab):
    lost, broken = await lab.sandbox(), await lab.sandbox()
    await lab.fabric.close()
    (lab.directory / "net" / f"{lost.uid}@1.json").unlink()
    (lab.directory / "net" / f"{broken.uid}@1.json").write_text('{"uid": "box')

    await lab.open()

    assert lab.fabric.inspect(lost.uid) == lost.attachment
    for box in (lost, broken):
        assert await box.outcome(WEB) == "ECONNREFUSED"
        await lab.fabric.set_policy(box.uid, EgressPolicy())
        assert await box.outcome(WEB) == "open"


async def test_the_reaper_keeps_the_known_and_removes_the_rest(lab: Lab):
    before = links(lab)
    known, unknown = await lab.sandbox(), await lab.sandbox()
    lab.run(lab.host, "ip link add pd-fff type veth peer name stray0")

    removed = await lab.fabric.release_all_unknown({known.uid})

    assert removed == (unknown.uid,)
    assert links(lab) == before | {known.attachment.link}
    assert await known.outcome(WEB) == "open"
    assert await lab.fabric.release_all_unknown({known.uid}) == ()


async def test_a_namespace_that_dies_by_itself_can_be_detached(lab: Lab):
    before = links(lab), elements(lab)
    space = netns.create()
    await lab.fabric.attach("dying", space)
    os.close(space)
    await eventually(lambda: links(lab) == before[0])

    await lab.fabric.detach("dying")

    assert (links(lab), elements(lab)) == before


async def test_without_the_library_the_nft_program_does_the_same(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
):
    await lab.fabric.close()
    program = shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin")
    assert program is not None
    monkeypatch.setattr(fabric_state, "open_firewall", lambda fd: ProgramFirewall(program, fd))
    lab.names.addresses = {"example.com": [OTHER_WEB]}
    for _ in range(2):
        await lab.open()
        box = await lab.sandbox(ONLY_WEB, uid="box")
        assert await box.outcome(WEB) == "open"
        await lab.fabric.set_policy(
            box.uid, EgressPolicy(allow_internet=False, allow_out=("example.com",))
        )
        assert await box.outcome(WEB) == "ECONNREFUSED"
        await box.ask("example.com")
        assert await box.outcome(OTHER_WEB) == "open"
        await lab.fabric.close()
    await lab.open()


async def test_a_namespace_of_an_unprivileged_user_namespace_is_served_too(lab: Lab):
    process = await asyncio.create_subprocess_exec("unshare", "-U", "-n", "sleep", "50")
    try:
        own = netns.current()
        lab.stack.callback(os.close, own)

        def is_apart() -> bool:
            there = Path(f"/proc/{process.pid}/ns/net").stat()
            return (there.st_dev, there.st_ino) != netns.identity(own)

        await eventually(is_apart)
        space = netns.open_of(process.pid)
        lab.stack.callback(os.close, space)
        await lab.fabric.attach("rootless-inside", space, policy=ONLY_WEB)

        assert await outcome(space, WEB) == "open"
        assert await outcome(space, OTHER_WEB) == "ECONNREFUSED"
    finally:
        process.kill()
        await process.wait()


async def test_one_machine_has_one_fabric_of_a_name(lab: Lab):
    with pytest.raises(ConflictError, match="another node"):
        await Fabric.open(lab.settings(), netns_fd=lab.host)

    other = FabricSettings.numbered(1, str(lab.directory / "other"))
    second = await Fabric.open(other, netns_fd=lab.host)
    lab.stack.push_async_callback(second.close)
    box, space = await lab.sandbox(), lab.stack.enter_context(Space()).fd
    place = await second.attach("elsewhere", space)
    assert place.ip.startswith("10.214.")
    assert await box.outcome(WEB) == await outcome(space, WEB) == "open"
    assert await box.outcome(place.ip, seconds=2) != "open"
    assert await outcome(space, box.ip, seconds=2) != "open"
    await second.purge()
    assert await box.outcome(WEB) == "open"


async def test_a_range_the_machine_uses_is_refused(lab: Lab):
    await lab.fabric.purge()
    await lab.fabric.close()
    lab.run(lab.host, "ip route add 10.213.128.0/20 dev up0")

    with pytest.raises(ConflictError, match=r"overlaps 10\.213\.128\.0/20"):
        await lab.open()

    lab.run(lab.host, "ip route del 10.213.128.0/20 dev up0")
    await lab.open()


async def test_who_comes_when_all_is_let_go_of_hears_it(lab: Lab):
    await lab.sandbox(ONLY_WEB)
    sweeping = asyncio.ensure_future(lab.fabric.release_all_unknown(()))
    await asyncio.sleep(0)  # it has begun

    await lab.fabric.close()

    (outcome,) = await asyncio.gather(sweeping, return_exceptions=True)
    assert isinstance(outcome, (tuple, UnavailableError))
    with pytest.raises(UnavailableError, match="let go of"):
        await lab.fabric.release_all_unknown(())
    await lab.open()


async def test_the_subnet_may_not_hold_the_machines_name_server(lab: Lab):
    await lab.fabric.close()
    file = lab.directory / "resolv.conf"
    usual = file.read_text()
    file.write_text("nameserver 10.213.255.53\n")

    with pytest.raises(ConflictError, match=r"overlaps name server 10\.213\.255\.53"):
        await lab.open()

    file.write_text(usual)
    await lab.open()


async def test_purging_leaves_the_machine_as_it_was(needs_root: None, tmp_path: Path):
    lab = Lab(tmp_path)
    state = "ip -j addr show dev lo; ip -j route; ip -br link; nft list ruleset"
    try:
        lab.build()
        # A new namespace begins with what the machine has, which is not for us to assume.
        lab.run(lab.host, "sysctl -qw net.ipv4.ip_forward=0")
        # A link that was told to come up says so when the kernel finds the time.
        await eventually(lambda: " UP " in lab.run(lab.host, "ip -br link show up0"))
        before = lab.run(lab.host, state)
        await lab.open()
        await lab.sandbox()
        await lab.fabric.purge()

        assert lab.run(lab.host, state) == before
        assert list((tmp_path / "net").iterdir()) == []
        assert lab.run(lab.host, "sysctl -n net.ipv4.ip_forward").strip() == "0"
    finally:
        await lab.stop()


async def test_docker_beside_us_keeps_its_rules_and_lets_us_pass(lab: Lab):
    await lab.fabric.purge()
    await lab.fabric.close()
    lab.run(
        lab.host,
        "nft add table ip filter; nft add chain ip filter DOCKER-USER\n"
        "nft 'add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }'\n"
        "nft add rule ip filter FORWARD jump DOCKER-USER\n"
        "nft add rule ip filter DOCKER-USER return",
    )
    docker = lab.run(lab.host, "nft list table ip filter")
    for _ in range(2):
        await lab.open()
        await lab.fabric.close()
    await lab.open()
    box = await lab.sandbox(ONLY_WEB)

    assert await box.outcome(WEB) == "open"
    assert await box.outcome(OTHER_WEB) == "ECONNREFUSED"
    assert lab.run(lab.host, "nft list table ip filter").count("paddock") == 2
    await lab.fabric.purge()
    assert lab.run(lab.host, "nft list table ip filter") == docker


async def test_another_firewall_in_the_way_is_reported(lab: Lab, caplog: pytest.LogCaptureFixture):
    await lab.fabric.close()
    lab.run(
        lab.host,
        "nft add table inet firewalld; nft 'add chain inet firewalld in "
        "{ type filter hook input priority 10; policy drop; }'",
    )
    await lab.open()

    said = [one for one in caplog.records if "another firewall" in one.message]
    assert [str(one.paddock_fields["chain"]) for one in said] == ["inet firewalld in (input)"]


@pytest.mark.parametrize("moment_ms", [3, 8, 15, 25, 40, 60])
async def test_a_crash_at_any_moment_leaves_nothing_the_reaper_does_not_find(
    lab: Lab, moment_ms: int
):
    survivor = await lab.sandbox(ONLY_WEB)
    before = links(lab), elements(lab)
    await lab.fabric.close()
    spaces = [lab.stack.enter_context(Space()).fd for _ in range(4)]
    arguments = [str(lab.directory), str(lab.host), *map(str, spaces)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CHURN,
        *arguments,
        pass_fds=[lab.host, *spaces],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    await asyncio.sleep(moment_ms / 1000)
    process.send_signal(signal.SIGKILL)
    await process.wait()

    await lab.open()
    await lab.fabric.release_all_unknown({survivor.uid})

    assert (links(lab), elements(lab)) == before
    assert await survivor.outcome(WEB) == "open"
    assert await survivor.outcome(OTHER_WEB) == "ECONNREFUSED"


async def test_without_root_the_answer_says_what_is_missing(needs_root: None, tmp_path: Path):
    number = fabric_number()  # the machine's first may be a node's that runs beside us
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ROOTLESS, str(number), str(tmp_path / "net")),
        stdout=subprocess.PIPE,
    )
    said, _ = await process.communicate()
    release_fabric_number(number)

    assert b"sandboxes cannot have a network here" in said
    assert b"a rootless sandbox has loopback only" in said


class Space:
    """A namespace that a test's stack closes."""

    def __enter__(self) -> "Space":
        self.fd = netns.create()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


CHURN = """
import asyncio, sys
from paddock.runtime.local.net.fabric import Fabric, FabricSettings
from paddock.runtime.port import EgressPolicy
directory, host, *spaces = sys.argv[1:]

async def main():
    settings = FabricSettings(
        state_directory=directory + "/net", resolv_conf=directory + "/resolv.conf"
    )
    fabric = await Fabric.open(settings, netns_fd=int(host))
    print("ready", flush=True)
    async def churn(space):
        number = 0
        while True:
            number += 1
            uid = f"churn-{space}-{number}"
            await fabric.attach(uid, int(space))
            await fabric.set_policy(uid, EgressPolicy(deny_out=("198.51.100.0/28",)))
            await fabric.detach(uid)
    await asyncio.gather(*(churn(space) for space in spaces))

asyncio.run(main())
"""

ROOTLESS = """
import asyncio, os, sys
from paddock.kit.errors import UnsupportedError
from paddock.runtime.local.net.fabric import Fabric, FabricSettings
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
try:
    asyncio.run(Fabric.open(FabricSettings.numbered(int(sys.argv[1]), sys.argv[2])))
except UnsupportedError as error:
    print(error, error.hint)
"""
