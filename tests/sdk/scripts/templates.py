"""Checks of template builds with E2B's synchronous Python SDK against a whole installation."""

import contextlib
import tempfile
import time
import uuid
from pathlib import Path

from e2b import BuildException, Sandbox, Template
from e2b.exceptions import TemplateException
from harness import check, ending, expect, main

IS_NEWEST = hasattr(Sandbox, "fork")


def new_name():
    return f"sdk-{uuid.uuid4().hex[:12]}"


def build(template, name=None, **options):
    logs = []
    # The older client knows no other name of this argument.
    named = {"name" if IS_NEWEST else "alias": name or new_name()}
    made = Template.build(
        template, cpu_count=1, memory_mb=1024, on_build_logs=logs.append, **named, **options
    )
    return made, [entry.message for entry in logs]


def build_in_background(template, name=None):
    named = {"name" if IS_NEWEST else "alias": name or new_name()}
    return Template.build_in_background(template, cpu_count=1, memory_mb=1024, **named)


def status_of(made):
    found = Template.get_build_status(made)
    return found.status.value, found.reason


@contextlib.contextmanager
def context():
    """A directory with files and links of every kind."""
    with tempfile.TemporaryDirectory() as directory:
        fill(Path(directory))
        yield directory


def fill(directory):
    folder = directory / "folder"
    folder.mkdir()
    (folder / "test.txt").write_text("This is a test file.")
    (folder / "symlink.txt").symlink_to("test.txt")
    (folder / "absolute.txt").symlink_to(folder / "test.txt")
    (folder / "broken.txt").symlink_to("nothing.txt")
    (directory / "script.sh").write_text("#!/bin/sh\necho script\n")
    (directory / "script.sh").chmod(0o755)


@check
def a_template_with_files_links_and_a_server_is_built_and_used():
    with context() as where:
        template = (
            Template(file_context_path=where)
            .from_template("base")
            .copy("folder/*", "folder", force_upload=True)
            .copy("script.sh", "/opt/", mode=0o700, user="root")
            .run_cmd("cat folder/test.txt")
            .set_workdir("/app")
            .set_envs({"GREETING": "hello world"})
            .run_cmd('echo "$GREETING" > greeting && pwd')
            .set_start_cmd("python3 -m http.server 8123", "curl -sf http://localhost:8123/greeting")
        )
        made, logs = build(template)
    assert any("[stdout]: This is a test file." in line for line in logs), logs
    assert any("Template is ready" in line for line in logs), logs
    box = Sandbox.create(made.alias)
    with ending(box):
        # The server was running when the template was stored.
        done = box.commands.run("curl -sf http://localhost:8123/greeting; pwd; echo $GREETING")
        assert done.stdout == "hello world\n/app\nhello world\n", done.stdout
        links = box.commands.run("cd ~/folder; readlink symlink.txt broken.txt; cat symlink.txt")
        assert links.stdout == "test.txt\nnothing.txt\nThis is a test file.", links.stdout
        mode = box.commands.run("stat -c '%a %U' /opt/script.sh", user="root").stdout
        assert mode == "700 root\n", mode
    if IS_NEWEST:
        assert Template.exists(made.alias) is True


@check
def links_are_kept_or_followed():
    with context() as where:
        for resolve, kind in ((False, "symbolic link"), (True, "regular file")):
            template = (
                Template(file_context_path=where)
                .from_image("base")
                .copy("folder/symlink.txt", "folder/symlink.txt", resolve_symlinks=resolve,
                      force_upload=True)
                .run_cmd(f"test \"$(stat -c %F folder/symlink.txt)\" = '{kind}'")
            )  # fmt: skip
            build(template)


@check
def a_second_build_takes_its_layers_from_the_cache():
    name = new_name()
    mark = uuid.uuid4().hex
    template = Template().from_image("base").run_cmd(f"echo {mark} > mark").set_envs({"A": mark})
    build(template, name)
    _, logs = build(template, name)
    assert any(line.startswith("CACHED ") and "RUN" in line for line in logs), logs
    _, logs = build(template, name, skip_cache=True)
    assert not any(line.startswith("CACHED ") and "RUN" in line for line in logs), logs


@check
def a_build_without_steps_is_ready():
    build(Template().skip_cache().from_image("base"))


@check
def commands_run_as_the_user_and_as_root():
    template = (
        Template()
        .from_image("base")
        .run_cmd("test $(whoami) = user")
        .run_cmd("test $(whoami) = root", user="root")
        .make_symlink("/etc/hostname", "link")
        .make_symlink("/etc/passwd", "link", force=True)
        .run_cmd("test $(readlink link) = /etc/passwd")
    )
    build(template)


@check
def an_unknown_user_fails_the_build_with_its_name():
    template = Template().from_image("base").run_cmd("whoami", user="root123")
    error = expect(BuildException, build, template)
    assert str(error) == (
        "failed to run command 'whoami': command failed: unauthenticated: "
        "invalid username: 'root123'"
    ), str(error)


@check
def a_failing_step_fails_the_build_with_its_status():
    name = new_name()
    template = Template().from_image("base").run_cmd("exit 7")
    error = expect(BuildException, build, template, name)
    assert str(error) == "failed to run command 'exit 7': exit status 7", str(error)
    if IS_NEWEST:
        assert Template.exists(name) is True
        assert Template.exists(f"{name}:default") is False
    expect(Exception, Sandbox.create, name)


@check
def a_template_that_does_not_exist_fails_the_build():
    error = expect(BuildException, build, Template().from_template(new_name()))
    assert "not found" in str(error), str(error)


@check
def a_background_build_is_building_at_first():
    template = Template().from_image("base").skip_cache().run_cmd("sleep 3")
    made = build_in_background(template)
    assert status_of(made)[0] == "building"
    while status_of(made)[0] == "building":
        time.sleep(0.2)
    assert status_of(made)[0] == "ready"


@check
def a_newer_build_supersedes_one_with_the_same_tag():
    name = new_name()
    slow = Template().from_image("base").run_cmd(f"sleep 60 # {uuid.uuid4()}")
    first = build_in_background(slow, name)
    build(Template().from_image("base"), name)
    status, reason = status_of(first)
    assert status == "error", status
    assert reason.message == ("The build was canceled because it was superseded by a newer one."), (
        reason
    )


@check(newer=True)
def tags_are_assigned_and_removed():
    name = new_name()
    template = Template().from_image("base").run_cmd(f"echo {name} > made")
    made, _ = build(template, f"{name}:v1")
    assert made.tags == ["v1"]
    assigned = Template.assign_tags(f"{name}:v1", ["stable", "latest"])
    assert (assigned.build_id, assigned.tags) == (made.build_id, ["stable", "latest"])
    assert {item.tag for item in Template.get_tags(name)} == {"v1", "stable", "latest"}
    Template.remove_tags(name, "stable")
    assert {item.tag for item in Template.get_tags(name)} == {"v1", "latest"}
    box = Sandbox.create(f"{name}:latest")
    with ending(box):
        assert box.files.read("made") == f"{name}\n"
    expect(TemplateException, Template.assign_tags, ":x", "y")
    expect(TemplateException, Template.assign_tags, f"{name}:", "y")
    assert Template.assign_tags(f"{name}:v1", "default").build_id == made.build_id
    box = Sandbox.create(name)
    with ending(box):
        assert box.files.read("made") == f"{name}\n"


@check
def a_template_is_built_from_a_template_with_its_variables():
    first, _ = build(
        Template().from_image("base").set_envs({"FIRST": "one two"}).run_cmd("echo 1 > ~/one")
    )
    second, _ = build(
        Template().from_template(first.alias).run_cmd('test "$FIRST" = "one two" && cat ~/one')
    )
    box = Sandbox.create(second.alias)
    with ending(box):
        assert box.commands.run("cat ~/one; echo $FIRST").stdout == "1\none two\n"


main(IS_NEWEST)
