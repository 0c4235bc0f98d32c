"""Address and identity for the API server: kubeconfig files and in-cluster service accounts.

Reads configuration only; sends no request. Tokens that rotate are in `credentials`.
"""

import base64
import binascii
import os
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import msgspec
import yaml
from msgspec import Struct

from paddock.kit.errors import InvalidError, UnavailableError, UnsupportedError
from paddock.store.kubernetes.credentials import (
    Credential,
    ExecCredential,
    FileCredential,
    NoCredential,
    StaticCredential,
)

T = TypeVar("T")

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Access(Struct, frozen=True, kw_only=True):
    """One API server and one identity."""

    server: str
    """Base URL without a trailing slash."""
    credential: Credential
    tls: ssl.SSLContext | None = None
    tls_server_name: str | None = None
    """Name to verify in the server certificate instead of the host of the URL."""
    namespace: str = "default"
    """Namespace for requests that name none."""


class _Cluster(Struct, frozen=True, rename="kebab"):
    server: str
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    insecure_skip_tls_verify: bool = False
    tls_server_name: str | None = None
    proxy_url: str | None = None


class _ExecVariable(Struct, frozen=True):
    name: str
    value: str


class _Exec(Struct, frozen=True, rename="camel"):
    command: str
    api_version: str
    args: list[str] | None = None
    env: list[_ExecVariable] | None = None


class _User(Struct, frozen=True, rename="kebab"):
    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    token: str | None = None
    token_file: str | None = msgspec.field(name="tokenFile", default=None)
    username: str | None = None
    password: str | None = None
    exec: _Exec | None = None
    auth_provider: Any = None


class _Context(Struct, frozen=True):
    cluster: str
    user: str = ""
    namespace: str = "default"


_Entries = dict[str, tuple[Path, Any]]
"""By name: the directory for relative paths, and the entry."""


def load_access(kubeconfig: Path | None = None, *, context: str | None = None) -> Access:
    """Load the first of: the given file, KUBECONFIG, in-cluster, ~/.kube/config."""
    if kubeconfig is not None:
        return load_kubeconfig([kubeconfig], context=context)
    if listed := os.environ.get("KUBECONFIG"):
        paths = [Path(path) for path in listed.split(os.pathsep) if path]
        return load_kubeconfig(paths, context=context)
    if "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").exists():
        return load_in_cluster()
    home = Path.home() / ".kube" / "config"
    if home.exists():
        return load_kubeconfig([home], context=context)
    raise UnavailableError(
        "no Kubernetes API server is configured",
        hint="set KUBECONFIG, or run inside a cluster with a service account",
    )


def load_in_cluster(
    directory: Path = SERVICE_ACCOUNT, environment: Mapping[str, str] = os.environ
) -> Access:
    """Load the service account of this pod: rotating token, CA certificate, namespace."""
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (directory / "token").exists():
        raise UnavailableError(
            "this process does not run in a pod with a service account",
            hint="set KUBECONFIG, or mount the service account token in the pod",
        )
    namespace_file = directory / "namespace"
    return Access(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        credential=FileCredential(directory / "token"),
        tls=_tls_from(authority=(directory / "ca.crt").read_text()),
        namespace=namespace_file.read_text().strip() if namespace_file.exists() else "default",
    )


def load_kubeconfig(paths: Iterable[Path], *, context: str | None = None) -> Access:
    """Read kubeconfig files; of entries with the same name the first wins, as with kubectl."""
    config = _Merged(paths)
    name = context or config.current
    if not name:
        raise InvalidError("the kubeconfig has no current-context", hint="select a context")
    _, chosen = config.find("contexts", "context", name)
    picked = _convert(chosen, _Context, f"contexts[{name}]")
    cluster_home, raw_cluster = config.find("clusters", "cluster", picked.cluster)
    cluster = _convert(raw_cluster, _Cluster, f"clusters[{picked.cluster}]")
    user_home, raw_user = config.find("users", "user", picked.user)
    user = _convert(raw_user, _User, f"users[{picked.user}]")
    if cluster.proxy_url:
        raise UnsupportedError("the kubeconfig's proxy-url is not supported")
    return Access(
        server=cluster.server.rstrip("/"),
        credential=_credential(user_home, user),
        tls=_tls(cluster_home, cluster, user_home, user),
        tls_server_name=cluster.tls_server_name,
        namespace=picked.namespace or "default",
    )


class _Merged:
    """Several kubeconfig files read as one."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.current = ""
        self._entries: dict[str, _Entries] = {}
        self._paths = [path for path in paths if path.exists()]
        if not self._paths:
            raise UnavailableError("none of the kubeconfig files exists", hint="set KUBECONFIG")
        for path in self._paths:
            self._add(path)

    def _add(self, path: Path) -> None:
        try:
            loaded: Any = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise InvalidError(f"cannot read the kubeconfig {path}: {error}") from error
        if not isinstance(loaded, dict):
            raise InvalidError(f"the kubeconfig {path} is not a mapping")
        document = cast("dict[str, Any]", loaded)
        self.current = self.current or document.get("current-context") or ""
        for section in ("clusters", "users", "contexts"):
            known = self._entries.setdefault(section, {})
            for entry in document.get(section) or ():
                known.setdefault(entry["name"], (path.parent, entry))

    def find(self, section: str, field: str, name: str) -> tuple[Path, Any]:
        """Return an entry and the directory for its relative paths."""
        if not name:  # the user of a context is optional
            return Path(), {}
        found = self._entries.get(section, {}).get(name)
        if found is None:
            files = ", ".join(str(path) for path in self._paths)
            raise InvalidError(f"{files}: there is no {name!r} in {section}")
        directory, entry = found
        return directory, entry.get(field) or {}


def _convert(plain: Any, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise InvalidError(f"kubeconfig: {where}: {error}") from error


def _credential(home: Path, user: _User) -> Credential:
    if user.auth_provider is not None:
        raise UnsupportedError(
            "the kubeconfig's auth-provider is not supported", hint="use an exec plugin or a token"
        )
    # A token file has priority over an inline token, as only the file is rotated.
    if user.token_file:
        return FileCredential(home / user.token_file)
    if user.token:
        return StaticCredential.bearer(user.token)
    if user.exec:
        program = user.exec.command
        if os.sep in program:
            program = str(home / program)
        return ExecCredential(
            [program, *(user.exec.args or ())],
            api_version=user.exec.api_version,
            environment={item.name: item.value for item in user.exec.env or ()},
        )
    if user.username and user.password:
        return StaticCredential.basic(user.username, user.password)
    return NoCredential()


def _tls(home: Path, cluster: _Cluster, user_home: Path, user: _User) -> ssl.SSLContext | None:
    if urlsplit(cluster.server).scheme != "https":
        return None
    authority = _text(home, cluster.certificate_authority, cluster.certificate_authority_data)
    context = _tls_from(authority=authority)
    if cluster.insecure_skip_tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    certificate = _text(user_home, user.client_certificate, user.client_certificate_data)
    key = _text(user_home, user.client_key, user.client_key_data)
    if bool(certificate) != bool(key):
        raise InvalidError("kubeconfig: client certificate and client key must be set together")
    if certificate and key:
        _load_pair(context, certificate, key)
    return context


def _tls_from(*, authority: str | None) -> ssl.SSLContext:
    # Comments between certificates may have any characters, but OpenSSL reads ASCII only.
    ascii_text = authority.encode("ascii", "replace").decode() if authority else None
    try:
        context = ssl.create_default_context(cadata=ascii_text)
    except (ssl.SSLError, ValueError) as error:
        raise InvalidError(f"the CA certificate of the cluster is not readable: {error}") from error
    # The HTTP client sends one request at a time per connection and has no HTTP/2.
    context.set_alpn_protocols(["http/1.1"])
    return context


def _text(home: Path, path: str | None, data: str | None) -> str | None:
    if data:
        try:
            return base64.b64decode("".join(data.split()), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise InvalidError(f"kubeconfig: inline data is not base64: {error}") from error
    try:
        return (home / path).read_text() if path else None
    except OSError as error:
        raise InvalidError(f"kubeconfig: cannot read {home / str(path)}: {error}") from error


def _load_pair(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Load a certificate and its key into OpenSSL, which reads files only."""
    handle = os.memfd_create("client-certificate", os.MFD_CLOEXEC)
    try:
        os.write(handle, f"{certificate}\n{key}\n".encode())
        context.load_cert_chain(f"/proc/self/fd/{handle}")
    except ssl.SSLError as error:
        raise InvalidError(
            f"kubeconfig: the client certificate cannot be loaded: {error}"
        ) from error
    finally:
        os.close(handle)
