"""The same escape attempts in a sandbox of a rootless node."""

import os
import shutil
from pathlib import Path

import pytest

from paddock.runtime.port import Blueprint, Instance
from tests.runtime.local.inside import run, succeeds
from tests.runtime.local.isolation.test_escape import (
    test_dangerous_system_calls_are_refused,
    test_kernel_settings_cannot_be_written,
    test_no_process_inside_can_hide_from_the_oom_killer,
    test_privileged_tools_fail,
    test_processes_outside_cannot_be_signalled_or_traced,
    test_raw_and_exotic_sockets_are_refused,
    test_system_calls_newer_than_the_list_fail_with_enosys,
)
from tests.runtime.local.nodes import ROOTLESS_ID, TestNode

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]
__all__ = [
    "test_dangerous_system_calls_are_refused",
    "test_kernel_settings_cannot_be_written",
    "test_no_process_inside_can_hide_from_the_oom_killer",
    "test_privileged_tools_fail",
    "test_processes_outside_cannot_be_signalled_or_traced",
    "test_raw_and_exotic_sockets_are_refused",
    "test_system_calls_newer_than_the_list_fail_with_enosys",
]


@pytest.fixture
async def shared_box(rootless_node: TestNode) -> Instance:
    found = await rootless_node.runtime.inspect("shared")
    if found is not None and found.state == "running":
        return found
    await rootless_node.runtime.destroy("shared")
    return await rootless_node.runtime.create(Blueprint(uid="shared", image="host"))


async def test_the_machine_is_neither_visible_nor_writable(rootless_node, shared_box):
    hidden = [
        str(rootless_node.state),
        str(rootless_node.directory),
        "/root/.ssh",
        "/var/lib/docker",
    ]
    for path in hidden:
        assert not await succeeds(shared_box, f"test -e {path}"), path
    told = await run(shared_box, "cat /proc/cmdline /proc/swaps /proc/keys; cat /etc/shadow")
    assert "$" not in told.out
    assert not await succeeds(shared_box, "touch /.paddock/mine 2>/dev/null")


async def test_programs_of_the_nodes_user_are_read_only(shared_box):
    mine = Path("/opt", f"paddock-test-{os.urandom(4).hex()}")
    if not mine.parent.is_dir():
        pytest.skip("there is no /opt on this machine")
    mine.mkdir()
    try:
        os.chown(mine, ROOTLESS_ID, ROOTLESS_ID)
        assert await succeeds(shared_box, f"test -d {mine}")
        assert not await succeeds(shared_box, f"touch {mine}/x 2>/dev/null")
        assert list(mine.iterdir()) == []
    finally:
        shutil.rmtree(mine)


async def test_there_is_only_loopback(shared_box):
    links = (await run(shared_box, "ls /sys/class/net")).out.split()
    assert links == ["lo"]
