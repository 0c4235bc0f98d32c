"""Images that were not made for sandboxes: without `user`, bash, /etc/passwd, or any shell."""

import aiohttp
import pytest

from paddock.kit.errors import InvalidError
from paddock.runtime.local.images import ImageStore
from paddock.runtime.port import AgentConfig, Blueprint, Instance
from tests.runtime.local.images.small_roots import shell_root, static_root
from tests.runtime.local.inside import start

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

NODE_USERS = "root:x:0:0:root:/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh\n"
UNUSABLE_HOME = "daemon:x:2:2::/nonexistent:/bin/sh\n"


@pytest.fixture(scope="module")
def images(_node, tmp_path_factory: pytest.TempPathFactory) -> None:
    """`bare` has a shell only, `node` has other users, `static` has one program only."""
    directory = tmp_path_factory.mktemp("roots")
    store = ImageStore(_node.state / "images")
    store.add(shell_root(directory / "bare"), "bare")
    root = shell_root(directory / "node")
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text(NODE_USERS + UNUSABLE_HOME)
    (root / "etc/group").write_text("root:x:0:\nnode:x:1000:\n")
    store.add(root, "node")
    store.add(static_root(directory / "static"), "static")


@pytest.fixture
async def make(node, images):
    made: list[str] = []

    async def create(image: str, **fields: object) -> Instance:
        uid = f"f-{image}-{len(made)}"
        made.append(uid)
        return await node.runtime.create(Blueprint(uid=uid, image=image, **fields))

    yield create
    for uid in made:
        await node.runtime.destroy(uid)


async def command_line(instance: Instance, script: str, user: str) -> str:
    """Run a command line as SDKs do; return its output."""
    done = await start(instance, ["/bin/bash", "-l", "-c", script], user=user)
    assert (done.status, done.error) == (0, "")
    return done.out


@pytest.mark.parametrize(
    ("image", "user", "expected"),
    [
        ("bare", "user", "uid=1000(user) gid=1000(user) groups=1000(user)\n/home/user\n"),
        ("bare", "", "uid=1000(user) gid=1000(user) groups=1000(user)\n/home/user\n"),
        ("bare", "root", "uid=0(root) gid=0(root) groups=0(root)\n/root\n"),
        ("node", "user", "uid=1001(user) gid=1001(user) groups=1001(user)\n/home/user\n"),
        ("node", "node", "uid=1000(node) gid=1000(node) groups=1000(node)\n/\n"),
        ("node", "1000", "uid=1000(node) gid=1000(node) groups=1000(node)\n/\n"),
        ("node", "4321", "uid=4321 gid=0(root) groups=0(root)\n/\n"),
        ("node", "daemon", "uid=2(daemon) gid=2 groups=2\n/\n"),
    ],
)
async def test_commands_run_as_every_user(make, image: str, user: str, expected: str):
    assert await command_line(await make(image), "id; pwd", user) == expected


async def test_the_user_owns_its_home_directory(make):
    instance = await make("node")
    script = "echo mine > note; cat note /etc/passwd"
    assert await command_line(instance, script, "user") == (
        f"mine\n{NODE_USERS}{UNUSABLE_HOME}user:*:1001:1001::/home/user:/bin/sh\n"
    )


@pytest.mark.parametrize("image", ["bare", "static"])
@pytest.mark.parametrize("user", ["user", "root"])
async def test_files_are_written_and_read(make, image: str, user: str):
    instance = await make(image)
    assert instance.address.envd is not None
    connector = aiohttp.UnixConnector(instance.address.envd.removeprefix("unix:"))
    async with aiohttp.ClientSession(connector=connector) as client:
        where = f"http://sandbox/files?path=notes/a.txt&username={user}"
        headers = {"Content-Type": "application/octet-stream"}
        async with client.post(where, data=b"kept", headers=headers) as answer:
            home = "/root" if user == "root" else "/home/user"
            assert (await answer.json())[0]["path"] == f"{home}/notes/a.txt"
        async with client.get(where) as answer:
            assert (answer.status, await answer.read()) == (200, b"kept")


async def test_a_program_runs_without_a_shell_and_a_command_line_fails_with_the_reason(make):
    instance = await make("static")
    assert (await start(instance, ["/app/where"], user="user")).out == "1000 in /home/user\n"
    assert (await start(instance, ["/app/where"], user="root")).out == "0 in /root\n"
    with pytest.raises(AssertionError, match=r"has no shell .* start a program by its path"):
        await start(instance, ["/bin/bash", "-l", "-c", "true"], user="user")


async def test_start_and_ready_commands_run_without_bash(make, node):
    instance = await make("bare", start_command="id > /tmp/who", ready_command="cat /tmp/who")
    await node.runtime.start(instance.uid)
    assert "(user)" in await command_line(instance, "cat /tmp/who", "root")


async def test_the_working_directory_of_the_template_is_created(make):
    agent = AgentConfig(default_workdir="/srv/work")
    instance = await make("bare", workdir="/srv/work", agent=agent)
    assert await command_line(instance, "pwd; echo 1 > mine", "user") == "/srv/work\n"


@pytest.mark.parametrize(
    ("image", "fields", "reason"),
    [
        ("node", {"user": "app"}, "user 'app' of the template does not exist in image 'node'"),
        ("host", {"user": "app"}, "user 'app' of the template does not exist in image 'host'"),
        ("static", {"start_command": "serve"}, r"no shell .*spec.startCommand .* cannot run"),
        ("static", {"ready_command": "true"}, r"no shell .*spec.readyCommand .* cannot run"),
    ],
)
async def test_what_cannot_work_fails_the_start_with_a_reason(make, image, fields, reason: str):
    with pytest.raises(InvalidError, match=reason):
        await make(image, **fields)
