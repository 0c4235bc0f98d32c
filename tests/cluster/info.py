"""What a client of a test cluster needs to know, and one request for setting tests up."""

import json
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.users import TOKENS

BUSY_SECONDS = 60.0
"""So long a server may say that it comes later."""
LATER_SECONDS = 0.5


class RefusedError(Exception):
    """The API server said no."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


@dataclass(frozen=True)
class ClusterInfo:
    """What a client needs to know; everything in it can be written down and shared."""

    server: str
    kubeconfig: str
    """File with a context per user of `users.TOKENS`, `admin` current, and one `certificate`."""
    ca_file: str
    binaries: str
    etcd: str
    pid: int
    """Of the process that owns the cluster."""

    @property
    def kubectl(self) -> str:
        """Path of the release's own kubectl."""
        return str(Path(self.binaries) / "kubectl")

    def request(self, method: str, path: str, body: Any = None, *, user: str = "admin") -> Any:
        """Send one request as a user; give the decoded answer. For setting tests up."""
        context = ssl.create_default_context(cafile=self.ca_file)
        deadline = time.monotonic() + BUSY_SECONDS
        request = urllib.request.Request(
            self.server + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {TOKENS[user]}",
                "Content-Type": "application/json",
                "Accept": "application/json",
            },
        )
        while True:
            try:
                with urllib.request.urlopen(request, context=context, timeout=30) as answer:
                    text = answer.read()
                break
            except urllib.error.HTTPError as error:
                with error:  # it holds the connection
                    refused = RefusedError(error.code, error.read().decode(errors="replace"))
                    # A kind that has just come, or changed, is not listed for a moment.
                    if error.code != 429 or time.monotonic() > deadline:
                        raise refused from None
                time.sleep(LATER_SECONDS)
        return json.loads(text) if text.startswith(b"{") else text.decode()
