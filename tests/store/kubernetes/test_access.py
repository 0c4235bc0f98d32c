"""Kubeconfig files, service accounts and credentials."""

import base64
import json
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest

from paddock.kit.clock import ManualClock
from paddock.kit.errors import (
    InvalidError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
from paddock.store.kubernetes.access import load_access, load_in_cluster, load_kubeconfig
from paddock.store.kubernetes.credentials import ExecCredential, FileCredential
from tests.cluster.certificates import Authority


def kubeconfig(
    path: Path,
    user: dict[str, Any],
    *,
    name: str = "c",
    cluster: dict[str, Any] | None = None,
    namespace: str | None = None,
) -> Path:
    context = {"cluster": name, "user": name} | ({"namespace": namespace} if namespace else {})
    path.write_text(
        json.dumps(
            {
                "current-context": name,
                "clusters": [
                    {"name": name, "cluster": cluster or {"server": "http://127.0.0.1:1/"}}
                ],
                "users": [{"name": name, "user": user}],
                "contexts": [{"name": name, "context": context}],
            }
        )
    )
    return path


async def test_the_token_of_a_kubeconfig_is_sent(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", {"token": "t"}, namespace="team")
    access = load_kubeconfig([path])
    assert access.server == "http://127.0.0.1:1"
    assert access.namespace == "team"
    assert await access.credential.header() == "Bearer t"


async def test_paths_are_relative_to_their_kubeconfig(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "token").write_text("from-file\n")
    path = kubeconfig(tmp_path / "sub" / "config", {"tokenFile": "token", "token": "stale"})
    assert await load_kubeconfig([path]).credential.header() == "Bearer from-file"


async def test_of_several_kubeconfigs_the_first_entry_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kubeconfig(tmp_path / "one", {"token": "one"}, name="a")
    second = kubeconfig(tmp_path / "two", {"token": "two"}, name="b")
    monkeypatch.setenv("KUBECONFIG", f"{first}:{tmp_path / 'absent'}:{second}")
    assert await load_access().credential.header() == "Bearer one"
    assert await load_access(context="b").credential.header() == "Bearer two"


def test_client_certificates_are_read_inline_and_from_files(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.client("someone")

    def inline(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    by_file = kubeconfig(
        tmp_path / "files",
        {"client-certificate": certificate.name, "client-key": key.name},
        cluster={"server": "https://127.0.0.1:1", "certificate-authority": authority.path.name},
    )
    by_data = kubeconfig(
        tmp_path / "data",
        {"client-certificate-data": inline(certificate), "client-key-data": inline(key)},
        cluster={
            "server": "https://127.0.0.1:1",
            "certificate-authority-data": inline(authority.path),
            "tls-server-name": "kubernetes",
        },
    )
    for path in (by_file, by_data):
        tls = load_kubeconfig([path]).tls
        assert tls is not None
        assert tls.verify_mode is ssl.CERT_REQUIRED
        assert tls.cert_store_stats()["x509_ca"] == 1, "the system's authorities are not trusted"
    assert load_kubeconfig([by_data]).tls_server_name == "kubernetes"


@pytest.mark.parametrize(
    ("user", "cluster", "error", "text"),
    [
        ({"auth-provider": {"name": "old"}}, None, UnsupportedError, "auth-provider"),
        ({}, {"server": "http://x", "proxy-url": "http://p"}, UnsupportedError, "proxy-url"),
        ({}, {"server": 3}, InvalidError, r"clusters\[c\]"),
        ({"client-certificate-data": "%%%%"}, {"server": "https://x"}, InvalidError, "base64"),
        ({"client-certificate-data": "eA=="}, {"server": "https://x"}, InvalidError, "together"),
        ({"client-certificate-data": "eA==", "client-key-data": "eA=="}, {"server": "https://x"},
         InvalidError, "cannot be loaded"),
        ({}, {"server": "https://x", "certificate-authority-data": "eA=="}, InvalidError,
         "CA certificate of the cluster"),
        ({}, {"server": "https://x", "certificate-authority-data": "w6k="}, InvalidError,
         "CA certificate of the cluster"),
        ({}, {"server": "https://x", "certificate-authority": "no"}, InvalidError, "cannot read"),
    ],
)  # fmt: skip
def test_the_error_names_what_is_invalid_in_a_kubeconfig(
    tmp_path: Path, user: Any, cluster: Any, error: type[Exception], text: str
) -> None:
    path = kubeconfig(tmp_path / "config", user, cluster=cluster)
    with pytest.raises(error, match=text):
        load_kubeconfig([path])


def test_the_error_names_a_missing_context(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", {})
    with pytest.raises(InvalidError, match="'nope' in contexts"):
        load_kubeconfig([path], context="nope")


async def test_in_a_pod_the_service_account_is_used(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "token").write_text("pod-token")
    (tmp_path / "namespace").write_text("team\n")
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = load_in_cluster(authority.directory, environment)
    assert (access.server, access.namespace) == ("https://[fd00::1]:6443", "team")
    assert await access.credential.header() == "Bearer pod-token"


def test_outside_of_a_pod_there_is_no_service_account(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="not run in a pod"):
        load_in_cluster(tmp_path, {})


async def test_a_token_file_is_read_again_after_a_minute(tmp_path: Path) -> None:
    clock = ManualClock()
    path = tmp_path / "token"
    path.write_text("one")
    credential = FileCredential(path, clock)
    assert await credential.header() == "Bearer one"
    path.write_text("two")
    clock.advance(59)
    assert await credential.header() == "Bearer one"
    clock.advance(2)
    assert await credential.header() == "Bearer two"


async def test_the_error_for_a_missing_token_file_has_a_hint(tmp_path: Path) -> None:
    with pytest.raises(UnauthenticatedError, match="cannot read the token file") as caught:
        await FileCredential(tmp_path / "token").header()
    assert "service-account token" in str(caught.value.hint)


PROGRAM = """
import json, os, pathlib, sys
count = pathlib.Path(sys.argv[1])
count.write_text(str(int(count.read_text()) + 1))
asked = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
print(json.dumps({"apiVersion": asked["apiVersion"], "kind": "ExecCredential", "status": {
    "token": os.environ["PREFIX"] + count.read_text(),
    "expirationTimestamp": "2030-01-01T00:10:00Z"}}))
"""


async def test_an_exec_plugin_runs_again_when_its_token_expires(tmp_path: Path) -> None:
    count = tmp_path / "count"
    count.write_text("0")
    clock = ManualClock()
    credential = ExecCredential(
        [sys.executable, "-c", PROGRAM, str(count)],
        api_version="client.authentication.k8s.io/v1",
        environment={"PREFIX": "token-"},
        clock=clock,
    )
    assert await credential.header() == "Bearer token-1"
    clock.advance(500)
    assert await credential.header() == "Bearer token-1"
    clock.advance(80)
    assert await credential.header() == "Bearer token-2"
    assert credential.rejected()
    assert await credential.header() == "Bearer token-3"


@pytest.mark.parametrize(
    ("command", "error", "text"),
    [
        (["/nowhere/helper"], UnauthenticatedError, "cannot run"),
        ([sys.executable, "-c", "import sys; sys.exit('log in first')"], UnauthenticatedError,
         "log in first"),
        ([sys.executable, "-c", "print('hello')"], UnauthenticatedError, "ExecCredential"),
        ([sys.executable, "-c", "print('{}')"], UnsupportedError, "returned no token"),
    ],
)  # fmt: skip
async def test_the_error_names_an_exec_plugin_that_fails(
    command: list[str], error: type[Exception], text: str
) -> None:
    credential = ExecCredential(command, api_version="client.authentication.k8s.io/v1")
    with pytest.raises(error, match=text):
        await credential.header()
