"""Mounts that no sandbox of one machine can have are refused at once, not retried."""

import pytest

from paddock.kit.errors import InvalidError, UnsupportedError
from paddock.runtime.local.launch.protocol import MakeRoot
from paddock.runtime.local.sandbox.builder import rootless_overlay, validate
from paddock.runtime.port import Blueprint, Mount


def test_a_volume_claim_is_refused_with_the_alternative() -> None:
    wanted = Blueprint(uid="u", mounts=(Mount(source="volume:data", path="/data"),))
    with pytest.raises(InvalidError, match="one machine has no volume claims") as refused:
        validate(wanted)
    assert "hostPath" in (refused.value.hint or "")
    mounted = Blueprint(uid="u", mounts=(Mount(source="/srv/data", path="/data"),))
    validate(mounted, allowed_paths=("/srv",))
    with pytest.raises(InvalidError, match="the operator allows none"):
        validate(mounted)


def test_a_node_without_root_refuses_directories_of_the_host() -> None:
    request = MakeRoot(base=0, layers=("l",), disk="/d", host_directories=(("/srv", False),))
    with pytest.raises(UnsupportedError, match="without root") as refused:
        rootless_overlay(request)
    assert "sudo paddock up" in (refused.value.hint or "")
