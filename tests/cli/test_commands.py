"""Every command of `paddock` against a real installation: its output and exit code."""

import json
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
import yaml

from tests.cli.conftest import PADDOCK, Cli

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(300)]

TEMPLATE = """
apiVersion: paddock.dev/v1alpha1
kind: SandboxTemplate
metadata: {name: mine}
spec: {image: base, env: {COLOUR: blue}}
"""

BATCH = """
apiVersion: paddock.dev/v1alpha1
kind: BatchSandbox
metadata: {{name: {name}}}
spec: {{replicas: 2, poolRef: base, taskTemplate: {{spec: {{process: {process}}}}}}}
"""


def test_a_sandbox_is_created_listed_used_and_killed(cli: Cli) -> None:
    made = cli.json("sandbox", "create", "--timeout", "120", "-m", "user=b c", "-e", "A=1 2")
    sandbox_id = made["sandboxID"]
    assert cli("sandbox", "exec", sandbox_id, "--", "sh", "-c", "echo $A") == "1 2\n"
    listed = cli.json("sandbox", "ls", "-m", "user=b c")
    assert [item["sandboxID"] for item in listed] == [sandbox_id]
    assert sandbox_id in cli("sandbox", "ls", "--state", "running")
    assert cli("sandbox", "kill", sandbox_id) == f"killed {sandbox_id}\n"
    gone = cli.run("sandbox", "kill", sandbox_id)
    assert gone.returncode == 1
    assert gone.stderr.startswith("error: ")
    assert "was not found" in gone.stderr


def test_exec_forwards_output_errors_and_exit_code(cli: Cli, box: str) -> None:
    done = cli.run("sandbox", "exec", box, "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert cli("sandbox", "exec", "--user", "root", "--cwd", "/", box, "whoami; pwd") == "root\n/\n"
    assert cli.run("sandbox", "exec", box, "kill -9 $$").returncode == 137


def test_exec_forwards_standard_input_with_the_option(cli: Cli, box: str) -> None:
    text = "a line\n" * 20000
    done = cli.run("sandbox", "exec", "--stdin", box, "wc -c; echo $?", stdin=text)
    assert done.stdout.split() == [str(len(text)), "0"]
    assert cli.run("sandbox", "exec", box, "cat", stdin=text).stdout == ""
    # A command that does not read all its input is not an error.
    assert cli.run("sandbox", "exec", "-i", box, "head -n 1", stdin=text).stdout == "a line\n"


def test_ctrl_c_also_ends_the_command_in_the_sandbox(cli: Cli, box: str) -> None:
    command = [str(PADDOCK), "sandbox", "exec", box, "echo started; sleep 1234; echo not this"]
    with subprocess.Popen(
        command,
        env=cli.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "started\n"
        running.send_signal(signal.SIGINT)
        assert running.communicate(timeout=100) == ("", "")
    assert running.returncode == 130
    ended = "while grep -qzx 1234 /proc/[0-9]*/cmdline 2>/dev/null; do sleep 0.1; done"
    cli("sandbox", "exec", box, ended)


def test_exec_fork_and_kill_print_json(cli: Cli, box: str) -> None:
    done = cli.run("--output", "json", "sandbox", "exec", box, "echo out; echo err >&2; exit 7")
    assert done.returncode == 7
    assert msgspec.json.decode(done.stdout) == {"exitCode": 7, "stdout": "out\n", "stderr": "err\n"}
    clones = [item["sandbox"]["sandboxID"] for item in cli.json("sandbox", "fork", box)]
    assert cli.json("sandbox", "kill", *clones) == {"killed": clones}


def test_kinds_have_short_names_and_tables_are_never_wrapped(cli: Cli, box: str) -> None:
    for word in ("pool", "pools", "sandboxpools", "sbp"):
        assert cli.json("get", word, "base")["kind"] == "SandboxPool"
    narrow = Cli({**cli.environment, "COLUMNS": "30"})
    assert any(
        line.startswith(box) and "running" in line for line in narrow("sandbox", "ls").splitlines()
    )
    assert yaml.safe_load(narrow("describe", "pool", "base"))["kind"] == "SandboxPool"


def test_file_errors_are_reported_with_the_file(cli: Cli, box: str, tmp_path: Path) -> None:
    for arguments, problem in (
        (("apply", "-f", "/nowhere.yaml"), "/nowhere.yaml cannot be read: No such file"),
        (("sandbox", "cp", "/nowhere", f"{box}:/tmp/x"), "/nowhere: No such file"),
        (("sandbox", "cp", f"{box}:/etc/hostname", "/nowhere/x"), "/nowhere/x: No such file"),
    ):
        done = cli.run(*arguments)
        assert done.returncode == 1
        assert problem in done.stderr
    (tmp_path / "nameless.yaml").write_text("kind: SandboxPool\n")
    done = cli.run("apply", "-f", str(tmp_path / "nameless.yaml"))
    assert "a SandboxPool has no metadata.name" in done.stderr


def test_files_are_copied_both_ways(cli: Cli, box: str, tmp_path: Path) -> None:
    here, back = tmp_path / "here", tmp_path / "back"
    here.write_bytes(bytes(range(256)) * 5000)
    assert cli("sandbox", "cp", str(here), f"{box}:/tmp/there") == "1280000 bytes copied\n"
    assert cli.json("sandbox", "cp", f"{box}:/tmp/there", str(back)) == {"bytes": 1280000}
    assert back.read_bytes() == here.read_bytes()
    # A file copied into a directory keeps its name.
    cli("sandbox", "cp", str(here), f"{box}:/tmp/")
    assert cli("sandbox", "exec", box, "stat -c %s /tmp/here") == "1280000\n"
    (tmp_path / "into").mkdir()
    cli("sandbox", "cp", f"{box}:/tmp/there", str(tmp_path / "into"))
    assert (tmp_path / "into" / "there").stat().st_size == 1280000


def test_a_pipe_is_copied_to_its_end(cli: Cli, box: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    data = os.urandom(300_000)
    command = [str(PADDOCK), "sandbox", "cp", str(pipe), f"{box}:/tmp/piped"]
    with subprocess.Popen(
        command, env=cli.environment, stdout=subprocess.PIPE, text=True
    ) as copying:
        pipe.write_bytes(data)
        assert copying.communicate(timeout=100)[0] == "300000 bytes copied\n"
    cli("sandbox", "cp", f"{box}:/tmp/piped", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == data


def test_a_paused_or_missing_sandbox_is_not_reported_as_a_failure_of_paddock(
    cli: Cli, box: str
) -> None:
    started = [str(PADDOCK), "sandbox", "exec", box, "echo started; exec sleep 1000"]
    with subprocess.Popen(
        started, env=cli.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "started\n"
        cli("sandbox", "pause", box)
        _, problem = running.communicate(timeout=100)
    assert running.returncode == 1
    assert problem.startswith("error: the sandbox ended or was paused while the command ran\n")
    for arguments in (("exec", box, "true"), ("cp", f"{box}:/etc/hostname", "/dev/null")):
        done = cli.run("sandbox", *arguments)
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: sandbox {box} is paused\n")
        assert f"hint: paddock sandbox resume {box}" in done.stderr
    strange = cli.run("sandbox", "kill", "no such id")
    assert strange.stderr == "error: sandbox 'no such id' was not found\n"


def test_missing_objects_are_reported_with_a_hint(cli: Cli, box: str) -> None:
    for arguments, hint in (
        (("create", "nowhere"), "hint: `paddock get templates`"),
        (("exec", "nobody", "true"), "hint: `paddock sandbox ls`"),
    ):
        done = cli.run("sandbox", *arguments)
        assert done.returncode == 1
        assert hint in done.stderr
    missing_file = cli.run("sandbox", "cp", f"{box}:/tmp/nowhere", "/dev/null")
    assert "No such file" in missing_file.stderr
    assert "hint:" not in missing_file.stderr


def test_usage_errors_exit_with_2(cli: Cli) -> None:
    for arguments, problem in (
        (("create", "--env", "A"), "--env expects NAME=VALUE"),
        (("create", "--wake"), "--wake needs --pause-at-end"),
        (("cp", "a", "b"), "exactly one side must be ID:PATH"),
    ):
        done = cli.run("sandbox", *arguments)
        assert done.returncode == 2
        assert problem in done.stderr


def test_a_url_may_omit_the_scheme(cli: Cli) -> None:
    elsewhere = f"localhost:{cli.environment['PADDOCK_PORT']}"
    assert cli.json("--url", elsewhere, "sandbox", "ls") == cli.json("sandbox", "ls")


def test_lists_show_when_a_paused_sandbox_ends(cli: Cli) -> None:
    key = "paddock.dev/paused-retention"
    wanted = {"13d": (), "4h": ("-m", f"{key}=5h"), "never": ("-m", f"{key}=forever")}
    ends: dict[str, str] = {}
    for end, options in wanted.items():
        sandbox_id = cli.json("sandbox", "create", *options)["sandboxID"]
        cli("sandbox", "pause", sandbox_id)
        ends[sandbox_id] = end
    for listing in (cli("sandbox", "ls"), cli("get", "sandboxes")):
        header, *lines = listing.splitlines()
        assert "ENDS IN" in header.upper()
        for sandbox_id, end in ends.items():
            [line] = [line for line in lines if sandbox_id in line]
            assert end in line.split()
    cli("sandbox", "kill", *ends)


def test_a_sandbox_is_paused_resumed_and_forked(cli: Cli, box: str) -> None:
    cli("sandbox", "exec", box, "echo kept > kept.txt")
    assert cli("sandbox", "pause", box) == f"paused {box}\n"
    paused = {
        item["sandboxID"]: item["state"] for item in cli.json("sandbox", "ls", "--state", "paused")
    }
    assert paused[box] == "paused"
    assert set(paused.values()) == {"paused"}
    assert cli.run("sandbox", "pause", box).returncode == 1
    assert cli("sandbox", "resume", box) == f"running {box}\n"
    clones = cli("sandbox", "fork", "--count", "2", box).split()
    assert len(clones) == 2
    for clone in clones:
        assert cli("sandbox", "exec", clone, "cat kept.txt") == "kept\n"
    cli("sandbox", "kill", *clones)


def test_the_log_of_a_sandbox_is_shown(cli: Cli, box: str) -> None:
    assert f"handed out as {box}" in cli("sandbox", "logs", box)
    assert {"timestamp", "level", "message"} <= set(cli.json("sandbox", "logs", box)[0])
    [latest] = cli.json("sandbox", "logs", "--limit", "1", box)
    assert latest in cli.json("sandbox", "logs", box)[1:]


def test_shell_opens_a_terminal(cli: Cli, box: str) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [str(PADDOCK), "sandbox", "shell", box],
        env=cli.environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""

    def read_until(wanted: bytes) -> None:
        nonlocal shown
        deadline = time.monotonic() + 90
        while wanted not in shown:
            assert time.monotonic() < deadline, shown
            if select.select([ours], [], [], 0.2)[0]:
                shown += os.read(ours, 4096)

    try:
        read_until(b"$ ")
        os.write(ours, b"tty && echo $((6*7))x\n")
        read_until(b"42x")
        assert b"/dev/pts/" in shown
        os.write(ours, b"exit 5\n")
        assert process.wait(90) == 5
    finally:
        process.kill()
        os.close(ours)


def test_a_shell_without_a_terminal_is_refused_with_a_hint(cli: Cli, box: str) -> None:
    done = cli.run("sandbox", "shell", box)
    assert done.returncode == 1
    assert "hint: for scripts: paddock sandbox exec" in done.stderr


def test_resources_are_applied_shown_described_and_deleted(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(TEMPLATE)
    assert "mine" in cli("apply", "-f", str(file))
    assert cli.json("get", "sbt", "mine")["spec"]["env"] == {"COLOUR": "blue"}
    assert "mine" in cli("get", "sandboxtemplates")
    described = cli("describe", "sbt", "mine")
    assert yaml.safe_load(described.partition("events:")[0])["metadata"]["name"] == "mine"
    sandbox_id = cli("sandbox", "create", "mine").strip()
    assert cli("sandbox", "exec", sandbox_id, "echo $COLOUR") == "blue\n"
    cli("sandbox", "kill", sandbox_id)
    cli("delete", "-f", str(file))
    missing = cli.run("get", "sbt", "mine")
    assert missing.returncode == 1
    assert "not found" in missing.stderr
    assert cli.run("apply", "-f", "-", stdin="kind: Nothing").returncode == 1


def test_a_directory_is_applied_and_resources_are_selected_by_label(
    cli: Cli, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        labelled = TEMPLATE.replace("{name: mine}", f"{{name: {name}, labels: {{of: {name}}}}}")
        (tmp_path / f"{name}.yaml").write_text(labelled)
    try:
        applied = cli("apply", "-f", str(tmp_path))
        assert applied == "sandboxtemplate/one applied\nsandboxtemplate/two applied\n"
        chosen = cli.json("get", "templates", "--selector", "of in (two)")
        assert [item["metadata"]["name"] for item in chosen] == ["two"]
        table = cli("get", "templates", "-A", "-l", "of=one").splitlines()
        assert [line.split()[:2] for line in table] == [["NAMESPACE", "NAME"], ["default", "one"]]
    finally:
        cli("delete", "-f", str(tmp_path))
    (tmp_path / "empty").mkdir()
    nothing = cli.run("apply", "-f", str(tmp_path / "empty"))
    assert "contains no YAML file" in nothing.stderr


def test_batch_wait_waits_for_an_applied_batch_and_writes_logs(cli: Cli, tmp_path: Path) -> None:
    applied = BATCH.format(name="waited", process="{command: [sh, -c, 'exit $PADDOCK_SHARD']}")
    cli("apply", "-f", "-", stdin=applied)
    try:
        done = cli.run("batch", "wait", "waited", "--logs", str(tmp_path / "logs"))
        assert done.returncode == 1, done.stdout + done.stderr
        assert done.stdout == "shard 1: Failed, exit code 1\n"
        assert done.stderr == "1 succeeded, 1 failed: waited\n"
        assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["0.log", "1.log"]
        again = cli.run("-o", "json", "batch", "wait", "waited")
        assert json.loads(again.stdout)["status"]["phase"] == "Failed"
    finally:
        cli("delete", "batch", "waited")
    assert cli.run("batch", "wait", "waited").returncode == 1


def test_a_team_quota_is_set_shown_enforced_and_removed(cli: Cli) -> None:
    member = Cli(
        {**cli.environment, "E2B_API_KEY": cli("keys", "create", "m", "--team", "t").strip()}
    )
    printed = cli("teams", "quota", "t", "--sandboxes", "0", "--cpu", "1500m", "--memory", "2Gi")
    assert printed == "quota of t: sandboxes 0, cpu 1.5, memory 2Gi\n"
    assert "sandboxes 0, cpu 1.5, memory 2Gi" in cli("teams", "ls")
    refused = member.run("sandbox", "create")
    assert refused.returncode == 1
    assert "team t has 0 of 0 sandbox.count" in refused.stderr
    assert member.run("teams", "quota", "t", "--none").returncode == 1
    assert cli("teams", "quota", "t", "--none") == "quota of t: none\n"
    member("sandbox", "kill", member("sandbox", "create").strip())
    for wrong in ((), ("--none", "--running", "1")):
        assert cli.run("teams", "quota", "t", *wrong).returncode == 2
    assert cli.environment.get("E2B_API_KEY", "e2b_") not in cli("-o", "json", "teams", "ls")


def test_the_internet_of_a_team_is_set_and_the_policy_of_a_sandbox_shown(cli: Cli):
    made = cli("sandbox", "create").strip()
    assert cli("teams", "set", "default", "--internet", "closed") == "internet of default: closed\n"
    rows = {line.split()[0]: line.split() for line in cli("sandbox", "network", made).splitlines()}
    assert rows["team"][1] == "closed"
    assert rows["template"][1] == "open"
    assert rows["in"][2] == "closed"
    assert cli.run("teams", "set", "default", "--internet", "half").returncode == 2
    cli("teams", "set", "default", "--internet", "default")
    shown = cli.json("sandbox", "network", made)
    rate = 500_000_000
    assert shown["parts"][0] == {
        "source": "installation", "internet": "open",
        "ingressBandwidth": rate, "egressBandwidth": rate,
    }  # fmt: skip
    lines = cli("sandbox", "network", made).splitlines()
    assert lines[0].lower().split("  ")[-1].strip() == "from sandbox"
    assert lines[1].count("500 Mbit/s") == 2
    cli("sandbox", "kill", made)


def test_status_shows_the_pool(cli: Cli) -> None:
    report = cli.json("status")
    assert report["answers"] is True
    assert "default/base" in report["pools"]
    assert "pool       default/base:" in cli("status")


def test_keys_are_created_and_revoked_immediately(cli: Cli) -> None:
    key = cli("keys", "create", "robot", "--role", "reader").strip()
    listed = cli.json("keys", "ls")
    key_id = next(item["id"] for item in listed if item["name"] == "robot")
    assert key not in str(listed)
    reader = Cli({**cli.environment, "E2B_API_KEY": key})
    assert isinstance(reader.json("sandbox", "ls"), list)
    refused = reader.run("sandbox", "create")
    assert refused.returncode == 1
    assert "the role reader does not allow it" in refused.stderr
    replaced = cli("keys", "rotate", key_id, "--grace", "1h").strip()
    for each in (key, replaced):
        assert isinstance(Cli({**cli.environment, "E2B_API_KEY": each}).json("sandbox", "ls"), list)
    cli("keys", "revoke", key_id)
    refused = reader.run("sandbox", "ls")
    assert refused.returncode == 1
    assert "Invalid API key" in refused.stderr


def test_a_key_is_created_with_scopes_and_an_end(cli: Cli) -> None:
    cli("keys", "create", "bot", "--scope", "create", "--scope", "template:base", "--expires", "2d")
    found = next(item for item in cli.json("keys", "ls") if item["name"] == "bot")
    assert found["scopes"] == ["create", "template:base"]
    assert found["expiresAt"]
    assert "create, template:base" in cli("keys", "ls")
    for wrong in (("--scope", "reed"), ("--expires", "soon")):
        assert cli.run("keys", "create", "bot", *wrong).returncode in (1, 2)
    cli("keys", "revoke", found["id"])


def test_doctor_reports_the_features_of_this_machine(cli: Cli) -> None:
    assert "CRIU" in cli("doctor")
    report = cli.json("doctor")
    assert report["is_usable"]
    assert "freeze" in {check["name"] for check in report["checks"]}
    again = json.loads(cli("doctor", "--json"))
    # Other users of the machine turn swap on and off and fill the disk between the two runs.
    momentary = {"swap", "disk space"}
    one, other = (
        [check for check in result["checks"] if check["name"] not in momentary]
        for result in (report, again)
    )
    assert one == other
    names = [[check["name"] for check in result["checks"]] for result in (report, again)]
    assert names[0] == names[1]
    assert momentary <= set(names[0])


def test_without_a_server_the_error_has_a_hint(cli: Cli) -> None:
    elsewhere = {**cli.environment, "PADDOCK_URL": "http://127.0.0.1:9"}
    # The secrets of this machine are not sent to another address.
    assert "no credential for http://127.0.0.1:9" in Cli(elsewhere).run("sandbox", "ls").stderr
    lost = Cli({**elsewhere, "E2B_API_KEY": "e2b_other", "PADDOCK_TOKEN": "other"})
    done = lost.run("sandbox", "ls")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: http://127.0.0.1:9 does not answer")
    assert "\n\nhint: `paddock status`" in done.stderr
    status = lost.run("--output", "json", "status")
    assert status.returncode == 1
    report = msgspec.json.decode(status.stdout)
    assert report["answers"] is False
    assert "pid" not in report, "only for this machine"
