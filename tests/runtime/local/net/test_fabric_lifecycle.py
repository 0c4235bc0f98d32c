"""Attach, detach, restart and crash: nothing is leaked and nothing is lost."""

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
    """Count the elements of sandboxes, without the kernel's dynamic sets."""
    listing = json.loads(lab.run(lab.host, "nft -j list table inet paddock"))["nftables"]
    counted = 0
    for entry in listing:
        found = entry.get("set") or entry.get("map")
        if found and found["name"] not in ("never", "private", "flows", "queries"):
            counted += len(found.get("elem", ()))
    return counted


async def test_two_hundred_sandboxes_leave_no_trace(lab: Lab):
    before = links(lab), elements(lab)
    spaces = [netns.create() for _ in range(200)]
    policy = EgressPolicy(deny_out=("198.51.100.16/28", "192.0.2.0/24"))
    places = [
        await lab.fabric.attach(f"box-{number}", space, policy=policy)
        for number, space in enumerate(spaces)
    ]
    assert len({place.ip for place in places}) == 200
    assert len(links(lab)) == len(before[0]) + 200
    # Sandboxes with the same networks share set elements.
    assert lab.run(lab.host, "nft list set inet paddock denied").count("/") == 2
    assert await outcome(spaces[0], WEB) == await outcome(spaces[199], WEB) == "open"

    await asyncio.gather(*(lab.fabric.detach(f"box-{number}") for number in range(200)))

    assert (links(lab), elements(lab)) == before
    assert list((lab.directory / "net").iterdir()) == []
    assert lab.fabric.attached() == ()
    assert "213" not in lab.run(spaces[0], "ip -br link")
    for space in spaces:
        os.close(space)


async def test_attaching_is_idempotent(lab: Lab):
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


async def test_detaching_is_idempotent(lab: Lab):
    box = await lab.sandbox()
    await lab.fabric.detach("nobody")
    await asyncio.gather(lab.fabric.detach(box.uid), lab.fabric.detach(box.uid))
    await lab.fabric.detach(box.uid)

    assert lab.fabric.inspect(box.uid) is None
    assert await box.outcome(WEB) == "ENETUNREACH"


async def test_a_hibernated_sandbox_keeps_address_and_policy_across_restarts(lab: Lab):
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


async def test_the_first_packet_to_a_new_sandbox_arrives_under_load(lab: Lab):
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


async def test_a_slot_can_be_requested_and_belongs_to_one_sandbox(lab: Lab):
    first = await lab.fabric.attach("first", lab.stack.enter_context(Space()).fd, 77)
    assert (first.slot, first.ip) == (77, "10.213.0.79")

    with pytest.raises(ConflictError, match="slot 77 belongs to sandbox first"):
        await lab.fabric.attach("second", lab.host, 77)
    with pytest.raises(ConflictError, match="has slot 77"):
        await lab.fabric.attach("first", lab.host, 78)
    with pytest.raises(InvalidError):
        await lab.fabric.attach("second", lab.host, 70000)


async def test_a_failed_attach_leaves_nothing(lab: Lab):
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


async def test_a_restart_adopts_sandboxes_and_keeps_connections_and_policies(lab: Lab):
    lab.names.addresses = {"example.com": [OTHER_WEB]}
    box = await lab.sandbox(ONLY_WEB)
    named = await lab.sandbox(EgressPolicy(allow_internet=False, allow_out=("example.com",)))
    await named.resolve("example.com")
    with await box.connect(WEB) as kept:
        await echo(kept)
        await lab.fabric.close()
        assert await echo(kept) == b"hello"  # The network works without the node.
        assert await box.outcome(OTHER_WEB) == "ECONNREFUSED"

        await lab.open()

        assert await echo(kept) == b"hello"
    assert lab.fabric.inspect(box.uid) == box.attachment
    assert await box.outcome(WEB) == "open"
    assert await box.outcome(OTHER_WEB) == "ECONNREFUSED"
    assert await named.outcome(OTHER_WEB) == "open"
    assert (await named.resolve("example.com")).addresses == [OTHER_WEB]
    assert (await named.resolve("example.org")).code == 5
    await lab.fabric.set_policy(named.uid, CLOSED)
    assert await named.outcome(OTHER_WEB) == "ECONNREFUSED"


async def test_a_restart_rebuilds_a_flushed_firewall(lab: Lab):
    box = await lab.sandbox(ONLY_WEB)
    await lab.fabric.close()
    lab.run(lab.host, "nft flush ruleset")

    await lab.open()

    assert await box.outcome(WEB) == "open"
    assert await box.outcome(OTHER_WEB) == "ECONNREFUSED"


async def test_a_policy_change_rebuilds_a_flushed_firewall(lab: Lab):
    box, neighbour = await lab.sandbox(), await lab.sandbox(CLOSED)
    lab.run(lab.host, "nft flush ruleset")

    await lab.fabric.set_policy(box.uid, ONLY_WEB)

    assert await box.outcome(WEB) == "open"
    assert await box.outcome(OTHER_WEB) == "ECONNREFUSED"
    assert await neighbour.outcome(WEB) == "ECONNREFUSED"


async def test_a_sandbox_with_a_lost_or_broken_record_has_no_egress(lab: Lab):
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


async def test_unknown_sandboxes_and_stray_links_are_removed(lab: Lab):
    before = links(lab)
    known, unknown = await lab.sandbox(), await lab.sandbox()
    lab.run(lab.host, "ip link add pd-fff type veth peer name stray0")

    removed = await lab.fabric.release_all_unknown({known.uid})

    assert removed == (unknown.uid,)
    assert links(lab) == before | {known.attachment.link}
    assert await known.outcome(WEB) == "open"
    assert await lab.fabric.release_all_unknown({known.uid}) == ()


async def test_a_sandbox_whose_namespace_is_gone_can_be_detached(lab: Lab):
    before = links(lab), elements(lab)
    space = netns.create()
    await lab.fabric.attach("dying", space)
    os.close(space)
    await eventually(lambda: links(lab) == before[0])

    await lab.fabric.detach("dying")

    assert (links(lab), elements(lab)) == before


async def test_the_fabric_works_with_the_nft_program(lab: Lab, monkeypatch: pytest.MonkeyPatch):
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
        await box.resolve("example.com")
        assert await box.outcome(OTHER_WEB) == "open"
        await lab.fabric.close()
    await lab.open()


async def test_a_namespace_owned_by_an_unprivileged_user_can_be_attached(lab: Lab):
    process = await asyncio.create_subprocess_exec("unshare", "-U", "-n", "sleep", "50")
    try:
        own = netns.current()
        lab.stack.callback(os.close, own)

        def is_apart() -> bool:
            there = Path(f"/proc/{process.pid}/ns/net").stat()
            return (there.st_dev, there.st_ino) != netns.identity(own)

        await eventually(is_apart)
        space = netns.open_for_pid(process.pid)
        lab.stack.callback(os.close, space)
        await lab.fabric.attach("rootless-inside", space, policy=ONLY_WEB)

        assert await outcome(space, WEB) == "open"
        assert await outcome(space, OTHER_WEB) == "ECONNREFUSED"
    finally:
        process.kill()
        await process.wait()


async def test_fabric_names_are_unique_on_a_machine(lab: Lab):
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


async def test_a_subnet_in_use_is_rejected(lab: Lab):
    await lab.fabric.purge()
    await lab.fabric.close()
    lab.run(lab.host, "ip route add 10.213.128.0/20 dev up0")

    with pytest.raises(ConflictError, match=r"overlaps 10\.213\.128\.0/20"):
        await lab.open()

    lab.run(lab.host, "ip route del 10.213.128.0/20 dev up0")
    await lab.open()


async def test_calls_after_close_are_rejected(lab: Lab):
    await lab.sandbox(ONLY_WEB)
    sweeping = asyncio.ensure_future(lab.fabric.release_all_unknown(()))
    await asyncio.sleep(0)  # it has started

    await lab.fabric.close()

    (outcome,) = await asyncio.gather(sweeping, return_exceptions=True)
    assert isinstance(outcome, (tuple, UnavailableError))
    with pytest.raises(UnavailableError, match="is closed"):
        await lab.fabric.release_all_unknown(())
    await lab.open()


async def test_a_subnet_with_the_machines_name_server_is_rejected(lab: Lab):
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
        # A new namespace inherits the machine's setting, which may be either.
        lab.run(lab.host, "sysctl -qw net.ipv4.ip_forward=0")
        # The operational state of a link changes asynchronously.
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


async def test_docker_keeps_its_rules_and_accepts_our_packets(lab: Lab):
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


async def test_another_firewall_that_drops_packets_is_reported(
    lab: Lab, caplog: pytest.LogCaptureFixture
):
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
async def test_everything_left_by_a_crash_is_removed(lab: Lab, moment_ms: int):
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


async def test_without_root_the_error_names_what_is_missing(needs_root: None, tmp_path: Path):
    number = fabric_number()  # fabric 0 may belong to a node of this machine
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ROOTLESS, str(number), str(tmp_path / "net")),
        stdout=subprocess.PIPE,
    )
    said, _ = await process.communicate()
    release_fabric_number(number)

    assert b"the network of sandboxes cannot be set up here" in said
    assert b"a rootless sandbox has loopback only" in said


class Space:
    """A network namespace as a context manager."""

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
