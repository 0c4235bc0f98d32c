"""Registries for tests: Debian's docker-registry on loopback, its token server, and a relay."""

import base64
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils

from tests.ports import free_port

_STARTS_WITHIN_SECONDS = 120.0
"""A bound for a registry that hangs; other tests may keep the machine busy."""
USER, PASSWORD = "alice", "secret of alice"


class Registry:
    """A running registry."""

    def __init__(self, port: int, log: Path) -> None:
        self.host = f"127.0.0.1:{port}"
        self.url = f"http://{self.host}"
        self.log = log

    def lose_blobs(self, digests: Collection[str]) -> None:
        """Delete the content of blobs; manifests still name them."""
        for path in self.log.parent.glob("data/**/blobs/sha256/*/*/data"):
            if path.parent.name in digests:
                path.unlink()

    def requests(self, text: str) -> list[str]:
        """Return the lines of the access log that contain a text."""
        return [line for line in self.log.read_text().splitlines() if text in line]


@contextmanager
def registry(directory: Path, *, auth: str = "") -> Generator[Registry]:
    """Run a registry until the end of the block; `auth` is YAML for its section of that name."""
    port = free_port()
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "config.yml"
    config.write_text(
        f"""version: 0.1
log: {{level: info, accesslog: {{disabled: false}}}}
storage: {{filesystem: {{rootdirectory: {directory / "data"}}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:{port}", secret: test}}
{auth}
"""
    )
    log = directory / "registry.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(config)], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/v2/", process)
        yield Registry(port, log)
    finally:
        process.terminate()
        process.wait(10)


def basic_auth(directory: Path) -> str:
    """Return the configuration of a registry that knows one user."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "htpasswd"
    subprocess.run(["htpasswd", "-Bbc", str(file), USER, PASSWORD], check=True, capture_output=True)
    return f"auth: {{htpasswd: {{realm: test, path: {file}}}}}"


def write_config(directory: Path, host: str, user: str, password: str) -> Path:
    """Write a `config.json` with the credentials of one registry."""
    path = directory / "config.json"
    auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    path.write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    return path


def push(layout: Path, registry: Registry, name: str, *options: str) -> None:
    """Push an OCI layout with skopeo."""
    subprocess.run(
        [
            *("skopeo", "--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false"),
            *options,
            f"oci:{layout}",
            f"docker://{registry.host}/{name}",
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )


class TokenServer:
    """Issues tokens as a registry's token server does. Docker Hub has the same protocol."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.certificate = directory / "token.pem"
        self.asked: list[dict[str, str]] = []
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tokens")])
        now = datetime.now(UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._key.public_key())
            .serial_number(1)
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .sign(self._key, hashes.SHA256())
        )
        self.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        self._chain = base64.b64encode(made.public_bytes(serialization.Encoding.DER)).decode()

    @property
    def auth(self) -> str:
        """The configuration of a registry that accepts these tokens."""
        return (
            f"auth: {{token: {{realm: 'http://127.0.0.1:{self.port}/token', service: test, "
            f"issuer: tests, rootcertbundle: {self.certificate}}}}}"
        )

    async def serve(self) -> web.AppRunner:
        """Listen; the caller cleans up the runner."""
        app = web.Application()
        app.router.add_get("/token", self._get)
        app.router.add_post("/token", self._post)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        return runner

    async def _get(self, request: web.Request) -> web.Response:
        expected = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        scope = request.query.get("scope", "")
        authorization = request.headers.get("Authorization", "")
        self.asked.append({"scope": scope, "authorization": authorization})
        if authorization and authorization != f"Basic {expected}":
            return web.Response(status=401)
        # Private repositories are those below `private/`.
        if "private/" in scope and not authorization:
            return web.json_response({"token": self.token(""), "expires_in": 60})
        return web.json_response({"token": self.token(scope), "expires_in": 60})

    async def _post(self, request: web.Request) -> web.Response:
        form = await request.post()
        self.asked.append({"grant": str(form["grant_type"]), "scope": str(form["scope"])})
        if form["refresh_token"] != "identity":
            return web.Response(status=401)
        return web.json_response({"access_token": self.token(str(form["scope"]))})

    def token(self, scope: str) -> str:
        """Return a signed token for a scope such as `repository:a/b:pull`."""
        access = []
        if scope:
            kind, _, rest = scope.partition(":")
            name, _, actions = rest.rpartition(":")
            access = [{"type": kind, "name": name, "actions": actions.split(",")}]
        now = int(time.time())
        head = {"typ": "JWT", "alg": "ES256", "x5c": [self._chain]}
        body = {
            "iss": "tests",
            "sub": USER,
            "aud": "test",
            "jti": str(now),
            "nbf": now - 10,
            "iat": now - 10,
            "exp": now + 300,
            "access": access,
        }
        text = f"{_encoded(json.dumps(head).encode())}.{_encoded(json.dumps(body).encode())}"
        r, s = utils.decode_dss_signature(self._key.sign(text.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{text}.{_encoded(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _STARTS_WITHIN_SECONDS
    while time.monotonic() < until:
        if _answers(url):
            return
        if process.poll() is not None:
            raise RuntimeError(f"the registry ended with {process.returncode}")
        time.sleep(0.05)
    raise RuntimeError("the registry does not answer")


def _answers(url: str) -> bool:
    """Whether a server answers, if only that it wants credentials."""
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
