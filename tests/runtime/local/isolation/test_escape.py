"""Escape attempts as root inside a sandbox; all must fail.

Those over the network are in `test_escape_network`, floods in `test_escape_floods`.
"""

import os
from pathlib import Path

import pytest

from paddock.kit.errors import InvalidError
from paddock.runtime.port import Mount
from tests.runtime.local.inside import health, run, succeeds
from tests.security.battery import escapes

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

PYTHON = "/usr/bin/python3"


async def test_root_inside_keeps_only_harmless_capabilities(box):
    out = (await run(await box(), "grep Cap /proc/self/status")).out
    bounding = int(next(x for x in out.splitlines() if x.startswith("CapBnd")).split()[1], 16)
    dangerous = {
        "NET_ADMIN": 12, "NET_RAW": 13, "SYS_MODULE": 16, "SYS_RAWIO": 17, "SYS_PTRACE": 19,
        "SYS_ADMIN": 21, "SYS_BOOT": 22, "SYS_RESOURCE": 24, "SYS_TIME": 25, "MKNOD": 27,
        "MAC_ADMIN": 33, "SYSLOG": 34, "BPF": 39, "PERFMON": 38, "CHECKPOINT_RESTORE": 40,
        "DAC_READ_SEARCH": 2,
    }  # fmt: skip
    assert not [name for name, bit in dangerous.items() if bounding >> bit & 1]


async def test_seccomp_and_a_private_id_range_are_in_force(node, box):
    one, other = await box(), await box()
    pids = (await node.facts())["inits"]
    maps = [Path(f"/proc/{pids[i.uid]}/uid_map").read_text().split() for i in (one, other)]
    assert maps[0][2] == maps[1][2] == "65536"
    assert abs(int(maps[0][1]) - int(maps[1][1])) >= 65536
    assert int(maps[0][1]) >= 1 << 30
    status = (await run(one, "cat /proc/self/status")).out
    assert "Seccomp:\t2" in status


@pytest.mark.parametrize("attempt", escapes.TOOLS)
async def test_privileged_tools_fail(shared_box, attempt):
    status = (await run(shared_box, f"{attempt} 2>/dev/null")).status
    assert status != 0
    assert status != 127, "the program is not installed, so its failure proves nothing"


@pytest.mark.parametrize("path", escapes.SETTINGS)
async def test_kernel_settings_cannot_be_written(shared_box, path):
    assert not await succeeds(shared_box, f"echo 0 2>/dev/null > {path}")


async def test_no_process_inside_can_hide_from_the_oom_killer(shared_box):
    for who in ("self", "1"):
        script = f"echo -1000 2>/dev/null > /proc/{who}/oom_score_adj"
        assert not await succeeds(shared_box, script)


@pytest.mark.parametrize("name", escapes.SYSCALLS)
async def test_dangerous_system_calls_are_refused(shared_box, name):
    outcome = await run(shared_box, f"{PYTHON} -c '{escapes.call_script(name)}'")
    assert outcome.status == 0, (name, outcome)


async def test_system_calls_newer_than_the_list_fail_with_enosys(shared_box):
    script = (
        "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True); "
        "os.close(os.open('/tmp/young', os.O_CREAT | os.O_WRONLY)); "
        "done = libc.syscall(452, -100, b'/tmp/young', 0o640, 0x100); "  # fchmodat2
        "print(done == 0 or ctypes.get_errno() == 38, libc.syscall(599), ctypes.get_errno())"
    )
    assert (await run(shared_box, f'{PYTHON} -c "{script}"')).out == "True -1 38\n"


@pytest.mark.parametrize("make", escapes.SOCKETS)
async def test_raw_and_exotic_sockets_are_refused(shared_box, make):
    assert not await succeeds(shared_box, f"{PYTHON} -c 'import socket; {make}' 2>/dev/null")


async def test_the_host_is_not_visible(node, shared_box):
    hidden = [
        str(node.state), str(node.directory), "/root/.ssh", "/home/agent", "/mnt/sandboxing",
        "/etc/ssh/ssh_host_rsa_key", "/var/lib/docker", "/var/run/docker.sock", "/run/systemd",
    ]  # fmt: skip
    for path in hidden:
        assert not await succeeds(shared_box, f"test -e {path}"), path
    mounts = (await run(shared_box, "cat /proc/self/mountinfo /proc/mounts")).out
    assert str(node.directory) not in mounts
    started_with = Path("/proc/cmdline").read_text().strip()
    hidden = (await run(shared_box, "cat /proc/cmdline /proc/swaps /proc/keys")).out
    assert started_with
    assert hidden == ""
    devices = "grep -rlsF / /sys/devices/virtual/block /sys/block/*/loop /sys/firmware"
    assert (await run(shared_box, devices)).out == ""
    shadow = (await run(shared_box, "cat /etc/shadow")).out
    assert "$" not in shadow
    processes = (await run(shared_box, "ls /proc | grep -c '^[0-9]'")).out
    assert int(processes) < 10
    host_secret = Path("/etc/shadow").read_text().splitlines()[0]
    assert host_secret not in shadow or ":*:" in host_secret or ":!" in host_secret


async def test_files_processes_and_ipc_of_other_sandboxes_are_not_visible(box):
    one, other = await box(), await box()
    mark = os.urandom(6).hex()
    leave = f"for d in /tmp /dev/shm /var/tmp /home/user; do cp /bin/sleep $d/{mark}; done"
    wait = f"until grep -qs {mark} /proc/$!/comm; do sleep 0.01; done"  # it has started
    begin = f"/tmp/{mark} 300 >/dev/null 2>&1 & {wait}"
    await run(one, f"{leave}; ipcmk -Q -p 0666 >/dev/null; {begin}")
    find = f"find / -xdev -name {mark}; ls /dev/shm"
    processes, queues = f"cat /proc/[0-9]*/comm | grep {mark}", "ipcs -q | grep 666"
    for look in (find, processes, queues):
        assert (await run(one, look)).out, look
        assert (await run(other, look)).out == "", look


async def test_processes_outside_cannot_be_signalled_or_traced(shared_box):
    own = os.getpid()
    # The shell that runs the attempt may have the same pid inside by chance.
    assert not await succeeds(shared_box, f"test $$ -ne {own} && kill -0 {own} 2>/dev/null")
    assert not await succeeds(shared_box, f"test $$ -ne {own} -a -e /proc/{own}")
    everyone = await run(shared_box, "kill -9 1; kill -TERM 1; kill -STOP 1; sleep 0.1; echo alive")
    assert everyone.out == "alive\n"


async def test_control_sockets_are_not_visible_inside(node, shared_box):
    found = await run(shared_box, "find / -xdev -name '*.sock' 2>/dev/null; cat /proc/net/unix")
    assert "envd.sock" not in found.out
    assert "control.sock" not in found.out
    assert str(node.socket) not in found.out


async def test_sudo_works_and_gives_root_inside_only(shared_box):
    if not await succeeds(shared_box, "command -v sudo"):
        pytest.skip("sudo is not installed on this machine")
    outcome = await run(shared_box, "sudo -n id -u", user="user")
    assert outcome.out == "0\n"
    caps = await run(shared_box, "sudo -n grep CapEff /proc/self/status", user="user")
    assert int(caps.out.split()[1], 16) & (1 << 21) == 0


async def test_a_set_uid_program_becomes_root_inside_only(shared_box):
    script = "cp /usr/bin/id /tmp/suid-id && chmod 4755 /tmp/suid-id && echo ok"
    assert (await run(shared_box, script)).out == "ok\n"
    assert "euid=0" in (await run(shared_box, "/tmp/suid-id", user="user")).out


async def test_locked_sandboxes_have_no_set_uid_at_all(box):
    instance = await box(privileges="locked")
    await run(instance, "cp /usr/bin/id /tmp/suid-id && chmod 4755 /tmp/suid-id")
    assert "euid=0" not in (await run(instance, "/tmp/suid-id", user="user")).out
    assert "NoNewPrivs:\t1" in (await run(instance, "cat /proc/self/status", user="user")).out


async def test_a_bound_directory_can_be_read_only(node, box, tmp_path):
    (tmp_path / "hello").write_text("from outside")
    for parent in [tmp_path, *tmp_path.parents[:-2]]:
        parent.chmod(0o755)
    instance = await box(mounts=(Mount(source=str(tmp_path), path="/data", read_only=True),))
    assert (await run(instance, "cat /data/hello")).out == "from outside"
    assert not await succeeds(instance, "echo x 2>/dev/null > /data/hello")
    assert (tmp_path / "hello").read_text() == "from outside"


async def test_init_cannot_be_replaced_or_starved_by_hostile_signals(shared_box):
    hostile = "for s in $(seq 1 64); do kill -$s 1 2>/dev/null; done; echo sent"
    assert (await run(shared_box, hostile)).out == "sent\n"
    assert await health(shared_box) == 204


async def test_init_cannot_be_replaced_for_the_next_start(node, box):
    instance = await box()
    evil = "#!/bin/sh\ngrep CapEff /proc/self/status > /caught; exec sleep 60\n"
    attempts = [
        "rm -f /.paddock/init", "mv /.paddock/init /.paddock/gone", "mv /.paddock /elsewhere",
        "ln -f /bin/sh /.paddock/init", "cp /bin/sh /.paddock/init", "touch /.paddock/more",
        "chmod 777 /.paddock /.paddock/init", f"printf '{evil}' > /.paddock/init",
        "mount --bind /tmp /.paddock", "umount /.paddock", "ln /.paddock/init /tmp/init",
    ]  # fmt: skip
    for attempt in attempts:
        assert not await succeeds(instance, f"{{ {attempt}; }} 2>/dev/null"), attempt
    await node.runtime.stop(instance.uid)
    again = await node.runtime.restore(instance.uid)
    assert not await succeeds(again, "test -e /caught")
    effective = (await run(again, "grep CapEff /proc/1/status")).out.split()[1]
    assert int(effective, 16) & (1 << 21) == 0  # SYS_ADMIN
    assert "Seccomp:\t2" in (await run(again, "cat /proc/1/status")).out


@pytest.mark.parametrize(
    "path", ["/.paddock", "/proc", "/sys/fs", "/dev//null", "/", "/../.paddock/x"]
)
async def test_nothing_can_be_mounted_over_reserved_directories(box, tmp_path, path):
    with pytest.raises(InvalidError) as caught:
        await box(mounts=(Mount(source=str(tmp_path), path=path),))
    assert caught.value.hint


async def test_the_node_follows_no_link_in_a_hostile_etc(node, box):
    instance = await box(start_command="true", user="user")
    await run(instance, "rm /etc/passwd; ln -s /proc/1/root/etc/passwd /etc/passwd; "
                        "rm -rf /etc/group; ln -s /etc/shadow /etc/group")  # fmt: skip
    await node.runtime.stop(instance.uid)
    again = await node.runtime.restore(instance.uid)
    assert again.state == "running"
    assert Path("/etc/passwd").read_text().startswith("root:")
