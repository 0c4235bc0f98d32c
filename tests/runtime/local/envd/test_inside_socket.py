"""`http://localhost:49983/envs` inside real sandboxes."""

import asyncio
import json
import os
import socket
from pathlib import Path

import pytest

from paddock.runtime.local.images.base import base_directory
from paddock.runtime.local.net import netns
from paddock.runtime.local.node.records import StateDirectory
from paddock.runtime.port import AgentConfig, Blueprint, Instance
from tests.runtime.local.inside import run, succeeds
from tests.runtime.local.nodes import TestNode, envd_of, eventually

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

AGENT = AgentConfig(sandbox_id="mine", access_token="the-token", env={"COLOUR": "blue"})
CALL = """
import json, sys, urllib.error, urllib.request
request = urllib.request.Request("http://localhost:49983" + sys.argv[1], method=sys.argv[3])
if sys.argv[2]:
    request.add_header("X-Access-Token", sys.argv[2])
try:
    with urllib.request.urlopen(request, timeout=20) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code)
except OSError as error:
    print(error)
"""


@pytest.fixture
async def make(node: TestNode):
    made: list[str] = []

    async def create(**changes) -> Instance:
        uid = f"v{os.urandom(4).hex()}"
        made.append(uid)
        changes = {"image": "host", "agent": AGENT, **changes}
        instance = await node.runtime.create(Blueprint(uid=uid, **changes))
        await write_caller(instance)
        return instance

    yield create
    for uid in made:
        await node.runtime.destroy(uid)
    for stored in await node.runtime.checkpoints():
        await node.runtime.delete_checkpoint(stored.id)


async def write_caller(instance: Instance) -> None:
    done = await run(
        instance,
        f"cat > /tmp/call.py <<'END'\n{CALL}END\nchmod 644 /tmp/call.py",
        token="the-token",
    )
    assert done.status == 0, done


async def ask(
    instance: Instance, path: str = "/envs", token: str = "the-token", *, method: str = "GET"
) -> str:
    """Return status and body of a request that the sandbox's own user sends."""
    command = f"python3 /tmp/call.py '{path}' '{token}' {method}"
    done = await run(instance, command, user="user", token="the-token")
    return (done.out + done.error).strip()


async def colour(instance: Instance) -> str:
    status, _, body = (await ask(instance)).partition(" ")
    assert status == "200", (status, body)
    return json.loads(body)["COLOUR"]


@pytest.mark.parametrize("privileges", ["sudo", "locked"])
async def test_the_user_reads_the_variables_with_the_token_and_nothing_else(
    make, privileges: str
) -> None:
    instance = await make(privileges=privileges)
    assert await colour(instance) == "blue"
    assert await ask(instance, token="") == "401"
    assert await ask(instance, token="another") == "401"
    for path, method in (("/files?path=/etc/passwd", "GET"), ("/init", "POST"), ("/metrics", "GET"),
                         ("/process.Process/List", "POST")):  # fmt: skip
        assert await ask(instance, path, method=method) == "404"


async def test_a_request_from_inside_starts_an_envd_that_had_ended(node: TestNode, make) -> None:
    instance = await make()
    first = await envd_of(node, instance.uid)
    os.kill(first, 9)
    assert b"blue" in await asyncio.to_thread(call_in_network_of, node, instance)
    assert await envd_of(node, instance.uid, other_than=first) != first


def call_in_network_of(node: TestNode, instance: Instance) -> bytes:
    """Send the request as a program in the sandbox's network does; return the response."""
    record = dict(StateDirectory(node.state).read_all())[instance.uid]
    assert record.init is not None
    namespace = netns.open_for_pid(record.init.pid)
    try:
        caller = netns.socket_in(namespace, socket.AF_INET)
    finally:
        os.close(namespace)
    with caller:
        caller.settimeout(20)
        caller.connect(("127.0.0.1", 49983))
        caller.sendall(
            b"GET /envs HTTP/1.1\r\nHost: localhost\r\nX-Access-Token: the-token\r\n"
            b"Connection: close\r\n\r\n"
        )
        answer = b""
        while piece := caller.recv(1 << 16):
            answer += piece
        return answer


async def test_new_variables_and_a_new_token_apply_at_once(node: TestNode, make) -> None:
    instance = await make()
    assert await colour(instance) == "blue"
    agent = AgentConfig(sandbox_id="mine", access_token="the-token", env={"COLOUR": "green"})
    await node.runtime.configure(instance.uid, agent)
    assert await colour(instance) == "green"


async def test_variables_are_served_after_a_hibernation(node: TestNode, make) -> None:
    instance = await make()
    assert await colour(instance) == "blue"
    await node.runtime.hibernate(instance.uid)
    instance = await node.runtime.restore(instance.uid)
    assert await colour(instance) == "blue"


async def test_a_clone_serves_its_own_variables(node: TestNode, make) -> None:
    instance = await make()
    agent = AgentConfig(sandbox_id="other", access_token="the-token", env={"COLOUR": "red"})
    uid = f"v{os.urandom(4).hex()}"
    (clone,) = await node.runtime.fork(
        instance.uid, (Blueprint(uid=uid, image="host", agent=agent),)
    )
    try:
        assert isinstance(clone, Instance), clone
        assert await colour(clone) == "red"
        assert await colour(instance) == "blue"
    finally:
        await node.runtime.destroy(uid)


async def test_the_next_node_serves_the_variables(node: TestNode, make) -> None:
    instance = await make()
    envd = await envd_of(node, instance.uid)
    node.kill()
    await node.start()
    assert await colour(instance) == "blue"
    os.kill(envd, 9)
    await eventually(lambda: not Path(f"/proc/{envd}").exists())
    assert await colour(instance) == "blue"


SERVER = """
import http.server
class Own(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(418)
        self.end_headers()
        self.wfile.write(b"own")
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", 49983), Own).serve_forever()
"""
WITHOUT_SOCKET = """
from paddock.runtime.local.envd import inside_socket
inside_socket.listen = lambda _: None
"""


async def test_a_program_of_the_sandbox_that_has_the_port_keeps_it() -> None:
    """As in sandboxes of an earlier version: they are restored, and their program answers."""
    node = TestNode()
    node.prelude = WITHOUT_SOCKET
    await node.start()
    try:
        instance = await node.runtime.create(Blueprint(uid="own", image="host", agent=AGENT))
        await write_caller(instance)
        serve = (
            f"cat > /tmp/own.py <<'END'\n{SERVER}END\npython3 /tmp/own.py >/dev/null 2>&1 & "
            "echo $! > /tmp/own.pid"
        )
        assert await succeeds(instance, serve, token="the-token")
        await eventually(lambda: answers(instance, "418"))
        node.kill()
        node.prelude = ""
        await node.start()
        await node.runtime.hibernate("own")
        instance = await node.runtime.restore("own")
        assert await ask(instance) == "418"
        # Once the program has ended, the next envd gets the port.
        assert await succeeds(instance, "kill -9 $(cat /tmp/own.pid)", token="the-token")
        os.kill(await envd_of(node, "own"), 9)
        await eventually(lambda: answers(instance, "200"))
    finally:
        await node.runtime.destroy("own")
        await node.stop()


async def answers(instance: Instance, status: str) -> bool:
    return (await ask(instance)).partition(" ")[0] == status


async def test_a_program_that_wants_the_port_gets_the_usual_error(make) -> None:
    instance = await make()
    bind = "python3 -c 'import socket; socket.create_server((\"127.0.0.1\", 49983))'"
    assert "Address already in use" in (await run(instance, bind, token="the-token")).error


async def test_in_the_base_image_variables_are_read_with_curl(node: TestNode, make) -> None:
    if not base_directory().exists():
        pytest.skip("the base image is not built; run `paddock image build-base`")
    instance = await make(image="base")
    done = await run(
        instance, "curl -s -H 'X-Access-Token: the-token' http://localhost:49983/envs",
        user="user", token="the-token",
    )  # fmt: skip
    assert json.loads(done.out)["COLOUR"] == "blue"
