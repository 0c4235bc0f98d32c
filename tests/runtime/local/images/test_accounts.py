"""The users that an image gets, and how its layers are read for that."""

import os
import stat
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.envd.process import shells
from paddock.envd.process.shells import ShellFinder
from paddock.envd.users import Users
from paddock.kit.errors import InvalidError
from paddock.runtime.local.checkpoint.threads import run_in_thread
from paddock.runtime.local.images import ImageStore
from paddock.runtime.local.images.accounts import plan_accounts, write_layer
from paddock.runtime.local.images.merged_tree import MergedTree
from paddock.runtime.local.images.model import Manifest
from paddock.runtime.local.kernel import syscalls

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="layers have owners and whiteouts"),
    pytest.mark.timeout(120),
]


def layer(root: Path, **files: str) -> Path:
    """Write files; `__` in a name is a slash, `->` a symlink, and `#!` a program."""
    root.mkdir(parents=True)
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_d", ".d")
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("->"):
            path.symlink_to(text[2:])
        else:
            path.write_text(text)
            path.chmod(0o755 if text.startswith("#!") else 0o640)
    return root


def test_an_image_with_both_users_needs_nothing(tmp_path: Path):
    passwd = "root:x:0:0::/root:/bin/sh\nuser:x:7:7::/srv:/bin/sh\n"
    plan = plan_accounts(MergedTree([layer(tmp_path / "a", etc__passwd=passwd, bin__bash="#!")]))
    assert plan.entries == ()
    assert (plan.facts.shell, plan.facts.users) == ("/bin/bash", ("root", "user"))


def test_missing_lines_are_added_to_what_the_image_has(tmp_path: Path):
    lower = layer(
        tmp_path / "a",
        etc__passwd="root:x:0:0::/root:/bin/sh",  # without a newline at the end
        etc__group="root:x:0:\nstaff:x:1000:\n",
        etc__shadow="root:!:1::::::\n",
        usr__bin__sudo="#!",
        var__home__kept="kept",
        home="->var/home",
        bin="->usr/bin",
    )
    (lower / "etc").chmod(0o711)
    upper = layer(tmp_path / "b", usr__bin__sh="#!", var__home__user__note="mine")
    plan = plan_accounts(MergedTree([lower, upper]))
    write_layer(plan, made := layer(tmp_path / "made"))
    assert plan.facts.shell == "/bin/sh"
    assert (made / "etc/passwd").read_text() == (
        "root:x:0:0::/root:/bin/sh\nuser:x:1001:1001::/home/user:/bin/sh\n"
    )
    assert (made / "etc/group").read_text() == "root:x:0:\nstaff:x:1000:\nuser:x:1001:\n"
    shadow = made / "etc/shadow"
    assert shadow.read_text() == "root:!:1::::::\nuser:*:19000:0:99999:7:::\n"
    assert stat.S_IMODE(shadow.stat().st_mode) == 0o640
    assert (made / "etc/sudoers.d/user").read_text() == "user ALL=(ALL:ALL) NOPASSWD:ALL\n"
    assert stat.S_IMODE((made / "etc").stat().st_mode) == 0o711
    # /home is a link: the home directory is behind it, and belongs to its user.
    assert not (made / "home").exists()
    assert (made / "var/home/user").stat().st_uid == 1001
    assert list((made / "var/home/user").iterdir()) == []


def test_an_existing_group_of_the_user_is_kept(tmp_path: Path):
    passwd = "root:x:0:0::/root:/bin/sh\nx:x:1000:1000::/:/bin/sh\n"
    group = "root:x:0:\nuser:x:500:\n"
    tree = MergedTree([layer(tmp_path / "a", etc__passwd=passwd, etc__group=group)])
    texts = {entry.path: entry.text for entry in plan_accounts(tree).entries}
    assert texts["/etc/passwd"] == f"{passwd}user:*:1001:500::/home/user:/bin/sh\n"
    assert "/etc/group" not in texts


def test_odd_files_of_an_image_lead_nowhere_else(tmp_path: Path):
    """A link to /, a name that is not UTF-8, one that is too long, ids that are no numbers."""
    root = layer(
        tmp_path / "a",
        etc__passwd="root:x:0:0::/root:/bin/sh\nuser:x:me:1::/:/bin/sh\n",
        etc__group="user:x:99999999999:\nuser:x:\u00b2:\n",
        home__user="->/",
        usr__bin__sudo="#!",
        bin__sh="->" + "x" * 300,
    )
    with (root / "etc/passwd").open("ab") as file:
        file.write(b"caf\xe9:x:1000:1000:::\n")
    (root / "etc/sudoers.d").symlink_to(os.fsdecode(b"\xff"))
    (root / os.fsdecode(b"etc/\xff")).mkdir()
    store = ImageStore(tmp_path / "images", base_cache=tmp_path / "no-base")
    image = store.add_directory(root, "odd")
    assert image == store.resolve("odd")
    assert (image.facts.shell, image.facts.users) == (None, ("root", "user"))
    made = image.accounts
    assert made is not None
    assert b"\ncaf\xe9:x:1000:1000:::\nuser:*:1001:1001:" in (made / "etc/passwd").read_bytes()
    assert (made / os.fsdecode(b"etc/\xff/user")).read_text().startswith("user ALL")
    assert not (made / "home").exists()
    assert made.stat().st_uid == 0


def test_an_image_without_a_free_id_is_refused(tmp_path: Path):
    passwd = "".join(f"u:x:{number}:1:::\n" for number in range(1000, 60001))
    with pytest.raises(InvalidError, match="no free id from 1000 to 60000"):
        plan_accounts(MergedTree([layer(tmp_path / "a", etc__passwd=passwd)]))


def test_a_file_that_a_node_without_root_cannot_read_counts_as_missing():
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        root = layer(
            Path(directory, "a"), etc__passwd="root:x:0:0:::\n", etc__shadow="root:*:::::::"
        )
        (root / "etc/passwd").chmod(0o644)
        (root / "etc/shadow").chmod(0)
        os.seteuid(65534)
        try:
            plan = plan_accounts(MergedTree([root]))
        finally:
            os.seteuid(0)
    texts = {entry.path: entry.text for entry in plan.entries}
    assert texts["/etc/passwd"] == "root:x:0:0:::\nuser:*:1000:1000::/home/user:/bin/sh\n"
    assert "/etc/shadow" not in texts


def test_an_image_of_an_older_version_is_completed_when_it_is_used(tmp_path: Path):
    root = layer(tmp_path / "rootfs", bin__sh="#!")
    store = ImageStore(tmp_path / "images", base_cache=tmp_path / "no-base")
    image = store.add_directory(root, "old")
    assert image.accounts is not None
    ref = tmp_path / "images/refs/old%3Alatest.json"
    layers = tuple(path.name for path in image.layers)
    ref.write_bytes(msgspec.json.encode(Manifest(name="old:latest", layers=layers)))
    assert store.collect() == (image.accounts.name,)
    assert store.resolve("old") == image == store.resolve("old")
    assert store.collect() == ()
    assert store.tag("old", "other").accounts == image.accounts


def test_a_number_is_a_user(tmp_path: Path):
    root = layer(tmp_path / "a", passwd="app:x:12:34::/srv:/bin/sh\n", group="app:x:34:\n")
    users = Users(str(root / "passwd"), str(root / "group"))
    assert users.find("12") == users.find("app")
    unknown = users.find("77")
    assert unknown is not None
    assert (unknown.uid, unknown.gid, unknown.home) == (77, 0, "/")
    assert users.find("99999999999") is users.find("-1") is users.find("none") is None


def test_bash_is_used_once_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    present = {"/usr/bin/sh", "/usr/local/bin/sh"}
    asked: list[str] = []

    def is_program(path: str) -> bool:
        asked.append(path)
        return path in present

    monkeypatch.setattr(shells, "is_program_here", is_program)
    finder = ShellFinder()
    assert finder.resolve("/bin/cat") == "/bin/cat"
    assert asked == []
    assert finder.resolve("/bin/bash") == "/usr/bin/sh"
    present.add("/bin/bash")
    assert finder.resolve("/bin/bash") == "/bin/bash"
    asked.clear()
    assert finder.resolve("/bin/bash") == "/bin/bash"
    assert asked == []
    finder.assign()
    present.clear()
    assert finder.resolve("/bin/bash") is None


NAMES = st.sampled_from(["a", "b"])
ENTRIES = st.recursive(
    st.sampled_from(["file", "whiteout", "->a", "->/b", "->../a", "->b/a", "->."]),
    lambda inner: st.tuples(st.booleans(), st.dictionaries(NAMES, inner, max_size=2)),
    max_leaves=5,
)
TREES = st.dictionaries(NAMES, ENTRIES, max_size=2)
PATHS = [f"/{'/'.join(parts)}" for parts in (
    ["a"], ["b"], ["a", "a"], ["a", "b"], ["b", "a"], ["b", "b"], ["a", "a", "a"], ["b", "..", "a"],
)]  # fmt: skip


def write_tree(root: Path, entries: dict, number: int) -> None:
    root.mkdir()
    for name, entry in entries.items():
        path = root / name
        if entry == "file":
            path.write_text(f"{number}")
        elif entry == "whiteout":
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
        elif isinstance(entry, str):
            path.symlink_to(entry.removeprefix("->"))
        else:
            is_opaque, inner = entry
            write_tree(path, inner, number)
            if is_opaque:
                os.setxattr(path, "trusted.overlay.opaque", b"y")


@given(trees=st.lists(TREES, min_size=2, max_size=3))
@settings(deadline=None, max_examples=60)
def test_layers_are_read_as_the_kernel_merges_them(
    tmp_path_factory: pytest.TempPathFactory, trees: list[dict]
):
    directory = tmp_path_factory.mktemp("layers")
    layers = [directory / str(number) for number in range(len(trees))]
    for number, (root, entries) in enumerate(zip(layers, trees, strict=True)):
        write_tree(root, entries, number)
    merged = directory / "merged"
    merged.mkdir()

    def look(path: str) -> str | None:
        root = os.open(merged, os.O_PATH | os.O_DIRECTORY)
        try:
            fd = syscalls.open_in_root(root, path, os.O_RDONLY)
        except OSError:
            return None
        finally:
            os.close(root)
        try:
            return "dir" if stat.S_ISDIR(os.fstat(fd).st_mode) else os.read(fd, 9).decode()
        finally:
            os.close(fd)

    def look_at_all() -> dict[str, str | None]:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount("", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        lower = ":".join(map(str, reversed(layers)))
        syscalls.mount("overlay", str(merged), "overlay", 0, f"lowerdir={lower}")
        return {path: look(path) for path in PATHS}

    expected = run_in_thread(lambda _: look_at_all(), name="merged")
    tree = MergedTree(layers)
    found: dict[str, str | None] = {}
    for path in PATHS:
        entry = tree.find(path)
        is_directory = entry is not None and entry.is_directory
        found[path] = "dir" if is_directory else tree.read(path)
    assert found == expected
