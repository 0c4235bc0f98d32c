"""The cost of a sandbox's network, beside the usual command-line tools.

    python bench/net.py [--quick]

Everything happens in network namespaces of the bench's own; beside it `ip` and `nft`. Needs root.
"""

import contextlib
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

from paddock.runtime.local.net import links, netns
from paddock.runtime.local.net.fabric_state import FabricState
from paddock.runtime.local.net.settings import FabricSettings
from paddock.runtime.port import EgressPolicy
from reporting import Report

SAMPLES = 200
WEB, PORT = "198.51.100.10", 8080
POLICIES = (EgressPolicy(), EgressPolicy(deny_out=("198.51.100.16/28", "192.0.2.0/24")))


def run(netns_fd: int | None, script: str) -> None:
    with netns.entered(netns_fd):
        subprocess.run(["sh", "-ec", script], check=True, capture_output=True)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextlib.contextmanager
def spaces(count: int) -> Iterator[list[int]]:
    made = [netns.create() for _ in range(count)]
    try:
        yield made
    finally:
        for one in made:
            os.close(one)


def fd_path(netns_fd: int) -> str:
    return f"/proc/{os.getpid()}/fd/{netns_fd}"


def build(host: int, internet: int) -> None:
    run(
        host,
        "ip link set lo up; ip link add up0 type veth peer net0\n"
        f"ip link set net0 netns {fd_path(internet)}\n"
        "ip addr add 203.0.113.2/24 dev up0; ip link set up0 up\n"
        "ip route add default via 203.0.113.1",
    )
    run(
        internet,
        f"ip link set lo up; ip link set net0 up; ip addr add {WEB}/32 dev lo\n"
        "ip addr add 203.0.113.1/24 dev net0; ip route add 10.99.0.0/16 via 203.0.113.2",
    )


@contextlib.contextmanager
def accepting(internet: int) -> Iterator[None]:
    listener = netns.socket_in(internet, socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((WEB, PORT))
    listener.listen(1024)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def connect(space: int) -> None:
    with netns.socket_in(space, socket.AF_INET, socket.SOCK_STREAM) as one:
        one.settimeout(30)
        one.connect((WEB, PORT))


def attach_ours(state: FabricState, made: list[int]) -> tuple[list[float], list[float]]:
    attach: list[float] = []
    first: list[float] = []
    for number, space in enumerate(made):
        attach.append(timed(lambda n=number, s=space: state.attach(f"b-{n}", s, None, POLICIES[1])))
        first.append(timed(lambda s=space: connect(s)))
    return attach, first


def attach_by_ip(host: int, made: list[int]) -> tuple[list[float], list[float]]:
    """Create a bridge port the usual way: without a fixed address for the bridge."""
    attach: list[float] = []
    first: list[float] = []
    for number, space in enumerate(made):
        outside = [
            f"ip link add t{number} type veth peer name eth0 netns {fd_path(space)}",
            f"ip link set t{number} master br0 up",
        ]
        inside = [
            f"ip addr add 10.99.{number >> 8}.{(number & 255) + 2}/16 dev eth0",
            "ip link set lo up",
            "ip link set eth0 up",
            "ip route add default via 10.99.255.254",
        ]

        def work(space: int = space, outside: list[str] = outside, inside: list[str] = inside):
            for commands, where in ((outside, host), (inside, space)):
                with netns.entered(where):
                    for command in commands:
                        subprocess.run(command.split(), check=True)

        attach.append(timed(work))
        first.append(timed(lambda s=space: connect(s)))
    return attach, first


def policy_ours(state: FabricState) -> list[float]:
    return [
        timed(lambda n=number: state.set_policy("b-0", POLICIES[n % 2]))
        for number in range(SAMPLES)
    ]


def policy_by_nft(host: int, table: str) -> list[float]:
    samples: list[float] = []
    for number in range(50):
        command = f"add element inet {table} denied {{ 0xffffffff . 192.0.{number}.0/24 }}"
        with netns.entered(host):
            samples.append(timed(lambda c=command: subprocess.run(["nft", c], check=True)))
    return samples


def detach_ours(state: FabricState, count: int) -> tuple[list[float], float]:
    single: list[float] = []
    for number in range(20):
        uids = [f"b-{number}"]

        def work(uids: list[str] = uids) -> None:
            doomed = state.begin_detach(uids)
            with links_channel(state) as channel:
                links.delete_links(channel, doomed, group=state.plan.group)
            state.finish_detach(uids, keep_address=False)

        single.append(timed(work))
    rest = [f"b-{number}" for number in range(20, count)]

    def together() -> None:
        doomed = state.begin_detach(rest)
        with links_channel(state) as channel:
            links.delete_links(channel, doomed, group=state.plan.group)
        state.finish_detach(rest, keep_address=False)

    return single, timed(together) / len(rest)


def links_channel(state: FabricState) -> links.nl.Channel:
    return links.nl.Channel(state._netns_fd)


def main() -> None:
    report = Report("net", __doc__)
    with spaces(2) as (host, internet), tempfile.TemporaryDirectory() as directory:
        build(host, internet)
        with accepting(internet):
            state = FabricState(FabricSettings(state_directory=directory), host)
            state.open()
            with spaces(SAMPLES) as made:
                ours, first = attach_ours(state, made)
                born = [
                    timed(lambda: netns.socket_in(made[0], socket.AF_INET).close())
                    for _ in range(SAMPLES)
                ]
                changed = policy_ours(state)
                by_nft = policy_by_nft(host, state.settings.table)
                single, together = detach_ours(state, SAMPLES)
            state.purge()
            state.close()
            run(
                host,
                "sysctl -qw net.ipv4.ip_forward=1; ip link add br0 type bridge\n"
                "ip addr add 10.99.255.254/16 dev br0; ip link set br0 up",
            )
            with spaces(SAMPLES // 2) as made:
                by_ip, bridged = attach_by_ip(host, made)
    report.spread("attach", ours)
    report.spread("attach_by_ip", by_ip)
    report.spread("first_connect", first)
    report.spread("first_connect_over_a_bridge", bridged)
    report.spread("policy_change", changed)
    report.spread("policy_change_by_nft", by_nft)
    report.spread("detach_alone", single)
    report.figure("detach_each_of_many_ms", together * 1e3, f"mean of {SAMPLES - len(single)}")
    report.spread("socket_in_netns", born)
    report.against("attach", ["attach_by_ip"])
    report.against("policy_change", ["policy_change_by_nft"])
    report.against("first_connect", ["first_connect_over_a_bridge"])
    report.finish()


if __name__ == "__main__":
    main()
