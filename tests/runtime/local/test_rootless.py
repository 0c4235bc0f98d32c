"""Sandboxes of a rootless node: fewer capabilities, but the usual work in them succeeds."""

import asyncio
import os
import urllib.parse

import pytest

from paddock.runtime.local.images.base import base_directory, is_built
from paddock.runtime.local.images.debian.recipe import BUILT_IN
from paddock.runtime.port import AgentConfig, Blueprint, Instance, OutboundConfig
from tests.gateway.certificates import issue
from tests.runtime.local.inside import run
from tests.runtime.local.nodes import ROOTLESS_ID

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]


@pytest.fixture
async def make(rootless_node):
    made = []

    async def create(**changes) -> Instance:
        uid = f"r{os.urandom(4).hex()}"
        made.append(uid)
        changes.setdefault("image", "host")
        return await rootless_node.runtime.create(Blueprint(uid=uid, **changes))

    yield create
    for uid in made:
        await rootless_node.runtime.destroy(uid)
    for stored in await rootless_node.runtime.checkpoints():
        await rootless_node.runtime.delete_checkpoint(stored.id)


async def upload(instance: Instance, path: str, data: bytes) -> int:
    envd = (instance.address.envd or "").removeprefix("unix:")
    reader, writer = await asyncio.open_unix_connection(envd)
    head = (
        f"POST /files?path={urllib.parse.quote(path)}&username=user HTTP/1.1\r\nHost: sandbox\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {len(data)}\r\n"
        "Connection: close\r\n\r\n"
    )
    writer.write(head.encode() + data)
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


def share_base() -> None:
    """Let the user of the rootless node read the base image, as an operator would."""
    if not is_built():
        pytest.skip("the base image is not built on this machine")
    for name in BUILT_IN:
        build = base_directory(name=name)
        if not build.stat().st_mode & 0o005:
            os.chown(build, 0, ROOTLESS_ID)
            build.chmod(0o750)


@pytest.mark.parametrize("image", ["host", "base"])
async def test_every_user_has_a_home_and_runs_commands(make, image):
    if image == "base":
        share_base()
    instance = await make(image=image)
    assert await upload(instance, "/home/user/sub/file", b"content") == 200
    read = await run(instance, "cat sub/file && ls -a /root /tmp >/dev/null", user="user")
    assert (read.status, read.out) == (0, "content"), read

    for user, home in (("user", "/home/user"), ("root", "/root")):
        said = await run(instance, "echo $USER $HOME; echo mine > ~/f; cat ~/f", user=user)
        assert (said.status, said.out) == (0, f"{user} {home}\nmine\n"), said


async def test_start_and_ready_commands_run(rootless_node, make):
    instance = await make(
        start_command="echo up > ~/up; sleep 99",
        ready_command="test -e /home/user/up",
        ready_timeout_seconds=60,
        user="user",
    )

    await rootless_node.runtime.start(instance.uid)

    assert (await run(instance, "cat ~/up", user="user")).out == "up\n"


async def test_files_survive_a_stop_and_are_cloned(rootless_node, make):
    instance = await make()
    await run(instance, "echo kept > ~/kept", user="user")

    await rootless_node.runtime.stop(instance.uid)
    again = await rootless_node.runtime.restore(instance.uid)
    await rootless_node.runtime.snapshot(instance.uid, "cp-r", memory=False, keep_running=True)
    child = await make(checkpoint_id="cp-r")

    for one in (again, child):
        assert (await run(one, "cat ~/kept", user="user")).out == "kept\n"


async def test_envds_are_forked_from_the_zygote(rootless_node, make):
    await run(await make(), "true")

    assert "envds will take more memory" not in rootless_node.log.read_text()


@pytest.mark.parametrize("image", ["host", "base"])
async def test_proxies_and_ca_certificates_reach_commands(make, image, tmp_path):
    if image == "base":
        share_base()
    pem = issue(tmp_path, "mirror.example")[0].read_text()
    outbound = OutboundConfig(http_proxy="http://proxy:1", ca_certificates=pem)
    instance = await make(image=image, agent=AgentConfig(outbound=outbound))

    said = await run(instance, 'printenv http_proxy; cat "$SSL_CERT_FILE"', user="user")
    own = await run(instance, 'cat "$NODE_EXTRA_CA_CERTS"', user="user")

    assert said.out.startswith("http://proxy:1\n"), said
    assert said.out.count("BEGIN CERTIFICATE") > 20, "the certificates of the image stay"
    assert pem.strip() in said.out
    assert own.out.strip() == pem.strip()
