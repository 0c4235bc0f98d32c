"""The description of a test cluster, and a simple request for test setup."""

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
"""How long 429 responses are retried."""
LATER_SECONDS = 0.5


class RefusedError(Exception):
    """The API server rejected a request."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


@dataclass(frozen=True)
class ClusterInfo:
    """The description of a test cluster; serializable."""

    server: str
    kubeconfig: str
    """File with a context per user of `users.TOKENS`, `admin` current, and one `certificate`."""
    ca_file: str
    binaries: str
    etcd: str
    pid: int
    """Pid of the process that owns the cluster."""

    @property
    def kubectl(self) -> str:
        """Path of kubectl of the same release."""
        return str(Path(self.binaries) / "kubectl")

    def request(self, method: str, path: str, body: Any = None, *, user: str = "admin") -> Any:
        """Send a request as a user; return the decoded response."""
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
                with error:  # closes the connection
                    refused = RefusedError(error.code, error.read().decode(errors="replace"))
                    # Requests for a new or changed kind may return 429 for a moment.
                    if error.code != 429 or time.monotonic() > deadline:
                        raise refused from None
                time.sleep(LATER_SECONDS)
        return json.loads(text) if text.startswith(b"{") else text.decode()
