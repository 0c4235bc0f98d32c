"""`paddock kube rotate-seed`: replaces the seed of an installation without ending sandboxes.

The Secret has the seed in use, further ones that are accepted, and during a rotation the next one.
All roles first accept the next seed, then use it, so that at every moment each understands the
others. A rotation that was interrupted is continued by the next call.
"""

import base64
import secrets
from collections.abc import Callable, Mapping

from paddock.cli.kube.kubectl import Kubectl
from paddock.cli.kube.options import PART_OF
from paddock.installation.secrets import fingerprint
from paddock.kit.errors import InvalidError, NotFoundError, UnavailableError

SEED, ACCEPTED, NEXT = "seed", "accepted-seeds", "next-seed"
Data = Mapping[str, str]
"""The decoded keys of the Secret."""


def with_next(data: Data, new: str) -> dict[str, str]:
    """Return the Secret that makes roles accept a new seed, or the one of a begun rotation."""
    new = data.get(NEXT) or new
    return {**data, NEXT: new, ACCEPTED: _joined(new, *_accepted(data))}


def with_next_in_use(data: Data) -> dict[str, str]:
    """Return the Secret that makes roles use the next seed, and accept the one before."""
    kept = {name: value for name, value in data.items() if name != NEXT}
    others = (each for each in _accepted(data) if each != data[NEXT])
    return {**kept, SEED: data[NEXT], ACCEPTED: _joined(data[SEED], *others)}


def _accepted(data: Data) -> list[str]:
    return [each for each in data.get(ACCEPTED, "").split(",") if each]


def _joined(*seeds: str) -> str:
    return ",".join(dict.fromkeys(seeds))


class SeedRotation:
    """Changes the Secret and restarts the roles, one pod after the other."""

    def __init__(self, kubectl: Kubectl, namespace: str, name: str, seconds: int) -> None:
        self._kubectl = kubectl
        self._namespace = namespace
        self._name = name
        self._seconds = seconds

    def run(self) -> str:
        """Rotate the seed, or finish an earlier rotation; return the fingerprint of the seed."""
        self._change(lambda data: with_next(data, secrets.token_hex(32)))
        self._restart()
        used = self._change(with_next_in_use)
        self._restart()
        return fingerprint(used[SEED])

    def _change(self, change: Callable[[Data], dict[str, str]]) -> dict[str, str]:
        found = self._kubectl.get("secret", self._name, "-n", self._namespace)
        if not found:
            raise NotFoundError(
                f"there is no Secret {self._name} in namespace {self._namespace}",
                hint="`paddock kube install` creates it",
            )
        data = {key: _decoded(text) for key, text in found.get("data", {}).items()}
        if not data.get(SEED):
            raise InvalidError(f"the Secret {self._name} has no key {SEED}")
        changed = change(data)
        found["data"] = {key: _encoded(text) for key, text in changed.items()}
        # With its resourceVersion: a rotation that runs at the same time makes this one fail.
        self._kubectl.replace(found)
        return changed

    def _restart(self) -> None:
        """Restart all roles and wait until each runs with the Secret as it is now."""
        roles = [
            f"{item['kind'].lower()}/{item['metadata']['name']}"
            for item in self._kubectl.get(
                "deployments,daemonsets", "-n", self._namespace, "-l", PART_OF
            ).get("items", ())
        ]
        for role in roles:
            self._kubectl.restart(role, "-n", self._namespace)
        for role in roles:
            try:
                limit = f"--timeout={self._seconds}s"
                self._kubectl.roll_out(role, "-n", self._namespace, limit)
            except InvalidError as error:
                raise UnavailableError(
                    f"{role} has not restarted: {error.message}",
                    hint=f"`kubectl -n {self._namespace} get pods` shows why; "
                    "`paddock kube rotate-seed` continues",
                ) from error


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode()


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
