"""The cases of E2B's own live tests of template builds, with the image names that these use.

FLAVOUR is `sync` or `async`: the same cases run with both clients. `ubuntu:22.04` comes from the
mirror of the installation, and `e2bdev/base` is its image `base`.
"""

import asyncio
import contextlib
import inspect
import os
import tempfile
import threading
import time
import uuid
from pathlib import Path

from e2b import AsyncTemplate, BuildException, Template, wait_for_timeout
from e2b.exceptions import TemplateException
from harness import check, expect, main

IS_ASYNC = os.environ["FLAVOUR"] == "async"
Client = AsyncTemplate if IS_ASYNC else Template
UBUNTU = "ubuntu:22.04"
LOOP = asyncio.new_event_loop()
threading.Thread(target=LOOP.run_forever, daemon=True).start()


def call(method, *args, **options):
    """Call a method of either client and wait for its result."""
    result = method(*args, **options)
    if not inspect.isawaitable(result):
        return result

    async def wait():
        return await result

    return asyncio.run_coroutine_threadsafe(wait(), LOOP).result()


def new_name():
    return f"live-{uuid.uuid4().hex[:12]}"


def build(template, name=None, **options):
    logs = []
    made = call(
        Client.build,
        template,
        name or new_name(),
        cpu_count=1,
        memory_mb=1024,
        on_build_logs=logs.append,
        **options,
    )
    return made, [entry.message for entry in logs]


@contextlib.contextmanager
def folder():
    """A directory with a file and links to it: relative, absolute and broken."""
    with tempfile.TemporaryDirectory() as directory:
        inside = Path(directory) / "folder"
        inside.mkdir()
        (inside / "test.txt").write_text("This is a test file.")
        (inside / "symlink.txt").symlink_to("test.txt")
        (inside / "absolute.txt").symlink_to(inside / "test.txt")
        (inside / "broken.txt").symlink_to("nothing.txt")
        yield directory


@check
def build_template():
    with folder() as where:
        template = (
            Client(file_context_path=where)
            .from_base_image()
            .copy("folder/*", "folder", force_upload=True)
            .run_cmd("cat folder/test.txt")
            .set_workdir("/app")
            .set_start_cmd("echo 'Hello, world!'", wait_for_timeout(10_000))
        )
        _, logs = build(template)
    assert any("[stdout]: This is a test file." in line for line in logs), logs
    assert any("[start] [stdout]: Hello, world!" in line for line in logs), logs


@check
def build_template_from_base_template():
    build(Client().from_template("base"), skip_cache=True)


@check
def build_template_with_symlinks():
    with folder() as where:
        template = (
            Client(file_context_path=where)
            .from_image(UBUNTU)
            .skip_cache()
            .copy("folder/*", "folder", force_upload=True)
            .run_cmd("cat folder/symlink.txt && test -L folder/broken.txt")
        )
        _, logs = build(template)
    assert any("[stdout]: This is a test file." in line for line in logs), logs


@check
def build_template_with_resolve_symlinks():
    with folder() as where:
        template = (
            Client(file_context_path=where)
            .from_image(UBUNTU)
            .skip_cache()
            .copy("folder/symlink.txt", "folder/symlink.txt", force_upload=True,
                  resolve_symlinks=True)
            .run_cmd("cat folder/symlink.txt && test ! -L folder/symlink.txt")
        )  # fmt: skip
        build(template)


@check
def build_template_with_skip_cache():
    build(Client().skip_cache().from_image(UBUNTU))


@check
def build_in_background():
    template = Client().from_image(UBUNTU).skip_cache().run_cmd("sleep 5").run_cmd("echo done")
    made = call(Client.build_in_background, template, new_name(), cpu_count=1, memory_mb=1024)
    assert call(Client.get_build_status, made).status.value == "building"
    while (status := call(Client.get_build_status, made).status.value) == "building":
        time.sleep(0.2)
    assert status == "ready", status


@check
def make_symlink():
    template = (
        Client()
        .from_image(UBUNTU)
        .skip_cache()
        .make_symlink(".bashrc", ".bashrc.local")
        .run_cmd('test "$(readlink .bashrc.local)" = ".bashrc"')
    )
    build(template)


@check
def make_symlink_force():
    template = (
        Client()
        .from_image(UBUNTU)
        .make_symlink(".bashrc", ".bashrc.local")
        .skip_cache()
        .make_symlink(".bashrc", ".bashrc.local", force=True)
        .run_cmd('test "$(readlink .bashrc.local)" = ".bashrc"')
    )
    build(template)


@check
def run_command():
    build(Client().from_image(UBUNTU).skip_cache().run_cmd("ls -l"))


@check
def run_command_as_a_different_user():
    template = Client().from_image(UBUNTU).skip_cache()
    build(template.run_cmd('test "$(whoami)" = "root"', user="root"))


@check
def run_command_as_a_user_that_does_not_exist():
    template = Client().from_image(UBUNTU).skip_cache().run_cmd("whoami", user="root123")
    error = expect(BuildException, build, template)
    assert str(error) == (
        "failed to run command 'whoami': command failed: unauthenticated: "
        "invalid username: 'root123'"
    ), str(error)


@check
def an_image_of_a_private_registry_needs_its_password():
    image, login = os.environ["PRIVATE_IMAGE"], os.environ["PRIVATE_LOGIN"]
    user, _, password = login.partition(":")
    for wrong in ({}, {"username": user, "password": "wrong"}):
        error = expect(BuildException, build, Client().skip_cache().from_image(image, **wrong))
        assert "access denied" in str(error), str(error)
        assert password not in str(error)
    template = Client().skip_cache().from_image(image, username=user, password=password)
    _, logs = build(template.run_cmd("echo made from $(. /etc/os-release; echo $ID)"))
    assert any("made from ubuntu" in line for line in logs), logs
    assert not any(password in line for line in logs), logs


@check
def tags_are_assigned_and_removed():
    name = new_name()
    made, _ = build(Client().from_base_image(), f"{name}:v1-{uuid.uuid4()}")
    assert made.build_id
    assert made.template_id
    tags = ["production", "latest"]
    assigned = call(Client.assign_tags, f"{name}:{made.tags[0]}", tags)
    assert assigned.build_id
    assert set(tags) <= set(assigned.tags), assigned.tags
    call(Client.remove_tags, name, "production")
    left = {item.tag for item in call(Client.get_tags, name)}
    assert left == {made.tags[0], "latest"}, left


@check
def a_single_tag_is_assigned():
    name = new_name()
    made, _ = build(Client().from_base_image(), f"{name}:v1-{uuid.uuid4()}")
    assigned = call(Client.assign_tags, f"{name}:{made.tags[0]}", "stable")
    assert assigned.build_id
    assert "stable" in assigned.tags, assigned.tags
    call(Client.remove_tags, name, "stable")


@check
def a_tag_without_a_name_is_refused():
    expect(TemplateException, call, Client.assign_tags, ":v1.0", ["production"])


@check
def a_name_without_a_tag_is_refused():
    expect(TemplateException, call, Client.assign_tags, f"{new_name()}:", ["production"])


@check
def an_existing_template_exists():
    name = new_name()
    build(Client().from_base_image(), name)
    assert call(Client.exists, name) is True


@check
def an_unknown_template_does_not_exist():
    assert call(Client.exists, new_name()) is False


main(is_newest=True)
