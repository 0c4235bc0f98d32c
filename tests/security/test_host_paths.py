"""Directories of the machine in a sandbox: only those allowed, never with the rights of root."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from paddock.kit.errors import InvalidError, PaddockError
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec, Volume
from paddock.resources.meta import ObjectMeta
from paddock.runtime import host_paths
from paddock.runtime.host_paths import SHARED_IDS
from paddock.runtime.port import Mount
from paddock.runtime.support import KUBERNETES, LOCAL, problems
from tests.runtime.local.inside import run, succeeds


@pytest.mark.parametrize(
    ("path", "is_allowed"),
    [
        ("/srv/data", True),
        ("/srv/data/", True),
        ("/srv/data/sets/one", True),
        ("/srv/database", False),
        ("/srv", False),
        ("/", False),
        ("/srv/data/../../etc", False),
        ("/srv/data/./x", False),
        ("/srv//data", False),
    ],
)
def test_only_paths_below_the_list_are_allowed(path: str, is_allowed: bool):
    assert (host_paths.refusal(path, ("/srv/data", "/mnt/models")) is None) == is_allowed


@pytest.mark.parametrize("setting", ["/", "srv", "/etc", "/srv/../etc", "/usr/", "/a,/root"])
def test_a_list_that_opens_the_system_is_refused(setting: str):
    with pytest.raises(InvalidError, match="host_paths"):
        host_paths.parse(setting)


def test_the_list_is_separated_by_commas():
    assert host_paths.parse(" /srv/data/, /mnt/models ,") == ("/srv/data", "/mnt/models")
    assert host_paths.parse("") == ()


def test_a_template_with_another_path_is_refused_when_it_is_applied():
    volume = Volume(name="v", mount_path="/data", host_path="/etc")
    template = SandboxTemplate(
        metadata=ObjectMeta(name="t", namespace="default"),
        spec=SandboxTemplateSpec(volumes=(volume,)),
    )
    [problem] = problems(LOCAL, template, allowed_paths=())
    assert problem.path == "spec.volumes[0].hostPath"
    assert "the operator allows none (setting host_paths)" in problem.message
    assert problems(LOCAL, template, allowed_paths=("/etc",)) == []
    assert problems(KUBERNETES, template, allowed_paths=()) == []


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory that sandboxes may write to, and that other users can enter."""
    for parent in [tmp_path, *tmp_path.parents[:-2]]:
        parent.chmod(0o755)
    directory = tmp_path / "shared"
    directory.mkdir()
    os.chown(directory, SHARED_IDS, SHARED_IDS)
    return directory


@pytest.mark.sandbox
async def test_a_path_outside_of_the_list_is_refused_by_the_node(box):
    with pytest.raises(InvalidError, match="may not be mounted: the operator allows"):
        await box(mounts=(Mount(source="/etc", path="/data"),))


@pytest.mark.sandbox
async def test_a_link_out_of_the_list_is_not_followed(box, shared: Path):
    (shared / "out").symlink_to("/etc")
    (shared / "real").mkdir()
    (shared / "between").symlink_to(shared / "real")
    for source in (shared / "out", shared / "between", shared / "out" / "apt"):
        with pytest.raises(PaddockError, match=f"{source}"):
            await box(mounts=(Mount(source=str(source), path="/data"),))


@pytest.mark.sandbox
async def test_files_of_root_inside_do_not_belong_to_root_outside(node, box, shared: Path):
    mount = Mount(source=str(shared), path="/data")
    one, other = await box(mounts=(mount,)), await box(mounts=(mount,))

    made = await run(one, "cp /usr/bin/id /data/id && chmod 4755 /data/id && echo hello > /data/a")
    assert made.status == 0, made.error

    assert (shared / "id").stat().st_uid == SHARED_IDS
    seen = subprocess.run(
        [shared / "id", "-u"], user=12345, group=12345, extra_groups=[], capture_output=True
    )
    assert seen.stdout.decode().strip() != "0"
    # Inside, set-uid programs of the directory do not work at all, and other sandboxes share it.
    assert (await run(other, "/data/id -u; cat /data/a", user="user")).out == "1000\nhello\n"
    await node.runtime.hibernate(one.uid)
    again = await node.runtime.restore(one.uid)
    assert await succeeds(again, "echo more >> /data/a")
    assert (shared / "a").read_text() == "hello\nmore\n"
    assert (shared / "a").stat().st_uid == SHARED_IDS


@pytest.mark.sandbox
async def test_device_files_of_a_host_path_cannot_be_opened(node, box, shared: Path):
    device = shared / "zero"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    device.chmod(0o666)
    with device.open("rb", buffering=0) as zero:
        assert zero.read(1) == b"\0"
    instance = await box(mounts=(Mount(source=str(shared), path="/data"),))

    async def is_refused() -> bool:
        opened = await run(instance, "test -c /data/zero && head -c 1 /data/zero")
        return opened.out == "" and "Permission denied" in opened.error

    assert await is_refused()
    await node.runtime.hibernate(instance.uid)
    instance = await node.runtime.restore(instance.uid)
    assert await is_refused()


@pytest.mark.sandbox
async def test_files_of_the_machine_cannot_be_changed(box, shared: Path):
    os.chown(shared, 0, 0)
    (shared / "config").write_text("of root")
    instance = await box(mounts=(Mount(source=str(shared), path="/data"),))

    assert (await run(instance, "cat /data/config")).out == "of root"
    for attempt in (
        "echo x > /data/config",
        "chmod 4777 /data/config",
        "chown 0 /data/config",
        "touch /data/new",
        "rm -f /data/config",
        "mknod /data/null c 1 3",
    ):
        assert not await succeeds(instance, f"{{ {attempt}; }} 2>/dev/null"), attempt
    assert (shared / "config").read_text() == "of root"
