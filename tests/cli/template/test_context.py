"""Files of the build context: what COPY finds, what .dockerignore leaves out, what is uploaded."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from paddock.cli.template.archives import Archive
from paddock.cli.template.context import BuildContext, in_pattern
from paddock.cli.template.copies import SentStep, with_files
from paddock.cli.template.dockerfile.model import Copy, DockerfileError, InlineFile
from paddock.kit.errors import InvalidError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "context"
    for name, text in {
        "app.py": "print(1)",
        "notes.txt": "n",
        "lib/a.py": "a",
        "lib/deep/b.py": "b",
        "data/one/x.csv": "1",
        "data/two/x.csv": "2",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "link").symlink_to("app.py")
    (root / "lib" / "broken").symlink_to("/nowhere")
    return root


def copy(*sources: str, **fields: object) -> Copy:
    given = {"inline": (), "destination": "/dst/", "owner": "", "mode": "", "line": 7}
    return Copy(sources=sources, **(given | fields))  # type: ignore[arg-type]


def steps(root: Path, item: Copy, packed: Path | None = None) -> list[SentStep]:
    def fetch(_copy: Copy, _source: str) -> Path:
        assert packed is not None
        return packed

    return with_files([item], BuildContext(root), fetch)


def members(archive: Archive | None) -> dict[str, str]:
    """Names in an archive, with content, target of a link, or `dir`."""
    assert archive is not None
    file = io.BytesIO()
    archive.write(file)
    file.seek(0)
    found: dict[str, str] = {}
    with tarfile.open(fileobj=file, mode="r:gz") as tar:
        for item in tar:
            assert (item.uid, item.gid, item.uname) == (0, 0, "")
            content = tar.extractfile(item) if item.isreg() else None
            found[item.name] = content.read().decode() if content else item.linkname or "dir"
    return found


def only(found: list[SentStep]) -> SentStep:
    (step,) = found
    return step


def test_a_file_is_copied_under_its_name(root: Path) -> None:
    step = only(steps(root, copy("/app.py", owner="a", mode="755")))
    assert (step.type, step.args, step.line) == ("COPY", ("app.py", "/dst/", "a", "755"), 7)
    assert members(step.archive) == {"app.py": "print(1)"}


def test_a_directory_is_copied_with_links_as_they_are(root: Path) -> None:
    step = only(steps(root, copy("lib/")))
    assert step.args[0] == "lib"
    assert members(step.archive) == {
        "lib": "dir",
        "lib/a.py": "a",
        "lib/broken": "/nowhere",
        "lib/deep": "dir",
        "lib/deep/b.py": "b",
    }


def test_a_link_that_is_named_itself_is_followed(root: Path) -> None:
    assert members(only(steps(root, copy("link"))).archive) == {"link": "print(1)"}


def test_a_link_out_of_the_context_is_refused(root: Path) -> None:
    (root / "out").symlink_to("/etc/hostname")
    with pytest.raises(DockerfileError, match="outside the build context"):
        steps(root, copy("out"))


@pytest.mark.parametrize("source", ["../secret", "a/../../b"])
def test_a_path_out_of_the_context_is_refused(root: Path, source: str) -> None:
    with pytest.raises(DockerfileError, match=r"line 7: .* is outside the build context"):
        steps(root, copy(source))


def test_a_missing_source_is_refused_with_its_line(root: Path) -> None:
    with pytest.raises(DockerfileError, match="line 7: 'nope' is not in the build context"):
        steps(root, copy("nope"))
    with pytest.raises(DockerfileError, match="not in the build context"):
        steps(root, copy("*.nope"))


def test_each_source_is_a_step(root: Path) -> None:
    assert [step.args[0] for step in steps(root, copy("app.py", "lib"))] == ["app.py", "lib"]


def test_a_pattern_copies_files_and_the_content_of_directories(root: Path) -> None:
    step = only(steps(root, copy("*.*")))
    assert step.args[0] == "."
    assert members(step.archive) == {"app.py": "print(1)", "notes.txt": "n"}
    assert members(only(steps(root, copy("lib/*"))).archive) == {
        "a.py": "a",
        "b.py": "b",
        "broken": "/nowhere",
    }


def test_a_pattern_with_one_match_is_that_file(root: Path) -> None:
    step = only(steps(root, copy("*.txt", destination="/renamed")))
    assert step.args[:2] == ("notes.txt", "/renamed")


@pytest.mark.parametrize(
    ("pattern", "name", "placed"),
    [
        ("*.py", "a.py", "a.py"),
        ("src/*", "src/a", "a"),
        ("src/*", "src/a/b", "b"),
        ("s*/x", "src/x/y/z", "y/z"),
        ("src/*", "other/a", ""),
        ("src/*/x", "src/a", ""),
        ("[^a]", "b", "b"),
        ("[^a]", "a", ""),
    ],
)
def test_a_match_is_placed_in_the_destination(pattern: str, name: str, placed: str) -> None:
    assert in_pattern(pattern, name) == placed


def test_ignored_files_are_left_out_and_exceptions_are_kept(root: Path) -> None:
    (root / ".dockerignore").write_text("# comment\n*.txt\ndata\n!data/two\nlib/deep\n")
    names = set(members(only(steps(root, copy("."))).archive))
    assert names == {
        ".dockerignore",
        "app.py",
        "link",
        "lib",
        "lib/a.py",
        "lib/broken",
        "data/two",
        "data/two/x.csv",
    }
    with pytest.raises(DockerfileError, match="not in the build context"):
        steps(root, copy("notes.txt"))


def test_a_dockerfile_may_have_its_own_ignore_file(root: Path) -> None:
    (root / ".dockerignore").write_text("lib\n")
    (root / "web.Dockerfile").write_text("FROM a")
    (root / "web.Dockerfile.dockerignore").write_text("*\n!app.py\n")
    context = BuildContext(root, root / "web.Dockerfile")
    assert [entry.name for entry in context.find(".").entries] == [".", "app.py"]


def test_a_malformed_ignore_file_is_refused_by_name(root: Path) -> None:
    (root / ".dockerignore").write_text("[a\n")
    with pytest.raises(InvalidError, match=r"\.dockerignore: .*\[a"):
        BuildContext(root)


def test_the_hash_follows_content_mode_and_name_but_not_time(root: Path) -> None:
    def digest(name: str = "lib") -> str:
        archive = only(steps(root, copy(name))).archive
        assert archive is not None
        return archive.digest()

    first = digest()
    os.utime(root / "lib" / "a.py", (1, 1))
    assert digest() == first
    (root / "lib" / "a.py").chmod(0o755)
    changed_mode = digest()
    (root / "lib" / "a.py").write_text("changed")
    changed_text = digest()
    (root / "lib" / "a.py").rename(root / "lib" / "c.py")
    assert len({first, changed_mode, changed_text, digest()}) == 4


def test_equal_files_make_equal_archives(root: Path) -> None:
    def data() -> bytes:
        archive = only(steps(root, copy("app.py"))).archive
        assert archive is not None
        file = io.BytesIO()
        archive.write(file)
        return file.getvalue()

    assert data() == data()


def test_a_heredoc_is_uploaded_as_a_file(root: Path) -> None:
    step = only(steps(root, copy(inline=(InlineFile("conf", "a=1\n"),))))
    assert step.args[0] == "conf"
    assert members(step.archive) == {"conf": "a=1\n"}


def packed(path: Path, **names: str) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in names.items():
            member = tarfile.TarInfo(f"./{name.replace('__', '/')}")
            member.size, member.uid = len(text), 1000
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def test_add_unpacks_local_archives_and_copies_other_files(root: Path) -> None:
    packed(root / "x.tgz", a="1", b__c="2")
    step = only(steps(root, copy("x.tgz", unpacks=True)))
    assert step.args[0] == "."
    assert members(step.archive) == {"a": "1", "b/c": "2"}
    assert only(steps(root, copy("x.tgz"))).args[0] == "x.tgz"
    assert members(only(steps(root, copy("app.py", unpacks=True))).archive) == {
        "app.py": "print(1)"
    }


def test_files_of_a_stage_are_placed_like_those_of_the_context(root: Path, tmp_path: Path) -> None:
    tar = packed(tmp_path / "s.tar", out__bin__a="1", out__bin__b="2")
    step = only(steps(root, copy("/out/bin", stage=0), tar))
    assert step.args[0] == "out/bin"
    assert members(step.archive) == {"out/bin/a": "1", "out/bin/b": "2"}
    matched = only(steps(root, copy("/out/*/a", stage=0), tar))
    assert matched.args[0] == "."
    assert members(matched.archive) == {"a": "1"}
