"""The real sidecar in pods of images without `user`, bash or /etc/passwd."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from paddock.kit.errors import InvalidError
from paddock.resources import tokens
from paddock.runtime import envd_api
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.envd_client import PodEnvdClient
from paddock.runtime.kubernetes.pods.render import SidecarConfig
from tests.cluster.kubelet import ROOT, build_hold
from tests.cluster.pod_runner import Plan
from tests.ports import free_ports
from tests.runtime.local.images.small_roots import shell_root, static_root

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make namespaces"),
]

TOKEN = "control"


@contextlib.asynccontextmanager
async def pod(directory: Path, rootfs: Path, **config: Any) -> AsyncGenerator[SidecarConfig]:
    """Run a pod of a root file system."""
    for name in ("etc", "proc", "dev"):  # container runtimes create these
        (rootfs / name).mkdir(exist_ok=True)
    tools, state = directory / "tools", directory / "state"
    for each in (tools, state):
        each.mkdir()
    build_hold(tools)
    port, control_port = free_ports(2)
    sidecar = SidecarConfig(
        uid="u1", control_hash=tokens.hashed(TOKEN), host="127.0.0.1", port=port,
        control_port=control_port, **config,
    )  # fmt: skip
    plan = Plan(
        uid="u1",
        rootfs=str(rootfs),
        tools=str(tools),
        state=str(state),
        command=[names.HOLD],
        env={names.MARK: "u1"},
        sidecar=[sys.executable, "-m", "paddock.runtime.kubernetes.sidecar"],
        sidecar_env={
            names.CONFIG: msgspec.json.encode(sidecar).decode(),
            "PADDOCK_TOOLS_DIR": str(tools),
            "PADDOCK_STATE_DIR": str(state),
        },
        started=str(directory / "started"),
    )
    file = directory / "plan.json"
    file.write_bytes(msgspec.json.encode(plan))
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"),
        *(sys.executable, "-m", "tests.cluster.pod_runner", str(file)),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield sidecar
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def wait_ready(sidecar: SidecarConfig) -> None:
    client = PodEnvdClient(lambda _: (TOKEN,), control_port=sidecar.control_port)
    try:
        assert await client.wait_ready("u1", "127.0.0.1", seconds=30) is None
    finally:
        await client.close()


async def run(sidecar: SidecarConfig, *command: str, user: str) -> str:
    """Run a command; return its output, or the error of the call."""
    message = {"process": {"cmd": command[0], "args": list(command[1:])}}
    login = base64.b64encode(f"{user}:".encode()).decode()
    headers: Mapping[str, str] = {**envd_api.STREAM_HEADERS, "Authorization": f"Basic {login}"}
    where = f"http://127.0.0.1:{sidecar.port}{envd_api.START_PATH}"
    async with (
        aiohttp.ClientSession() as client,
        client.post(where, data=envd_api.frame(message), headers=headers) as answer,
    ):
        frames = [json.loads(data) for _, data in envd_api.read_frames(await answer.read())]
    errors = [item["error"]["message"] for item in frames if "error" in item]
    events = [item["event"].get("data", {}) for item in frames if "event" in item]
    pieces = [item.get("stdout", "") for item in events]
    return "".join([*errors, *(base64.b64decode(piece).decode() for piece in pieces)])


async def test_an_image_with_a_shell_only_serves_every_user(tmp_path: Path):
    rootfs = shell_root(tmp_path / "rootfs", "touch")
    who = ("/bin/bash", "-l", "-c", "id -u; pwd; touch here; echo $?")
    commands = {"start_command": "echo $0 > shell", "ready_command": "cat shell > /dev/null"}
    async with pod(tmp_path, rootfs, **commands) as box:
        await wait_ready(box)
        assert await run(box, *who, user="user") == "1000\n/home/user\n0\n"
        assert await run(box, *who, user="root") == "0\n/\n0\n"
        assert await run(box, *who, user="") == "1000\n/home/user\n0\n"
        assert await run(box, *who[:3], "id -u; pwd", user="4321") == "4321\n/\n"
        assert await run(box, "/usr/bin/cat", "shell", user="user") == "/bin/sh\n"


async def test_an_image_without_a_shell_runs_programs_and_says_why_not_commands(tmp_path: Path):
    async with pod(tmp_path, static_root(tmp_path / "rootfs")) as box:
        await wait_ready(box)
        assert await run(box, "/app/where", user="user") == "1000 in /home/user\n"
        assert "has no shell" in await run(box, "/bin/bash", "-l", "-c", "true", user="user")


async def test_a_start_command_without_a_shell_fails_the_start_once(tmp_path: Path):
    rootfs = static_root(tmp_path / "rootfs")
    async with pod(tmp_path, rootfs, start_command="serve") as box:
        with pytest.raises(InvalidError, match=r"start or ready command cannot run: .* no shell"):
            await wait_ready(box)


async def test_links_of_an_image_do_not_lead_out_of_its_container(tmp_path: Path):
    rootfs = shell_root(tmp_path / "rootfs")
    secret, outside = tmp_path / "secret", tmp_path / "outside"
    secret.write_text("token:x:5:5::/:\n")
    outside.mkdir()
    (rootfs / "etc").mkdir()
    (rootfs / "etc/passwd").symlink_to(secret)  # of the sidecar's file system
    (rootfs / "home").symlink_to(outside)
    async with pod(tmp_path, rootfs) as box:
        await wait_ready(box)
        written = await run(box, "/usr/bin/cat", f"{names.TOOLS_DIRECTORY}/passwd", user="user")
        assert written == "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n"
    assert list(outside.iterdir()) == []
