"""PATH in login shells: when it is kept, and what shells do with the files that keep it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from paddock.envd.config import DEFAULT_PATH, Config, EnvdSettings
from paddock.envd.process import login_path
from paddock.envd.process.login_path import is_login_shell, path_to_keep, with_standard_directories
from paddock.envd.sandbox_context import SandboxContext

GO = "/go/bin:/usr/local/go/bin"
GO_AND_STANDARD = f"{GO}:{DEFAULT_PATH}"
LINE = ("/bin/bash", "-l", "-c", "true")

RESET = 'PATH="/usr/local/bin:/usr/bin:/bin"\nexport PATH\nexport FROM_PROFILE=yes\n'
DEBIAN = RESET + (
    "if [ -d /etc/profile.d ]; then\n"
    "  for i in /etc/profile.d/*.sh; do\n"
    "    if [ -r $i ]; then . $i; fi\n"
    "  done\n"
    "  unset i\n"
    "fi\n"
)
ALPINE = "export PAGER=less\n" + RESET + "for f in /etc/profile.d/*.sh; do . $f; done\n"
OWN = f"# Put local changes into /etc/profile.d/*.sh\n{RESET}"
"""Mentions the directory, but does not read it."""
STRICT = f"set -u\n{OWN}"
PROFILES = {"debian": DEBIAN, "alpine": ALPINE, "own": OWN, "strict": STRICT}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (LINE, True),
        (("/bin/sh", "-l", "-c", "true"), True),
        (("bash", "-lc", "true"), True),
        (("/busybox/sh", "--login"), True),
        (("/bin/bash", "-i", "-l"), True),
        (("/bin/bash", "-c", "-l", "true"), True),
        (("/bin/bash", "-o", "pipefail", "-lc", "true"), True),
        (("/bin/bash", "-eo", "pipefail", "-l"), True),
        (("/bin/bash", "-c", "ls", "-l"), False),
        (("/bin/bash", "-o", "allexport", "-c", "ls -l"), False),
        (("/bin/bash",), False),
        (("/bin/bash", "script", "-l"), False),
        (("/bin/ls", "-l"), False),
        (("/usr/bin/python3", "--login"), False),
    ],
)
def test_a_login_shell_is_known_by_its_name_and_options(argv: tuple[str, ...], expected: bool):
    assert is_login_shell(argv) is expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"PATH": GO}, GO_AND_STANDARD),
        ({"PATH": GO_AND_STANDARD}, GO_AND_STANDARD),
        ({"PATH": f"/bin:{GO}"}, f"/bin:{GO}:{DEFAULT_PATH.removesuffix(':/bin')}"),
        ({"PATH": DEFAULT_PATH}, None),
        ({"PATH": ""}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_a_path_that_nobody_has_set_is_left_to_the_profile(
    env: dict[str, str], expected: str | None
):
    assert path_to_keep(LINE, env) == expected
    assert path_to_keep(("/bin/ls", "-l"), env) is None


def test_standard_directories_are_added_once_at_the_end():
    once = with_standard_directories("/opt/bin")
    assert once == f"/opt/bin:{DEFAULT_PATH}" == with_standard_directories(once)
    assert with_standard_directories("") == DEFAULT_PATH


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that stands for /etc of a sandbox."""
    for name in ("_PROFILE", "_PART"):
        moved = str(getattr(login_path, name)).replace("/etc", str(tmp_path / "etc"), 1)
        monkeypatch.setattr(login_path, name, moved)
    made = tmp_path / "etc"
    made.mkdir()
    return made


def context(**env: str) -> SandboxContext:
    settings = EnvdSettings(env_vars=env, default_user="root")
    return SandboxContext(Config(settings=settings, owns_root=True, identity_dir=None))


def test_files_are_written_for_a_path_that_someone_has_set_only(etc: Path):
    (etc / "profile").write_text(DEBIAN)
    invoke = context().invocation
    assert invoke(LINE, {"PATH": DEFAULT_PATH}) == (LINE, {"PATH": DEFAULT_PATH})
    assert not (etc / "profile.d").exists()
    kept = {"PATH": GO_AND_STANDARD, "PADDOCK_PATH": GO_AND_STANDARD}
    assert invoke(LINE, {"PATH": GO}) == (LINE, kept)
    assert [path.name for path in (etc / "profile.d").iterdir()] == ["00-paddock-path.sh"]
    assert (etc / "profile").read_text() == DEBIAN
    # A user may remove it.
    shutil.rmtree(etc / "profile.d")
    assert invoke(LINE, {"PATH": GO}) == (LINE, kept)
    assert (etc / "profile.d/00-paddock-path.sh").stat().st_mode & 0o777 == 0o644


def test_a_profile_that_reads_no_other_files_is_extended_once(etc: Path):
    profile = etc / "profile"
    profile.write_text(OWN)
    profile.chmod(0o640)
    for _ in range(2):
        context().invocation(LINE, {"PATH": GO})
    assert profile.read_text().startswith(OWN)
    assert profile.read_text().count("unset PADDOCK_PATH") == 1
    assert profile.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in etc.iterdir()] == ["profile"]


def test_the_profile_is_extended_if_nothing_can_be_added_to_what_it_reads(etc: Path):
    (etc / "profile").write_text(DEBIAN)
    (etc / "profile.d").touch()
    for _ in range(2):
        _, env = context().invocation(LINE, {"PATH": GO})
        assert env["PADDOCK_PATH"] == GO_AND_STANDARD
    assert (etc / "profile").read_text().count("unset PADDOCK_PATH") == 1


def test_an_image_without_a_profile_needs_no_file(etc: Path):
    assert context().invocation(LINE, {"PATH": GO}) == (LINE, {"PATH": GO_AND_STANDARD})
    assert list(etc.iterdir()) == []


def test_a_profile_that_cannot_be_extended_is_logged(etc: Path, caplog: pytest.LogCaptureFixture):
    (etc / "profile").mkdir()
    assert context().invocation(LINE, {"PATH": GO}) == (LINE, {"PATH": GO_AND_STANDARD})
    assert [record.message for record in caplog.records] == [
        "/etc/profile cannot be extended: login shells may lose the variable PATH"
    ]


def test_envd_that_does_not_own_the_root_directory_writes_nothing(etc: Path):
    (etc / "profile").write_text(DEBIAN)
    outside = SandboxContext(Config(identity_dir=None))
    assert outside.invocation(LINE, {"PATH": GO}) == (LINE, {"PATH": GO_AND_STANDARD})
    assert not (etc / "profile.d").exists()


def shells() -> list[list[str]]:
    """The shells of this machine that images have."""
    found = [[path] for name in ("bash", "dash") if (path := shutil.which(name))]
    busybox = shutil.which("busybox")
    return [*found, *([[busybox, "ash"]] if busybox else [])]


def run(etc: Path, shell: list[str], script: str, *options: str, **env: str) -> str:
    """Run a login shell of envd's environment that sees `etc` as /etc."""
    line = ("/bin/sh", *(options or ("-l",)), "-c", script)
    (_, *rest), variables = context().invocation(line, {"HOME": str(etc.parent), **env})
    mount = f'/bin/mount --bind {etc} /etc && exec "$@"'
    wrapped = ["/usr/bin/unshare", "--mount", "/bin/sh", "-c", mount, "sh", *shell, *rest]
    done = subprocess.run(wrapped, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


needs_mounts = pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")


@needs_mounts
@pytest.mark.parametrize("shell", shells(), ids=" ".join)
@pytest.mark.parametrize("kind", [*PROFILES, "none"])
def test_a_login_shell_sees_the_path_of_its_environment(etc: Path, shell: list[str], kind: str):
    if kind in PROFILES:
        (etc / "profile").write_text(PROFILES[kind])
    script = 'echo "$PATH"; env | grep -c PADDOCK; echo "${FROM_PROFILE-}"'
    effect = "yes" if kind in PROFILES else ""
    assert run(etc, shell, script, PATH=GO) == f"{GO_AND_STANDARD}\n0\n{effect}\n"
    # The files stay: another command may leave PATH to the profile.
    reset = "/usr/local/bin:/usr/bin:/bin" if kind in PROFILES else DEFAULT_PATH
    assert run(etc, shell, 'echo "$PATH"', PATH=DEFAULT_PATH) == f"{reset}\n"


@needs_mounts
@pytest.mark.parametrize("shell", shells(), ids=" ".join)
def test_files_that_are_read_later_extend_the_path(etc: Path, shell: list[str]):
    (etc / "profile").write_text(DEBIAN)
    (etc / "profile.d").mkdir()
    (etc / "profile.d/conda.sh").write_text("PATH=/opt/conda/bin:$PATH\n")
    (etc.parent / ".profile").write_text("PATH=/home/user/.local/bin:$PATH\n")
    extended = "/home/user/.local/bin:/opt/conda/bin"
    assert run(etc, shell, 'echo "$PATH"', PATH=GO) == f"{extended}:{GO_AND_STANDARD}\n"
    reset = "/usr/local/bin:/usr/bin:/bin"
    assert run(etc, shell, 'echo "$PATH"', PATH=DEFAULT_PATH) == f"{extended}:{reset}\n"


@needs_mounts
def test_a_shell_without_login_gets_no_variable_of_ours(etc: Path):
    (etc / "profile").write_text(DEBIAN)
    assert run(etc, ["/bin/bash"], 'echo "$PATH ${PADDOCK_PATH-no}"', "-e", PATH=GO) == f"{GO} no\n"
