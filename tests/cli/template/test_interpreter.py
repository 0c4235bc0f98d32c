"""The steps of the code interpreter's template, and what is copied into it."""

import io
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest

import code_interpreter
from paddock.cli.http import CallError
from paddock.cli.template.api import BuildId
from paddock.cli.template.interpreter import assets, recipe
from paddock.cli.template.interpreter.assets import LOCKS, PACKAGE, Assets
from paddock.cli.template.interpreter.install import ensure_pool, share
from paddock.kit.errors import InvalidError, NotFoundError

PACKAGE_FILES = Path(code_interpreter.__file__).parent
BUILT = BuildId("code-interpreter-v1", "id", ("default/code-interpreter-v1",))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with the package and the lock files."""
    package = tmp_path / "src" / PACKAGE
    (package / "kernels" / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "kernels" / "kernel.py").write_text("x = 1\n")
    (package / "kernels" / "__pycache__" / "kernel.pyc").write_text("")
    (tmp_path / "requirements").mkdir()
    for name in LOCKS:
        (tmp_path / "requirements" / name).write_text("numpy==2.0\n")
    (tmp_path / "requirements" / "dev.txt").write_text("")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(assets, "_package", lambda: package)
    return tmp_path


def names(archive: assets.FileArchive) -> list[str]:
    packed = io.BytesIO()
    archive.write(packed)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as tar:
        return tar.getnames()


def commands(found: Assets, languages: tuple[str, ...] = ()) -> list[str]:
    return [step.args[0] for step in recipe.steps(found, languages) if step.type == "RUN"]


def test_the_server_and_its_lock_files_are_copied_without_what_python_compiled(
    installed: Path,
) -> None:
    found = assets.find()
    assert names(found.code) == [
        *("code_interpreter", "code_interpreter/__init__.py", "code_interpreter/kernels"),
        "code_interpreter/kernels/kernel.py",
    ]
    assert names(found.locks) == sorted(LOCKS)


def test_a_new_server_reuses_the_layers_with_the_packages(installed: Path) -> None:
    def keys() -> list[tuple[object, ...]]:
        made = recipe.steps(assets.find())
        return [(s.type, s.args, s.archive.digest() if s.archive else "") for s in made]

    before = keys()
    (installed / "src" / PACKAGE / "__init__.py").write_text("version = 2\n")
    after = keys()
    changed = [
        number for number, (old, new) in enumerate(zip(before, after, strict=True)) if old != new
    ]
    assert changed == [len(before) - 2]


def test_everything_is_installed_as_root_from_locks_with_hashes(installed: Path) -> None:
    made = recipe.steps(assets.find())
    assert all(step.args[1] == "root" for step in made if step.type == "RUN")
    installs = [text for text in commands(assets.find()) if "pip" in text]
    assert len(installs) == 2
    assert all("--require-hashes" in text for text in installs)


def test_clones_seed_their_kernels_by_a_hook_that_can_run(installed: Path, tmp_path: Path) -> None:
    home, hook = tmp_path / "home", tmp_path / Path(recipe.CLONE_HOOK).relative_to("/")
    shutil.copytree(PACKAGE_FILES, home / PACKAGE)
    last = commands(assets.find())[-1]
    last = last.replace(recipe.HOME, str(home)).replace(recipe.CLONE_HOOK, str(hook))
    subprocess.run(["sh", "-c", last], check=True)
    assert os.access(hook, os.X_OK)
    assert hook.read_bytes() == (PACKAGE_FILES / "clone_hook.sh").read_bytes()
    assert re.fullmatch(r"/etc/paddock/clone\.d/[A-Za-z0-9_][A-Za-z0-9_.-]*", recipe.CLONE_HOOK)


def test_the_server_is_started_by_its_supervisor() -> None:
    shell, script, python = shlex.split(recipe.START_COMMAND)
    assert (PACKAGE_FILES.parent / Path(script).relative_to(recipe.HOME)).is_file()
    assert (shell, python) == ("sh", f"{recipe.HOME}/venv/bin/python")


def test_languages_are_packages_of_debian_in_any_order(installed: Path) -> None:
    found = assets.find()
    both = commands(found, ("java", "r"))
    assert both == commands(found, ("r", "java"))
    apt = next(text for text in both if "apt-get" in text)
    assert "r-cran-irkernel" in apt
    assert "openjdk-17-jdk-headless" in apt
    assert not any("apt-get" in text for text in commands(found))


def test_wheels_replace_the_package_index(installed: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with pytest.raises(InvalidError, match="has no packages"):
        assets.find(wheels)
    (wheels / "numpy-2.0-py3-none-any.whl").write_bytes(b"x")
    (wheels / "notes.txt").write_text("x")
    found = assets.find(wheels)
    assert found.wheels is not None
    assert names(found.wheels) == ["numpy-2.0-py3-none-any.whl"]
    installs = [text for text in commands(found) if "pip" in text]
    assert all("--no-index --find-links" in text for text in installs)


def test_an_installation_without_the_lock_files_says_where_they_belong(
    installed: Path,
) -> None:
    (installed / "requirements" / LOCKS[0]).unlink()
    with pytest.raises(NotFoundError, match="lock files") as caught:
        assets.find()
    assert str(installed / "requirements") in str(caught.value.hint)


class Kube:
    """The declarative API with at most one pool."""

    def __init__(self, replicas: int | None = None) -> None:
        self.replicas = replicas
        self.calls: list[tuple[str, str, object]] = []

    def call(self, method: str, path: str, body: object = None, **_: object) -> object:
        self.calls.append((method, path, body))
        if method == "GET":
            if self.replicas is None:
                raise CallError(404, "not found")
            return {"spec": {"replicas": self.replicas}}
        return None

    @property
    def written(self) -> list[object]:
        return [body for method, _, body in self.calls if method != "GET"]


def test_the_first_installation_keeps_one_sandbox_warm_and_a_later_one_changes_nothing() -> None:
    kube = Kube()
    assert ensure_pool(kube, BUILT, None) == 1
    assert [method for method, _, _ in kube.calls] == ["GET", "POST"]
    kube = Kube(replicas=7)
    assert ensure_pool(kube, BUILT, None) == 7
    assert kube.written == []
    assert ensure_pool(kube, BUILT, 3) == 3
    assert kube.written == [{"spec": {"replicas": 3}}]


def test_the_template_serves_every_team_only_if_it_belongs_to_the_shared_one() -> None:
    kube = Kube()
    share(kube, BUILT)
    share(kube, BuildId("code-interpreter-v1", "id", ("red/code-interpreter-v1",)))
    aliases = ["code-interpreter-v1", "code-interpreter"]
    assert kube.written == [
        {"spec": {"aliases": aliases, "public": True}},
        {"spec": {"aliases": aliases, "public": False}},
    ]


def test_an_installation_from_a_wheel_has_the_lock_files() -> None:
    """`find` looks for them at share/paddock/requirements if there is no source tree."""
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    files = project["tool"]["setuptools"]["data-files"]["share/paddock/requirements"]
    assert [Path(name).name for name in files] == list(LOCKS)
    assert all((root / name).is_file() for name in files)
