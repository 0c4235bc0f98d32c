"""Checks of E2B's synchronous Python SDK against a whole installation."""

import datetime
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import e2b
from e2b import CommandExitException, Sandbox, SandboxQuery, SandboxState, TimeoutException
from e2b.sandbox.commands.command_handle import PtySize
from harness import check, ending, expect, main, until

IS_NEWEST = hasattr(Sandbox, "fork")
COUNTER = """exec python3 -c '
import time
n = 0
while True:
    n += 1
    open("/tmp/n", "w").write(str(n))
    time.sleep(0.05)
'"""


def pause(box):
    return box.pause() if IS_NEWEST else box.beta_pause()


def with_auto_pause(**options):
    if IS_NEWEST:
        return Sandbox.create(lifecycle={"on_timeout": "pause"}, **options)
    return Sandbox.beta_create(auto_pause=True, **options)


def number(box):
    """Return the counter in the sandbox, which is kept only in the memory of its process."""
    return until(lambda: int((box.files.exists("/tmp/n") and box.files.read("/tmp/n")) or 0))


def keeps_counting(box):
    seen = number(box)
    until(lambda: number(box) > seen)


@check
def create_inspect_and_kill():
    box = Sandbox.create(timeout=600, metadata={"user": "ada"}, envs={"COLOUR": "blue"})
    assert box.is_running()
    info = box.get_info()
    assert info.sandbox_id == box.sandbox_id
    assert info.metadata == {"user": "ada"}
    assert info.template_id == "base"
    assert info.state == SandboxState.RUNNING
    left = (info.end_at - datetime.datetime.now(datetime.UTC)).total_seconds()
    assert 500 < left <= 601, left
    assert box.commands.run("echo $COLOUR $E2B_SANDBOX").stdout == "blue true\n"
    assert box.commands.run("cat /run/e2b/.E2B_SANDBOX_ID").stdout == box.sandbox_id
    assert box.kill() is True
    assert box.kill() is False
    assert box.is_running() is False
    expect(e2b.NotFoundException, Sandbox.connect, box.sandbox_id)
    expect(Exception, box.commands.run, "true")


@check
def commands_in_the_foreground():
    box = Sandbox.create()
    with ending(box):
        done = box.commands.run("echo out; echo err >&2; pwd; whoami")
        assert done.stdout == "out\n/home/user\nuser\n", done.stdout
        assert done.stderr == "err\n"
        assert expect(CommandExitException, box.commands.run, "exit 7").exit_code == 7
        assert box.commands.run("whoami", user="root", cwd="/").stdout == "root\n"
        assert box.commands.run("echo $A", envs={"A": "1 2"}).stdout == "1 2\n"
        assert box.commands.run("sudo id -u").stdout == "0\n"
        expect(e2b.InvalidArgumentException, box.commands.run, "true", cwd="/nowhere")
        received = []
        box.commands.run("printf ü; sleep 0.1; printf ß", on_stdout=received.append)
        assert "".join(received) == "üß"
        started = time.monotonic()
        expect(TimeoutException, box.commands.run, "sleep 30", timeout=1)
        assert time.monotonic() - started < 25
        until(lambda: box.commands.run("pgrep -x sleep || echo none").stdout == "none\n")
        big = box.commands.run("head -c 3000000 /dev/zero | tr '\\0' x")
        assert len(big.stdout) == 3_000_000


@check
def commands_in_the_background():
    box = Sandbox.create()
    with ending(box):
        handle = box.commands.run("read line; echo got $line", background=True, stdin=True)
        assert handle.pid in [process.pid for process in box.commands.list()]
        box.commands.send_stdin(handle.pid, "hello\n")
        assert handle.wait().stdout == "got hello\n"
        sleeper = box.commands.run("sleep 100", background=True, timeout=0)
        again = box.commands.connect(sleeper.pid)
        assert box.commands.kill(sleeper.pid) is True
        assert expect(CommandExitException, again.wait).exit_code == -1
        assert box.commands.kill(sleeper.pid) is False
        trap = box.commands.run(
            "trap 'echo caught; exit 3' TERM; echo ready; touch /tmp/set;"
            " while true; do sleep 0.1; done",
            background=True,
        )
        until(lambda: box.files.exists("/tmp/set"))
        box.commands.run(f"kill -TERM {trap.pid}")
        ended = expect(CommandExitException, trap.wait)
        assert (ended.exit_code, ended.stdout) == (3, "ready\ncaught\n"), ended


@check(newer=True)
def standard_input_can_be_closed():
    box = Sandbox.create()
    with ending(box):
        handle = box.commands.run("cat; echo over", background=True, stdin=True)
        box.commands.send_stdin(handle.pid, "hello\n")
        box.commands.close_stdin(handle.pid)
        assert handle.wait().stdout == "hello\nover\n"


@check(newer=True)
def many_commands_at_once():
    box = Sandbox.create()
    with ending(box), ThreadPoolExecutor(20) as pool:
        done = pool.map(lambda n: box.commands.run(f"echo {n}").stdout, range(20))
        assert list(done) == [f"{n}\n" for n in range(20)]


@check
def files():
    box = Sandbox.create()
    with ending(box):
        info = box.files.write("deep/dir/a.txt", "grüße")
        assert info.path == "/home/user/deep/dir/a.txt"
        assert box.files.read("deep/dir/a.txt") == "grüße"
        blob = bytes(range(256)) * 8_000
        box.files.write("/tmp/blob", blob)
        assert bytes(box.files.read("/tmp/blob", format="bytes")) == blob
        box.files.write("empty", "")
        assert box.files.read("empty") == ""
        assert box.files.make_dir("new") is True
        assert box.files.make_dir("new") is False
        assert box.files.get_info("new").size > 0
        assert box.files.exists("new")
        assert not box.files.exists("old")
        box.files.rename("empty", "new/renamed")
        assert [entry.name for entry in box.files.list("new")] == ["renamed"]
        assert box.files.get_info("new/renamed").owner == "user"
        box.files.remove("new")
        assert not box.files.exists("new/renamed")
        expect(e2b.NotFoundException, box.files.read, "nothing")
        many = box.files.write_files([{"path": f"many/{n}", "data": str(n)} for n in range(5)])
        assert len(many) == 5


@check
def watching_a_directory():
    box = Sandbox.create()
    with ending(box):
        box.files.make_dir("watched")
        handle = box.files.watch_dir("watched")
        box.files.write("watched/b.txt", "x")
        events = [(event.name, event.type.value) for event in handle.get_new_events()]
        assert events == [("b.txt", "create"), ("b.txt", "chmod"), ("b.txt", "write")], events
        handle.stop()


@check
def terminals():
    box = Sandbox.create()
    with ending(box):
        terminal = box.pty.create(PtySize(rows=30, cols=100), timeout=60)
        box.pty.resize(terminal.pid, PtySize(rows=25, cols=90))
        box.pty.send_stdin(terminal.pid, b"stty size; tput cols; exit 4\n")
        received = []
        ended = expect(CommandExitException, terminal.wait, on_pty=received.append)
        assert ended.exit_code == 4
        assert b"25 90" in b"".join(received), received
        other = box.pty.create(PtySize(rows=30, cols=100))
        assert box.pty.kill(other.pid) is True


@check
def lists_with_pages_and_filters():
    mark = f"a b&c=d/{time.time()}"
    boxes = [Sandbox.create(metadata={"mark": mark, "n": str(n % 2)}) for n in range(5)]
    with ending(*boxes):
        pager = Sandbox.list(query=SandboxQuery(metadata={"mark": mark}), limit=2)
        pages = []
        while pager.has_next:
            pages.append([item.sandbox_id for item in pager.next_items()])
        assert pager.next_token is None
        assert [len(page) for page in pages] == [2, 2, 1]
        found = [sandbox_id for page in pages for sandbox_id in page]
        assert found == [box.sandbox_id for box in reversed(boxes)]
        pause(boxes[0])
        both = {"mark": mark, "n": "0"}
        paused = SandboxQuery(metadata=both, state=[SandboxState.PAUSED])
        assert [item.sandbox_id for item in Sandbox.list(query=paused).next_items()] == [
            boxes[0].sandbox_id
        ]
        running = SandboxQuery(metadata=both, state=[SandboxState.RUNNING])
        assert len(Sandbox.list(query=running).next_items()) == 2
        assert Sandbox.list(query=SandboxQuery(metadata={"mark": "other"})).next_items() == []


@check
def timeouts():
    box = Sandbox.create(timeout=60)
    before = box.get_info().end_at
    box.set_timeout(600)
    assert (box.get_info().end_at - before).total_seconds() > 500
    box.connect(timeout=10)
    assert (box.get_info().end_at - before).total_seconds() > 500
    box.set_timeout(1)
    until(lambda: not box.is_running())
    assert box.kill() is False
    started = time.monotonic()
    try:
        short = Sandbox.create(timeout=4)
    except e2b.SandboxException:
        # A stalled machine may not hand the sandbox out before its timeout.
        assert time.monotonic() - started > 3
        short = Sandbox.create(timeout=30)
    until(lambda: not short.is_running())


@check
def pause_and_connect_keep_memory_processes_and_files():
    box = Sandbox.create()
    with ending(box):
        counter = box.commands.run(COUNTER, background=True, timeout=0)
        box.files.write("kept.txt", "kept")
        number(box)
        pause(box)
        assert box.get_info().state == SandboxState.PAUSED
        if IS_NEWEST:
            assert box.pause() is False
        assert box.is_running() is False
        again = Sandbox.connect(box.sandbox_id)
        assert again.sandbox_id == box.sandbox_id
        assert again.files.read("kept.txt") == "kept"
        assert counter.pid in [process.pid for process in again.commands.list()]
        keeps_counting(again)
        assert again.get_info().state == SandboxState.RUNNING
        # The first object still works: the same sandbox, the same token.
        assert box.commands.run("echo same").stdout == "same\n"


@check
def auto_pause_pauses_at_the_timeout():
    box = with_auto_pause(timeout=60)
    with ending(box):
        box.files.write("kept.txt", "kept")
        box.set_timeout(0)
        until(lambda: box.get_info().state == SandboxState.PAUSED)
        again = Sandbox.connect(box.sandbox_id, timeout=60)
        assert again.files.read("kept.txt") == "kept"


@check(newer=True)
def traffic_resumes_with_auto_resume():
    box = Sandbox.create(lifecycle={"on_timeout": "pause", "auto_resume": True}, timeout=60)
    with ending(box):
        box.commands.run(COUNTER, background=True, timeout=0)
        box.pause()
        assert box.get_info().state == SandboxState.PAUSED
        assert box.commands.run("echo awake").stdout == "awake\n"
        assert box.get_info().lifecycle["auto_resume"] is True
        keeps_counting(box)


@check(newer=True)
def is_running_returns_while_a_sandbox_is_paused_and_killed():
    box = Sandbox.create()
    polls, done = [], threading.Event()

    def poll():
        while not done.is_set():
            polls.append(box.is_running())

    with ThreadPoolExecutor(4) as pool:
        polling = [pool.submit(poll) for _ in range(4)]
        try:
            for _ in range(4):
                box.pause()
                box.connect()
            box.kill()
        finally:
            done.set()
        for one in polling:
            one.result()
    assert set(polls) == {True, False}, set(polls)


@check(newer=True)
def traffic_resumes_a_hibernated_sandbox():
    box = Sandbox.create(
        lifecycle={"on_timeout": "pause", "auto_resume": True},
        timeout=60,
        metadata={"paddock.dev/pause-strategy": "Hibernate"},
    )
    with ending(box):
        box.commands.run(COUNTER, background=True, timeout=0)
        box.pause()
        assert box.get_info().state == SandboxState.PAUSED
        assert box.commands.run("echo awake").stdout == "awake\n"
        keeps_counting(box)


@check(newer=True)
def pause_without_memory_keeps_files_only():
    box = Sandbox.create()
    with ending(box):
        box.files.write("kept.txt", "kept")
        box.commands.run("sleep 1000", background=True, timeout=0)
        box.pause(mode="filesystem")
        again = Sandbox.connect(box.sandbox_id)
        assert again.files.read("kept.txt") == "kept"
        assert again.commands.run("pgrep -x sleep || echo none").stdout == "none\n"


@check
def an_unknown_template_has_advice():
    missing = str(expect(e2b.SandboxException, Sandbox.create, "code-interpreter-v1"))
    assert "template 'code-interpreter-v1' not found" in missing, missing
    assert "paddock template install code-interpreter" in missing, missing
    assert "templates that exist: base" in missing, missing


@check(newer=True)
def a_snapshot_can_be_used_as_a_template():
    box = Sandbox.create()
    with ending(box):
        box.files.write("state.txt", "one")
        box.commands.run(COUNTER, background=True, timeout=0)
        seen = number(box)
        name = f"trained-{int(time.time() * 1000)}"
        snapshot = box.create_snapshot(name=name)
        assert box.is_running()
        box.files.write("state.txt", "two")
        listed = [item.snapshot_id for item in box.list_snapshots().next_items()]
        assert snapshot.snapshot_id in listed
        assert e2b.Template.exists(name)
        assert not e2b.Template.exists(f"{name}-2")
        for reference in (snapshot.snapshot_id, name):
            clone = Sandbox.create(reference)
            with ending(clone):
                assert clone.files.read("state.txt") == "one"
                assert number(clone) >= seen
        assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
        assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False
        expect(e2b.SandboxException, Sandbox.create, snapshot.snapshot_id)


@check(newer=True)
def forks_are_independent_clones():
    box = Sandbox.create()
    with ending(box):
        box.files.write("state.txt", "parent")
        box.commands.run(COUNTER, background=True, timeout=0)
        number(box)
        forks = box.fork(count=2, timeout=600)
        with ending(*forks):
            assert len({box.sandbox_id, *(fork.sandbox_id for fork in forks)}) == 3
            for fork in forks:
                assert fork.files.read("state.txt") == "parent"
                keeps_counting(fork)
                fork.files.write("state.txt", fork.sandbox_id)
            assert box.files.read("state.txt") == "parent"
            assert box.commands.run("echo on").stdout == "on\n"


@check
def metrics():
    box = Sandbox.create()
    with ending(box):
        box.commands.run("head -c 50000000 /dev/zero | sha256sum")
        sample = until(box.get_metrics)[-1]
        assert sample.cpu_count == 2
        assert 0 < sample.mem_used <= sample.mem_total
        assert 0 <= sample.disk_used <= sample.disk_total
        past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=2)
        assert box.get_metrics(start=past, end=past + datetime.timedelta(hours=1)) == []


@check
def errors_have_the_types_of_the_sdk():
    unknown = expect(e2b.SandboxException, Sandbox.create, "no-such-template")
    assert "404" in str(unknown), unknown
    expect(e2b.AuthenticationException, Sandbox.create, api_key="e2b_" + "0" * 40)
    expect(e2b.SandboxException, Sandbox.create, timeout=10**8)
    assert Sandbox.kill("i" + "0" * 20) is False


@check
def signed_links_to_files():
    box = Sandbox.create()
    with ending(box):
        box.files.write("signed", "by url")
        link = box.download_url("signed", user="user", use_signature_expiration=60)
        with urllib.request.urlopen(link) as answer:
            assert answer.read() == b"by url"
        wrong = link.replace("path=signed", "path=other")
        refused = expect(urllib.error.HTTPError, urllib.request.urlopen, wrong)
        assert refused.code in (401, 502), refused.code


@check(newer=True)
def the_same_idempotency_key_gives_the_same_sandbox():
    key = f"key-{int(time.time() * 1000)}"
    first = Sandbox.create(idempotency_key=key)
    with ending(first):
        assert Sandbox.create(idempotency_key=key).sandbox_id == first.sandbox_id


main(IS_NEWEST)
