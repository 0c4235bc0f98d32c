"""Stock kubectl against the API: common commands on the shipped examples."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from msgspec import structs

from paddock.api.kube.settings import KubeApiSettings
from paddock.app.wiring.tls.own_certificate import OwnCertificate
from paddock.cli.kube.kubeconfig import render
from paddock.kit.clock import system
from paddock.resources.kinds.builtin import Event, ObjectReference
from paddock.resources.kinds.sandbox import Phase, Sandbox, SandboxStatus
from paddock.resources.meta import (
    Condition,
    ConditionStatus,
    Key,
    ObjectMeta,
    with_meta,
)
from tests.api.kube.kubectl import Kubectl, binaries
from tests.api.kube.server import Server, serving

EXAMPLES = Path(__file__).parents[3] / "examples"
pytestmark = pytest.mark.timeout(120)


def _label(path: Path | None) -> str:
    return "none" if path is None else path.parts[-2].replace("bin", "distribution")


TOKEN = "open-sesame"


@pytest.fixture(scope="module")
def shared_server(own_certificate: OwnCertificate) -> Iterator[Server]:
    with serving(KubeApiSettings(tokens=(TOKEN,)), **served_with(own_certificate)) as server:
        yield server


@pytest.fixture(scope="module")
def own_certificate(tmp_path_factory: pytest.TempPathFactory) -> OwnCertificate:
    directory = tmp_path_factory.mktemp("certificate")
    found = OwnCertificate(directory, ("127.0.0.1", "localhost"), system())
    found.ensure()
    return found


def served_with(certificate: OwnCertificate) -> dict[str, str]:
    return {
        "ssl_certfile": str(certificate.certificate_file),
        "ssl_keyfile": str(certificate.key_file),
    }


@pytest.fixture(params=binaries() or [None], ids=_label)
def binary(request: pytest.FixtureRequest) -> Path:
    if request.param is None:
        pytest.skip("there is no kubectl here: scripts/fetch-kubectl gets one")
    return request.param


@pytest.fixture
def kubectl(
    binary: Path, shared_server: Server, own_certificate: OwnCertificate, tmp_path: Path
) -> Kubectl:
    """A kubectl in the test's own namespace, with the kubeconfig that users get."""
    authority = own_certificate.authority_file.read_bytes()
    config = render(shared_server.url, authority, TOKEN)
    namespace = f"n{tmp_path.name[-12:]}"
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    Kubectl(binary, tmp_path)("create", "namespace", namespace)
    return Kubectl(binary, tmp_path, None, "-n", namespace)


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kubectl")


def test_the_examples_can_be_applied_listed_described_and_deleted(kubectl: Kubectl):
    created = kubectl("apply", "-f", str(EXAMPLES))
    assert created.count("created") == 12
    assert kubectl("apply", "-f", str(EXAMPLES)).count("unchanged") == 12

    shown = kubectl("get", "sandboxpool")
    assert shown.splitlines()[0].split() == [
        "NAME", "DESIRED", "AVAILABLE", "CREATING", "ALLOCATED", "AGE",
    ]  # fmt: skip
    assert [line.split()[0] for line in shown.splitlines()[1:]] == ["hello", "python"]
    assert "scratch" in kubectl("get", "sbx", "-o", "wide")
    assert kubectl("get", "paddock", "-o", "name").count("\n") == 12

    described = kubectl("describe", "sbp", "python")
    assert "Buffer Min:" in described
    assert "Events:" in described

    assert kubectl("delete", "-f", str(EXAMPLES)).count("deleted") == 12
    assert kubectl("get", "paddock", "-o", "name") == ""


def test_the_category_all_contains_workloads_only(kubectl: Kubectl):
    kubectl("apply", "-f", str(EXAMPLES))
    kinds = {line.partition(".")[0] for line in kubectl("get", "all", "-o", "name").splitlines()}
    assert kinds == {"sandbox", "sandboxpool", "sandboxclaim", "batchsandbox", "sandboxenv"}
    kubectl("delete", "all", "--all")
    left = {line.partition(".")[0] for line in kubectl("get", "paddock", "-o", "name").splitlines()}
    assert left == {"sandboxtemplate", "checkpoint", "templatebuild"}


def test_authenticated_callers_may_do_everything(kubectl: Kubectl):
    assert kubectl("auth", "can-i", "delete", "sandboxes").strip() == "yes"
    assert "*.*" in kubectl("auth", "can-i", "--list")
    who = kubectl.run("auth", "whoami")  # younger than the oldest kubectl
    assert "paddock:operator" in who.out or "unknown command" in who.err


def test_server_side_apply_by_two_managers(kubectl: Kubectl):
    file = str(EXAMPLES / "sandboxpool.yaml")
    assert "serverside-applied" in kubectl("apply", "--server-side", "-f", file)
    before = kubectl("get", "sbp", "python", "-o", "jsonpath={.metadata.resourceVersion}")
    kubectl("apply", "--server-side", "-f", file)
    after = kubectl("get", "sbp", "python", "-o", "jsonpath={.metadata.resourceVersion}")
    assert before == after

    changed = (EXAMPLES / "sandboxpool.yaml").read_text().replace("poolMax: 40", "poolMax: 41")
    arguments = ("apply", "--server-side", "--field-manager=other", "-f", "-")
    refused = kubectl.run(*arguments, stdin=changed)
    assert refused.code != 0
    assert "conflict" in refused.err
    kubectl(*arguments, "--force-conflicts", stdin=changed)
    assert kubectl("get", "sbp", "python", "-o", "jsonpath={.spec.capacity.poolMax}") == "41"


def test_objects_can_be_changed_by_every_kubectl_command(kubectl: Kubectl):
    kubectl("apply", "-f", str(EXAMPLES / "quickstart.yaml"))

    def replicas() -> str:
        return kubectl("get", "sbp", "hello", "-o", "jsonpath={.spec.replicas}")

    kubectl("patch", "sbp", "hello", "--type=merge", "-p", '{"spec":{"replicas":3}}')
    assert replicas() == "3"
    operation = [{"op": "replace", "path": "/spec/replicas", "value": 4}]
    kubectl("patch", "sbp", "hello", "--type=json", "-p", json.dumps(operation))
    assert replicas() == "4"
    kubectl("scale", "sbp", "hello", "--replicas=5")
    assert replicas() == "5"
    kubectl("edit", "sbp", "hello", KUBE_EDITOR="sed -i 's/replicas: 5/replicas: 6/'")
    assert replicas() == "6"
    text = (EXAMPLES / "quickstart.yaml").read_text().replace("replicas: 2", "replicas: 7")
    assert "configured" in kubectl("apply", "-f", "-", stdin=text)
    assert replicas() == "7"
    kubectl("replace", "-f", "-", stdin=text.replace("replicas: 7", "replicas: 8"))
    assert replicas() == "8"

    kubectl("label", "sbp", "hello", "team=blue")
    kubectl("annotate", "sbp", "hello", "note=here")
    assert kubectl("get", "sbp", "-l", "team=blue", "-o", "name").strip().endswith("/hello")
    assert kubectl("get", "sbp", "-l", "team=red", "-o", "name") == ""


def test_validation_errors_name_the_field(kubectl: Kubectl):
    kubectl("apply", "-f", str(EXAMPLES / "quickstart.yaml"))
    refused = kubectl.run("patch", "sbp", "hello", "--type=merge", "-p", '{"spec":{"replicas":-1}}')
    assert refused.code != 0
    assert 'The SandboxPool "hello" is invalid: spec.replicas' in refused.err
    text = (EXAMPLES / "sandbox.yaml").read_text().replace("afterSeconds", "afterSecs")
    refused = kubectl.run("apply", "-f", "-", stdin=text)
    assert refused.code != 0
    assert "unknown field" in refused.err
    assert "afterSecs" in refused.err
    assert kubectl("get", "sbx", "-o", "name") == ""


def test_a_dry_run_and_a_diff_change_nothing(kubectl: Kubectl):
    file = str(EXAMPLES / "sandbox.yaml")
    assert "server dry run" in kubectl("apply", "--dry-run=server", "-f", file)
    assert kubectl("get", "sbx", "-o", "name") == ""
    kubectl("apply", "-f", file)
    assert kubectl.run("diff", "-f", file).code == 0
    changed = (EXAMPLES / "sandbox.yaml").read_text().replace("600", "700")
    difference = kubectl.run("diff", "-f", "-", stdin=changed)
    assert difference.code == 1
    assert "+    afterSeconds: 700" in difference.out


def test_explain_shows_the_docstrings_of_fields(kubectl: Kubectl):
    assert "Time at which the sandbox shuts down" in kubectl("explain", "sandbox.spec.shutdownTime")
    text = kubectl("explain", "sandboxpool.spec", "--recursive")
    assert "bufferMin" in text
    assert "maxUnavailable" in text
    assert "namespace" in kubectl("explain", "sandboxes.metadata")


def test_a_watch_prints_changes(kubectl: Kubectl):
    kubectl("apply", "-f", str(EXAMPLES / "quickstart.yaml"))
    with kubectl.running("get", "sbp", "--watch") as watch:
        assert watch.stdout is not None
        assert watch.stdout.readline().startswith("NAME")
        assert watch.stdout.readline().startswith("hello")
        kubectl("apply", "-f", str(EXAMPLES / "sandboxpool.yaml"))
        assert watch.stdout.readline().startswith("python")
        kubectl("delete", "sbp", "hello")
        assert watch.stdout.readline().startswith("hello")


def test_waiting_ends_when_a_condition_holds_and_events_are_shown(
    kubectl: Kubectl, shared_server: Server, tmp_path: Path
):
    kubectl("apply", "-f", str(EXAMPLES / "sandbox.yaml"))
    namespace = f"n{tmp_path.name[-12:]}"

    async def happen() -> None:
        store = shared_server.store
        box = await store.get(Sandbox, Key(namespace, "scratch"))
        await store.update_status(structs.replace(box, status=SandboxStatus(phase=Phase.RUNNING)))
        meta = box.metadata
        subject = ObjectReference(
            api_version=box.API_VERSION, kind="Sandbox", namespace=namespace,
            name="scratch", uid=meta.uid,
        )  # fmt: skip
        await store.create(
            Event(
                metadata=ObjectMeta(name="scratch.1", namespace=namespace),
                involved_object=subject,
                reason="Started",
                message="it runs",
                first_timestamp=meta.creation_timestamp,
                last_timestamp=meta.creation_timestamp,
            )
        )

    shared_server.do(happen())
    assert "Running" in kubectl("get", "sbx", "scratch")
    assert "it runs" in kubectl("describe", "sbx", "scratch")
    listed = kubectl("get", "events")
    assert "sandbox/scratch" in listed
    assert "Started" in listed
    path = f"/apis/paddock.dev/v1alpha1/namespaces/{namespace}/sandboxes/scratch"
    assert json.loads(kubectl("get", "--raw", path))["status"]["phase"] == "Running"

    async def become_ready() -> None:
        store = shared_server.store
        box = await store.get(Sandbox, Key(namespace, "scratch"))
        condition = Condition(type="Ready", status=ConditionStatus.TRUE, reason="Started")
        ready = structs.replace(box.status, conditions=(condition,))
        await store.update_status(structs.replace(box, status=ready))

    with kubectl.running("wait", "--for=condition=Ready", "sbx/scratch", "--timeout=30s") as wait:
        shared_server.do(become_ready())
        assert wait.stdout is not None
        assert "condition met" in wait.stdout.read()
        assert wait.wait() == 0


def test_deleting_a_namespace_deletes_its_contents(
    kubectl: Kubectl, shared_server: Server, tmp_path: Path
):
    kubectl("apply", "-f", str(EXAMPLES))
    namespace = f"n{tmp_path.name[-12:]}"

    async def hold() -> None:
        box = await shared_server.store.get(Sandbox, Key(namespace, "scratch"))
        await shared_server.store.update(with_meta(box, finalizers=("example.com/hold",)))

    async def let_go() -> None:
        box = await shared_server.store.get(Sandbox, Key(namespace, "scratch"))
        await shared_server.store.update(with_meta(box, finalizers=()))

    shared_server.do(hold())
    kubectl("delete", "namespace", namespace, "--wait=false")
    assert "Terminating" in kubectl("get", "namespace", namespace)
    refused = kubectl.run("apply", "-f", str(EXAMPLES / "sandboxclaim.yaml"))
    assert refused.code != 0
    shared_server.do(let_go())
    deadline = time.monotonic() + 30
    while kubectl("get", "namespace", namespace, "--ignore-not-found"):
        assert time.monotonic() < deadline, "the namespace stays though nothing is in it"
    assert kubectl("get", "paddock", "-o", "name") == ""


def test_a_builtin_namespace_is_not_changed(kubectl: Kubectl):
    before = kubectl("get", "namespace", "default", "-o", "json")
    refused = kubectl.run("delete", "namespace", "default")
    assert refused.code != 0
    assert "always exists" in refused.err
    assert kubectl("get", "namespace", "default", "-o", "json") == before


def test_secrets_and_namespaces_can_be_created_by_command(kubectl: Kubectl):
    kubectl("create", "secret", "generic", "key", "--from-literal=a=b")
    assert kubectl("get", "secret", "key", "-o", "jsonpath={.data.a}{.type}") == "Yg==Opaque"
    kubectl("delete", "secret", "key")
    assert "already exists" in kubectl.run("create", "namespace", "default").err


def test_kubectl_can_read_all_of_discovery(kubectl: Kubectl):
    listed = kubectl("api-resources", "--api-group=paddock.dev", "-o", "name").split()
    assert len(listed) == 8
    assert "paddock.dev/v1alpha1" in kubectl("api-versions")
    assert "paddock" in kubectl("version", "-o", "json")


def test_large_lists_are_chunked(kubectl: Kubectl):
    template = (EXAMPLES / "sandbox.yaml").read_text()
    many = "---\n".join(template.replace("scratch", f"box-{index:02}") for index in range(12))
    kubectl("create", "-f", "-", stdin=many)
    names = kubectl("get", "sbx", "--chunk-size=5", "-o", "name").split()
    assert len(names) == 12
    assert names == sorted(names)
    kubectl("delete", "sbx", "--all")
    assert kubectl("get", "sbx", "-o", "name") == ""


def test_a_wrong_token_is_refused(
    binary: Path, shared_server: Server, own_certificate: OwnCertificate, tmp_path: Path
):
    trusted = f"--certificate-authority={own_certificate.authority_file}"
    refused = Kubectl(binary, tmp_path, shared_server.url, trusted, "--token=wrong").run(
        "get", "sbx"
    )
    assert refused.code != 0
    assert "Unauthorized" in refused.err or "logged in" in refused.err
