"""The shared kernel limits that a node raises."""

import os
from pathlib import Path

import pytest

from paddock.runtime.local.kernel import sysctls


def settings(directory: Path, **values: str) -> Path:
    for name, value in values.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value)
    return directory


def test_low_limits_are_raised_and_others_left_unchanged(tmp_path):
    given = settings(
        tmp_path,
        fs__inotify__max_user_instances="128\n",
        fs__inotify__max_user_watches="2147483647\n",
        kernel__pid_max="32768\n",
    )

    raised = sysctls.raise_limits(given)

    assert set(raised) == {"fs/inotify/max_user_instances", "kernel/pid_max"}
    assert int((given / "fs/inotify/max_user_instances").read_text()) == 2**31 - 1
    assert (given / "fs/inotify/max_user_watches").read_text() == "2147483647\n"
    assert sysctls.raise_limits(given) == {}


@pytest.mark.sandbox
def test_the_kernel_accepts_the_values():
    if os.geteuid() != 0:
        pytest.skip("needs root")
    sysctls.raise_limits()
    assert sysctls.raise_limits() == {}


def test_missing_settings_are_ignored(tmp_path):
    assert sysctls.raise_limits(tmp_path) == {}
