"""Killing all processes of a command."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

RUNNERS = """
import os, time
for _ in range(3):
    if not os.fork():
        while True:
            if os.fork():
                os._exit(0)
            time.sleep(0.0005)
time.sleep({stays})
"""

# Pid 1 of a namespace: nothing outlives the test, and orphans become its children.
ROUNDS = """
import os, subprocess, sys, time
from paddock.envd.process.tree import kill_all

for number in range(15):
    process = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
    time.sleep(0.1)
    kill_all(process.pid)
    deadline = time.monotonic() + 5
    try:
        while True:
            assert time.monotonic() < deadline, f"a process is left in round {number}"
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
    except ChildProcessError:
        process.returncode = 0
"""


@pytest.mark.parametrize("stays", [0, 60])
def test_processes_that_fork_continuously_are_killed(stays: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to make a pid namespace")
    runners = RUNNERS.format(stays=stays)
    command = ["unshare", "-pfm", "--mount-proc", "--kill-child", sys.executable, "-c", ROUNDS]
    done = subprocess.run([*command, runners], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
