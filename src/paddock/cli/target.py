"""The installation that a command talks to, and the credentials for it.

`PADDOCK_URL` and `E2B_API_KEY` select another machine; the default is this machine and its files.
With `PADDOCK_STORE=kubernetes` or `PADDOCK_KUBECONFIG`, resources are those of a cluster.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import msgspec

from paddock.cli.http import CallError, Endpoint
from paddock.cli.output import Output
from paddock.kit import bearer
from paddock.kit.errors import ConflictError, PaddockError, UnavailableError
from paddock.settings import Settings, load
from paddock.store.kubernetes.access import Access, load_access


class CliTarget:
    """An installation of Paddock, local or remote."""

    def __init__(self, config: Path | None, url: str | None) -> None:
        self.settings: Settings = load(file=config)
        self.config = config
        host = "localhost" if self.settings.host in ("0.0.0.0", "::") else self.settings.host  # noqa: S104 - compared
        local = f"http://{host}:{self.settings.port}"
        given = (url or os.environ.get("PADDOCK_URL") or local).rstrip("/")
        self.url = given if "://" in given else f"http://{given}"
        self.is_local = self.url in (local, f"http://localhost:{self.settings.port}")

    def _secret(self, name: str, variable: str) -> str:
        if value := os.environ.get(variable):
            return value
        if not self.is_local:
            # Never send the secrets of this machine to another.
            raise UnavailableError(
                f"no credential for {self.url}: {variable} is not set", hint=f"set {variable}"
            )
        path = self.settings.keyring
        try:
            return str(msgspec.json.decode(path.read_bytes())[name])
        except (OSError, KeyError, msgspec.DecodeError) as error:
            raise UnavailableError(
                f"no credential for {self.url}: {variable} is not set and {path} cannot be read",
                hint=f"set {variable}, or run as the user that started Paddock",
            ) from error

    @property
    def api_key(self) -> str:
        """The API key."""
        return self._secret("api_key", "E2B_API_KEY")

    @property
    def token(self) -> str:
        """The bearer token of the declarative API."""
        return self._secret("token", "PADDOCK_TOKEN")

    @property
    def e2b(self) -> Endpoint:
        """E2B's API."""
        return Endpoint(self.url, {"X-API-Key": self.api_key})

    @property
    def kube(self) -> Endpoint:
        """The declarative API; on a cluster, the API server of Kubernetes."""
        if self.settings.store == "kubernetes" or self.settings.kubeconfig:
            return self._cluster
        return Endpoint(self.url, bearer.header(self.token))

    @cached_property
    def _cluster(self) -> Endpoint:
        given = self.settings.kubeconfig
        access: Access = load_access(Path(given) if given else None)
        header = asyncio.run(_authorization(access))
        return Endpoint(
            access.server,
            {} if header is None else {"Authorization": header},
            tls=access.tls,
            tls_name=access.tls_server_name,
        )

    def envd(self, sandbox_id: str) -> Endpoint:
        """Return the endpoint of a sandbox's envd; raise if it is paused without auto-resume."""
        shown = self.e2b.call("GET", path_of(sandbox_id))
        wakes = shown.get("lifecycle", {}).get("autoResume")
        if shown["state"] == "paused" and not wakes:
            raise ConflictError(
                f"sandbox {sandbox_id} is paused", hint=f"paddock sandbox resume {sandbox_id}"
            )
        return self.sandbox(sandbox_id, shown.get("envdAccessToken"))

    def sandbox(
        self,
        sandbox_id: str,
        token: str | None,
        port: int = 49983,
        *,
        traffic_token: str | None = None,
    ) -> Endpoint:
        """Return the endpoint of a port of a sandbox."""
        headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(port)}
        if token:
            headers["X-Access-Token"] = token
        if traffic_token:
            headers["E2B-Traffic-Access-Token"] = traffic_token
        return Endpoint(self.url, headers)


async def _authorization(access: Access) -> str | None:
    return await access.credential.header()


def path_of(sandbox_id: str) -> str:
    """Return the path of a sandbox in E2B's API, with the id quoted."""
    return f"/sandboxes/{quote(sandbox_id, safe='')}"


def delete_each(
    target: CliTarget,
    output: Output,
    names: Sequence[str],
    *,
    path_of: Callable[[str], str],
    done: str,
) -> None:
    """Delete objects by E2B's API and print which; then raise why others were not deleted.

    `done` is what happened to them: `deleted`, `killed`.
    """
    deleted: list[str] = []
    refused: list[str] = []
    for name in names:
        try:
            target.e2b.call("DELETE", path_of(name))
        except CallError as error:
            refused.append(error.message)
        else:
            deleted.append(name)
    if deleted:
        output.done("\n".join(f"{done} {name}" for name in deleted), {done: deleted})
    if refused:
        raise PaddockError("; ".join(refused))
