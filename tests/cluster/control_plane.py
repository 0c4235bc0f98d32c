"""A temporary Kubernetes control plane on loopback that starts in seconds.

`KubeCluster` runs etcd and kube-apiserver, and optionally kube-controller-manager and
kube-scheduler, on free ports with its own certificates, RBAC and admission enabled. From a shell:

    python -m tests.cluster.control_plane             start, print the kubeconfig, stop on Ctrl-C
    python -m tests.cluster.control_plane --minimal   etcd and API server only

`fixtures` shares one cluster among pytest workers.
"""

import argparse
import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from tests.cluster.binaries import BinariesMissingError, directory_with
from tests.cluster.certificates import Authority, signing_key
from tests.cluster.definitions import install
from tests.cluster.info import ClusterInfo, RefusedError
from tests.cluster.users import TENANT_NAMESPACE, TOKENS, access_rules, token_file
from tests.ports import free_ports

CONTROLLER_MANAGER = "kube-controller-manager"
SCHEDULER = "kube-scheduler"
START_SECONDS = 90.0


class ClusterError(Exception):
    """The control plane did not start or has ended; the message ends with its log."""


class KubeCluster:
    """One control plane; a context manager that leaves no process and no file behind."""

    def __init__(
        self,
        directory: Path | None = None,
        *,
        components: Sequence[str] = (CONTROLLER_MANAGER,),
        fsync: bool = False,
        controllers: str = "*",
        our_kinds: bool = True,
        has_kubelets: bool = False,
    ) -> None:
        self._own_directory = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="paddock-kube."))
        self._components = tuple(components)
        self._fsync = fsync
        self._controllers = controllers
        self._our_kinds = our_kinds
        self._has_kubelets = has_kubelets
        """Whether the API server connects to nodes and pods: for logs, forwarding, webhooks."""
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, list[str]] = {}
        self.info: ClusterInfo
        self.authority: Authority

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all components and wait until they answer."""
        programs = ["etcd", "kube-apiserver", "kubectl", *self._components]
        binaries = directory_with(programs)
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "logs").mkdir(exist_ok=True)
        etcd_port, peer_port, api_port, *other_ports = free_ports(3 + len(self._components))
        authority = self.authority = Authority(self.directory)
        server = f"https://127.0.0.1:{api_port}"
        etcd = f"http://127.0.0.1:{etcd_port}"
        self.info = ClusterInfo(
            server=server,
            kubeconfig=str(self.directory / "kubeconfig"),
            ca_file=str(authority.path),
            binaries=str(binaries),
            etcd=etcd,
            pid=os.getpid(),
        )
        private_key, public_key = signing_key(self.directory, "service-account")
        self._commands["etcd"] = self._etcd(etcd, peer_port)
        self._commands["kube-apiserver"] = self._apiserver(
            authority, api_port, private_key, public_key
        )
        for component, port in zip(self._components, other_ports, strict=True):
            self._commands[component] = self._client_of_api(authority, component, port, private_key)
        self._write_kubeconfig(authority)
        self.start_process("etcd")
        self.start_process("kube-apiserver")
        self.wait_ready()
        # The server creates it shortly after it is ready.
        self._wait_for("/api/v1/namespaces/default", 404)
        self._grant_access()
        if self._our_kinds:
            # Before the others start: the garbage collector looks for new kinds every 30 s.
            install(self.info)
        for component in self._components:
            self.start_process(component)
        self._wait_for_service_account()

    def stop(self) -> None:
        """End all processes, clients of the API first, and remove the files."""
        for name in reversed(list(self._processes)):
            self.stop_process(name)
        if self._own_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    # One process at a time, for tests that break things.

    def start_process(self, name: str) -> None:
        """Start one component with its command line."""
        log = self.directory / "logs" / f"{name}.log"
        # If this process is killed, the kernel ends the component too (parent-death signal). The
        # signal is bound to the starting thread, so only the main thread may start components.
        if threading.current_thread() is not threading.main_thread():
            raise ClusterError("start processes from the main thread")
        program, *arguments = self._commands[name]
        with log.open("ab") as output:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={
                    "PATH": os.environ.get("PATH", ""),
                    "HOME": str(self.directory),
                    "GOGC": "400",
                },
                start_new_session=True,  # Ctrl-C is handled by this process
            )

    def process(self, name: str) -> subprocess.Popen[bytes]:
        """Return a running component, to send it signals."""
        return self._processes[name]

    def stop_process(self, name: str, *, how: signal.Signals = signal.SIGKILL) -> None:
        """Kill one component and wait for it; its data is temporary."""
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def restart_apiserver(self) -> None:
        """Kill the API server and start it again on the same port: its watch cache is empty."""
        self.stop_process("kube-apiserver")
        self.start_process("kube-apiserver")
        self.wait_ready()

    def compact_etcd(self) -> None:
        """Compact the history, so that watches cannot resume from earlier versions."""
        compact_etcd(self.info)

    def wait_ready(self) -> None:
        """Wait until the API server is ready."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            self._fail_if_dead()
            try:
                if self.info.request("GET", "/readyz") == "ok":
                    return
            except (OSError, RefusedError):
                pass
            if time.monotonic() > deadline:
                raise ClusterError("the API server did not get ready" + self._log_tails())
            time.sleep(0.1)

    def _fail_if_dead(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise ClusterError(
                    f"{name} ended with code {process.returncode}" + self._log_tails()
                )

    def _log_tails(self) -> str:
        tails = []
        for name in self._processes:
            text = (self.directory / "logs" / f"{name}.log").read_text(errors="replace")
            tails.append(f"\n--- {name}\n" + "\n".join(text.splitlines()[-15:]))
        return "".join(tails)

    def _etcd(self, client_url: str, peer_port: int) -> list[str]:
        peer_url = f"http://127.0.0.1:{peer_port}"
        command = [
            f"{self.info.binaries}/etcd",
            "--name=test",
            f"--data-dir={self.directory / 'etcd'}",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=test={peer_url}",
            "--log-level=warn",
        ]
        return command if self._fsync else [*command, "--unsafe-no-fsync"]

    def _apiserver(
        self, authority: Authority, port: int, private_key: Path, public_key: Path
    ) -> list[str]:
        certificate, key = authority.server("kube-apiserver")
        tokens = token_file(self.directory)
        return [
            f"{self.info.binaries}/kube-apiserver",
            f"--etcd-servers={self.info.etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={port}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--client-ca-file={authority.path}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=Node,RBAC",
            # The second is disabled in most clusters, but enabled in some.
            "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={public_key}",
            f"--service-account-signing-key-file={private_key}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--endpoint-reconciler-type=none",
            "--allow-privileged=true",
            "--profiling=false",
            # Addresses of Services are not routed on this machine; those of pods are.
            "--enable-aggregator-routing=true",
            *(self._ways_to_pods(authority) if self._has_kubelets else ()),
        ]

    def _ways_to_pods(self, authority: Authority) -> list[str]:
        certificate, key = authority.client("kube-apiserver-kubelet-client", "system:masters")
        return [
            f"--kubelet-client-certificate={certificate}",
            f"--kubelet-client-key={key}",
            "--kubelet-preferred-address-types=InternalIP",
        ]

    def _client_of_api(
        self, authority: Authority, component: str, port: int, private_key: Path
    ) -> list[str]:
        user = f"system:{component}"
        certificate, key = authority.client(user)
        kubeconfig = self.directory / f"{component}.kubeconfig"
        _write_config(
            kubeconfig,
            self.info,
            {user: {"client-certificate": str(certificate), "client-key": str(key)}},
        )
        command = [
            f"{self.info.binaries}/{component}",
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            "--leader-elect=false",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            "--profiling=false",
        ]
        if component == CONTROLLER_MANAGER:
            command += [
                f"--controllers={self._controllers}",
                "--use-service-account-credentials=true",
                f"--service-account-private-key-file={private_key}",
                f"--root-ca-file={authority.path}",
                # Discovery of new custom kinds must not lag behind the tests.
                "--concurrent-gc-syncs=4",
            ]
        return command

    def _write_kubeconfig(self, authority: Authority) -> None:
        users: dict[str, dict[str, str]] = {
            name: {"token": token} for name, token in TOKENS.items()
        }
        certificate, key = authority.client("certificate", "system:masters")
        users["certificate"] = {"client-certificate": str(certificate), "client-key": str(key)}
        _write_config(Path(self.info.kubeconfig), self.info, users, {"tenant": TENANT_NAMESPACE})

    def _grant_access(self) -> None:
        for path, body in access_rules():
            try:
                self.info.request("POST", path, body)
            except RefusedError as error:
                if error.code != 409:
                    raise ClusterError(f"{path}: {error}") from error
        # RBAC rules take effect when the server's watch has delivered them.
        self._wait_for("/api/v1/secrets?limit=1", 403, user="reader")
        own = f"/api/v1/namespaces/{TENANT_NAMESPACE}/secrets?limit=1"
        self._wait_for(own, 403, user="tenant")

    def _wait_for_service_account(self) -> None:
        """Wait for the default service account: pods are rejected before it exists."""
        if CONTROLLER_MANAGER in self._components:
            self._wait_for("/api/v1/namespaces/default/serviceaccounts/default", 404)

    def _wait_for(self, path: str, refusal: int, *, user: str = "admin") -> None:
        """Wait until a path can be read that first returns this code."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            self._fail_if_dead()
            try:
                self.info.request("GET", path, user=user)
            except RefusedError as error:
                if error.code != refusal or time.monotonic() > deadline:
                    raise ClusterError(f"no {path}: {error}" + self._log_tails()) from error
                time.sleep(0.05)
            else:
                return


def compact_etcd(info: ClusterInfo) -> None:
    """Compact the etcd of a cluster up to its current revision."""

    def call(path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            info.etcd + path, data=json.dumps(body).encode(), method="POST"
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    key = base64.b64encode(b"/registry/").decode()
    revision = call("/v3/kv/range", {"key": key, "count_only": True})["header"]["revision"]
    call("/v3/kv/compaction", {"revision": revision, "physical": True})


def _write_config(
    path: Path,
    info: ClusterInfo,
    users: dict[str, dict[str, str]],
    namespaces: dict[str, str] | None = None,
) -> None:
    """Write a kubeconfig with one context per user; JSON is YAML too."""
    contexts = []
    for name in users:
        context = {"cluster": "test", "user": name}
        if namespace := (namespaces or {}).get(name):
            context["namespace"] = namespace
        contexts.append({"name": name, "context": context})
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "test",
                "cluster": {"server": info.server, "certificate-authority": info.ca_file},
            }
        ],
        "users": [{"name": name, "user": user} for name, user in users.items()],
        "contexts": contexts,
        "current-context": next(iter(users)),
    }
    path.write_text(json.dumps(config, indent=1))
    path.chmod(0o600)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a cluster until interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.control_plane", description=__doc__
    )
    parser.add_argument("--minimal", action="store_true", help="etcd and API server only")
    parser.add_argument("--scheduler", action="store_true", help="with a scheduler as well")
    parser.add_argument("--fsync", action="store_true", help="etcd syncs every write to disk")
    parser.add_argument("--json", action="store_true", help="print one line of JSON when ready")
    options = parser.parse_args(arguments)
    components = [] if options.minimal else [CONTROLLER_MANAGER]
    components += [SCHEDULER] if options.scheduler else []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with KubeCluster(components=components, fsync=options.fsync) as cluster:
            if options.json:
                print(json.dumps(asdict(cluster.info)), flush=True)
            else:
                print(f"export KUBECONFIG={cluster.info.kubeconfig}")
                print(f"alias kubectl={cluster.info.kubectl}")
                print(f"# contexts: {' '.join(TOKENS)}; Ctrl-C stops the cluster", flush=True)
            signal.pause()
    except KeyboardInterrupt:
        return 0
    except (BinariesMissingError, ClusterError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
