"""Where Paddock is and how we prove who we are.

`PADDOCK_URL` and `E2B_API_KEY` for another machine; otherwise this machine's own files.
"""

import os
from pathlib import Path
from urllib.parse import quote

import msgspec

from paddock.cli.http import Endpoint
from paddock.kit import bearer
from paddock.kit.errors import ConflictError, UnavailableError
from paddock.settings import Settings, load


class Place:
    """An installation, here or elsewhere."""

    def __init__(self, config: Path | None, url: str | None) -> None:
        self.settings: Settings = load(file=config)
        self.config = config
        host = "localhost" if self.settings.host in ("0.0.0.0", "::") else self.settings.host  # noqa: S104 - compared
        here = f"http://{host}:{self.settings.port}"
        given = (url or os.environ.get("PADDOCK_URL") or here).rstrip("/")
        self.url = given if "://" in given else f"http://{given}"
        self.is_here = self.url in (here, f"http://localhost:{self.settings.port}")

    def _secret(self, name: str, variable: str) -> str:
        if value := os.environ.get(variable):
            return value
        if not self.is_here:
            # This machine's secrets are nobody else's business.
            raise UnavailableError(
                f"no credential for {self.url}: {variable} is not set", hint=f"set {variable}"
            )
        path = self.settings.state / "secrets.json"
        try:
            return str(msgspec.json.decode(path.read_bytes())[name])
        except (OSError, KeyError, msgspec.DecodeError) as error:
            raise UnavailableError(
                f"no credential for {self.url}: {variable} is not set and {path} cannot be read",
                hint=f"set {variable}, or run as the user who started Paddock",
            ) from error

    @property
    def api_key(self) -> str:
        """The API key."""
        return self._secret("api_key", "E2B_API_KEY")

    @property
    def e2b(self) -> Endpoint:
        """E2B's API."""
        return Endpoint(self.url, {"X-API-Key": self.api_key})

    @property
    def kube(self) -> Endpoint:
        """The declarative API."""
        token = self._secret("token", "PADDOCK_TOKEN")
        return Endpoint(self.url, bearer.header(token))

    def inside(self, sandbox_id: str) -> Endpoint:
        """Give the way to what runs in a sandbox, if it runs, or will when somebody calls."""
        shown = self.e2b.call("GET", path_of(sandbox_id))
        wakes = shown.get("lifecycle", {}).get("autoResume")
        if shown["state"] == "paused" and not wakes:
            raise ConflictError(
                f"sandbox {sandbox_id} is paused", hint=f"paddock sandbox resume {sandbox_id}"
            )
        return self.sandbox(sandbox_id, shown.get("envdAccessToken"))

    def sandbox(self, sandbox_id: str, token: str | None, port: int = 49983) -> Endpoint:
        """A port of a sandbox."""
        headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(port)}
        if token:
            headers["X-Access-Token"] = token
        return Endpoint(self.url, headers)


def path_of(sandbox_id: str) -> str:
    """Give a sandbox's path in E2B's API, whatever was typed."""
    return f"/sandboxes/{quote(sandbox_id, safe='')}"
