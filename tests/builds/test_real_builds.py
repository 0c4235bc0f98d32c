"""Template builds in real sandboxes: steps, layers, start command, failures."""

import asyncio
import os
from collections.abc import Generator

import pytest

from tests.builds.real import DIGEST, Builder, archive, run
from tests.installation import Installation

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes with checkpoints need root"),
]

UNKNOWN_USER = (
    "failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'"
)


@pytest.fixture(scope="module")
def runner() -> Generator[asyncio.Runner]:
    with asyncio.Runner() as found:
        yield found


@pytest.fixture(scope="module")
def builder(runner: asyncio.Runner) -> Generator[Builder]:
    paddock = Installation(pool_size=1)
    runner.run(paddock.__aenter__())
    try:
        yield Builder(paddock)
    finally:
        runner.run(paddock.__aexit__())


def test_user_directory_and_variables_apply_to_later_steps_and_to_sandboxes(
    runner: asyncio.Runner, builder: Builder
) -> None:
    async def scenario() -> None:
        status = await builder.build(
            "steps",
            {"type": "ENV", "args": ["NAME", 'a "b" `c` \\d']},
            {"type": "ENV", "args": ["FULL", "$NAME/${NAME} $(id)"]},
            {"type": "USER", "args": ["ana", "true"]},
            {"type": "WORKDIR", "args": ["/srv/app"]},
            run('whoami; pwd; touch mine; echo "$NAME"; echo "$FULL"'),
            run("whoami", "root"),
        )
        messages = builder.messages(status["uid"])
        name = 'a "b" `c` \\d'
        assert [line for line in messages if "[stdout]" in line] == [
            "[builder 5/6] [stdout]: ana",
            "[builder 5/6] [stdout]: /srv/app",
            f"[builder 5/6] [stdout]: {name}",
            f"[builder 5/6] [stdout]: {name}/{name} $(id)",
            "[builder 6/6] [stdout]: root",
        ]
        out = await builder.out("steps", 'whoami; pwd; ls; echo "$NAME"')
        assert out.splitlines() == ["ana", "/srv/app", "mine", name]

    runner.run(scenario())


def test_a_sandbox_of_a_template_with_a_start_command_already_listens(
    runner: asyncio.Runner, builder: Builder
) -> None:
    async def scenario() -> None:
        status = await builder.build(
            "server",
            run("echo hello > index.html"),
            startCommand="echo up; exec python3 -m http.server 8000 --directory /home/user",
            readyCommand="curl -sf localhost:8000",
        )
        messages = builder.messages(status["uid"])
        assert messages.index("[start] [stdout]: up") < messages.index("Template is ready")
        box = await builder.paddock.create(templateID="server", timeout=60)
        assert await builder.paddock.call(box, 8000) == (200, b"hello\n")
        assert (await builder.paddock.run(box, "pgrep -fc 'http[.]server'")).strip() == "1"

    runner.run(scenario())


def test_unchanged_steps_come_from_the_cache(runner: asyncio.Runner, builder: Builder) -> None:
    async def scenario() -> None:
        steps = [run("date +%N > stamp"), run("echo two >> stamp")]
        first = await builder.build("cached", *steps)
        stamp = await builder.out("cached", "cat stamp")
        again = await builder.build("cached", *steps)
        assert (first["cachedSteps"], again["cachedSteps"]) == (0, 2)
        assert builder.messages(again["uid"])[1].startswith("CACHED [builder 1/2] RUN date")
        assert await builder.out("cached", "cat stamp") == stamp
        longer = await builder.build("cached", *steps, run("echo three >> stamp"))
        assert longer["cachedSteps"] == 2
        assert await builder.out("cached", "cat stamp") == stamp + "three\n"
        forced = await builder.build("cached", steps[0], {**steps[1], "force": True})
        assert forced["cachedSteps"] == 1
        anew = await builder.build("cached", *steps, force=True)
        assert anew["cachedSteps"] == 0
        assert await builder.out("cached", "cat stamp") != stamp

    runner.run(scenario())


def test_files_are_copied_from_uploads(runner: asyncio.Runner, builder: Builder) -> None:
    async def scenario() -> None:
        files = {"folder/a.txt": "a", "folder/sub/b.txt": "b", "one": "1"}
        builder.upload(archive(files, links={"folder/link": "a.txt", "folder/broken": "none"}))
        copy = {"type": "COPY", "filesHash": DIGEST}
        await builder.build(
            "files",
            {**copy, "args": ["folder/*", "app", "", ""]},
            {**copy, "args": ["one", "/srv/", "root", "0600"]},
        )
        out = await builder.out(
            "files",
            "cd app; cat a.txt sub/b.txt link; readlink broken; stat -c %U:%a /srv/one a.txt",
        )
        assert out == "abanone\nroot:600\nuser:644\n"

    runner.run(scenario())


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            run("whoami", "root123"),
            UNKNOWN_USER,
        ),
        (run("exit 3"), "failed to run command 'exit 3': exit status 3"),
        ({"type": "HEALTHCHECK", "args": []}, "command type HEALTHCHECK is not implemented"),
        (
            {"type": "COPY", "args": ["a", "b", "", ""], "filesHash": "cd" * 32},
            f"the files of COPY a (hash {'cd' * 32}) were not uploaded",
        ),
    ],
)
def test_a_failing_step_ends_the_build_with_its_number_and_reason(
    runner: asyncio.Runner, builder: Builder, step: dict[str, object], message: str
) -> None:
    async def scenario() -> None:
        status = await builder.fail("failing", run("true"), step)
        assert (status["failedStep"], status["message"]) == ("2", message)
        await builder.no_sandboxes()

    runner.run(scenario())


def test_a_start_command_that_fails_ends_the_build(
    runner: asyncio.Runner, builder: Builder
) -> None:
    async def scenario() -> None:
        status = await builder.fail("broken", startCommand="exit 7", readyCommand="false")
        assert status["failedStep"] == "finalize"
        assert "exit status 7" in status["message"]

    runner.run(scenario())


def test_a_template_can_be_built_from_another_one_with_its_server(
    runner: asyncio.Runner, builder: Builder
) -> None:
    async def scenario() -> None:
        await builder.build(
            "parent",
            {"type": "ENV", "args": ["FROM", "parent"]},
            run("echo parent > index.html"),
            startCommand="exec python3 -m http.server 8001 --directory /home/user",
            readyCommand="curl -sf localhost:8001",
        )
        await builder.build("child", run("echo $FROM child > index.html"), fromTemplate="parent")
        box = await builder.paddock.create(templateID="child", timeout=60)
        assert await builder.paddock.call(box, 8001) == (200, b"parent child\n")

    runner.run(scenario())


def test_a_canceled_build_ends_with_the_reason_and_leaves_no_sandbox(
    runner: asyncio.Runner, builder: Builder
) -> None:
    async def scenario() -> None:
        build = await builder.start("slow", run("echo began; sleep 300"))
        while not any("began" in line for line in builder.messages(build)):
            await asyncio.sleep(0.02)
        name = build["metadata"]["name"]
        await builder.paddock.kube(
            "PATCH",
            f"/apis/paddock.dev/v1alpha1/namespaces/default/templatebuilds/{name}",
            {"spec": {"canceled": "not wanted any more"}},
            kind="application/merge-patch+json",
        )
        status = await builder.end(build)
        assert (status["phase"], status["message"]) == ("Failed", "not wanted any more")
        await builder.no_sandboxes()

    runner.run(scenario())


def test_layers_count_for_what_they_add(runner: asyncio.Runner, builder: Builder) -> None:
    size = 8 << 20

    async def scenario() -> None:
        large = run(f"head -c {size} /dev/urandom > large")
        await builder.build("sums", large, run("echo one > small"))
        await builder.build("sums", large, run("rm large; echo two > small"))
        layers = await builder.layers()
        uids = {one["metadata"]["uid"] for one in layers}
        files = [one["status"] for one in layers if not one["status"].get("hasMemory")]
        stored = [status for status in files if status["sizeBytes"] >= size]
        if not any(status.get("sharedBytes") for status in stored):
            pytest.skip("the files of sandboxes are not on btrfs with simple quotas")
        assert len(stored) == 3
        assert all(status["baseUid"] in uids for status in stored if status.get("sharedBytes"))
        added = sorted(status["sizeBytes"] - status.get("sharedBytes", 0) for status in stored)
        assert added[-1] >= size
        assert added[-2] < size / 10

    runner.run(scenario())
