"""`paddock kube rotate-seed`: what the Secret holds at each step, and what a kill leaves."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from paddock.cli.kube.kubectl import Kubectl
from paddock.cli.kube.seed import SeedRotation, with_next, with_next_in_use
from paddock.kit.errors import InvalidError, NotFoundError, UnavailableError

OLD = {"seed": "old", "token": "t", "api-key": "k"}


def test_roles_accept_the_next_seed_before_they_use_it() -> None:
    first = with_next(OLD, "new")
    assert first == {**OLD, "next-seed": "new", "accepted-seeds": "new"}
    assert with_next_in_use(first) == {**OLD, "seed": "new", "accepted-seeds": "old"}


def test_every_earlier_seed_stays_accepted() -> None:
    data = {**OLD, "seed": "b", "accepted-seeds": "a"}
    assert with_next_in_use(with_next(data, "c")) == {**OLD, "seed": "c", "accepted-seeds": "b,a"}


def test_an_interrupted_rotation_goes_on_with_its_seed() -> None:
    begun = with_next(OLD, "new")
    assert with_next(begun, "another") == begun


class World:
    """A Secret and the calls of a kubectl that changes it."""

    def __init__(self, directory: Path) -> None:
        self.secret, self.calls = directory / "secret.json", directory / "calls"
        self.fails = directory / "fails"
        self.calls.touch()
        data = {key: base64.b64encode(value.encode()).decode() for key, value in OLD.items()}
        self.secret.write_text(json.dumps({"metadata": {"resourceVersion": "1"}, "data": data}))
        roles = [
            {"kind": "Deployment", "metadata": {"name": "paddock-api"}},
            {"kind": "DaemonSet", "metadata": {"name": "paddock-node"}},
        ]
        (directory / "roles.json").write_text(json.dumps({"items": roles}))
        program = directory / "kubectl"
        program.write_text(
            f"""#!/bin/sh
echo "$*" >>{self.calls}
case "$*" in
    *"get "*secret*) [ -e {self.secret} ] && cat {self.secret} || true ;;
    *"get "*deployments*) cat {directory}/roles.json ;;
    "replace -f -") cat >{self.secret} ;;
    "rollout status"*) if [ -e {self.fails} ]; then echo "timed out" >&2; exit 1; fi ;;
esac
"""
        )
        program.chmod(0o755)

    def data(self) -> dict[str, Any]:
        found = json.loads(self.secret.read_text())["data"]
        return {key: base64.b64decode(value).decode() for key, value in found.items()}

    def steps(self) -> list[str]:
        words = [line.split() for line in self.calls.read_text().splitlines()]
        return [" ".join(each[:3]) for each in words if each[0] in ("replace", "rollout")]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return World(tmp_path)


def _rotation() -> SeedRotation:
    return SeedRotation(Kubectl(None, None), "paddock-system", "paddock", 300)


ROLLOUT = [
    "rollout restart deployment/paddock-api",
    "rollout restart daemonset/paddock-node",
    "rollout status deployment/paddock-api",
    "rollout status daemonset/paddock-node",
]


def test_all_roles_have_restarted_before_the_next_seed_is_used(world: World) -> None:
    _rotation().run()
    assert world.steps() == ["replace -f -", *ROLLOUT, "replace -f -", *ROLLOUT]
    data = world.data()
    assert data["seed"] != "old"
    assert (data["accepted-seeds"], data["token"], data["api-key"]) == ("old", "t", "k")


def test_a_role_that_does_not_restart_stops_the_rotation_before_the_seed_changes(
    world: World,
) -> None:
    world.fails.touch()
    with pytest.raises(UnavailableError, match="paddock-api has not restarted: timed out"):
        _rotation().run()
    begun = world.data()
    assert begun["seed"] == "old"
    world.fails.unlink()
    _rotation().run()
    assert world.data()["seed"] == begun["next-seed"], "the begun rotation is finished"


def test_seeds_are_never_arguments_of_a_process(world: World) -> None:
    _rotation().run()
    assert world.data()["seed"] not in world.calls.read_text()


def test_a_missing_secret_is_an_error(world: World) -> None:
    world.secret.unlink()
    with pytest.raises(NotFoundError, match="there is no Secret paddock"):
        _rotation().run()


def test_a_secret_without_a_seed_is_an_error(world: World) -> None:
    world.secret.write_text(json.dumps({"data": {}}))
    with pytest.raises(InvalidError, match="has no key seed"):
        _rotation().run()
