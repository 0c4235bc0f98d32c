"""The admission webhook, called by a real API server."""

import asyncio
import base64
import json
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from paddock.app.wiring.tls import webhook
from paddock.cli.kube.manifests import manifests
from paddock.cli.kube.options import KubeOptions
from paddock.resources import codec
from paddock.resources.kinds.sandbox import Sandbox, SandboxSpec
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.meta import ObjectMeta
from paddock.resources.tokens import TokenSeed
from paddock.runtime.blueprint import blueprint
from paddock.runtime.kubernetes.pods.render import PodSettings, claim_names, render
from paddock.settings import Settings
from tests.cluster.certificates import Authority
from tests.cluster.info import ClusterInfo, RefusedError
from tests.newcomer.blocks import blocks
from tests.ports import free_ports

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
LONGEST_SECONDS = 30
"""Timeout of the API server for the webhook."""
OWN = "system:serviceaccount:paddock-system:paddock-controllers"


class World:
    """A namespace whose objects are all sent to the webhook."""

    def __init__(self, info: ClusterInfo, namespace: str) -> None:
        self._info = info
        self.namespace = namespace

    def _path(self, kind: str, name: str = "") -> str:
        plural = {"Sandbox": "sandboxes"}.get(kind, kind.lower() + "s")
        return f"/apis/paddock.dev/v1alpha1/namespaces/{self.namespace}/{plural}" + name

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        return await asyncio.to_thread(self._info.request, method, path, body)

    async def create(self, kind: str, name: str, spec: Any) -> Any:
        body = {
            "apiVersion": "paddock.dev/v1alpha1",
            "kind": kind,
            "metadata": {"name": name},
            "spec": spec,
        }
        return await self.ask("POST", self._path(kind), body)

    async def replace(self, obj: Any) -> Any:
        path = self._path(obj["kind"], f"/{obj['metadata']['name']}")
        return await self.ask("PUT", path, obj)

    async def apply(self, obj: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [self._info.kubectl, f"--kubeconfig={self._info.kubeconfig}"]
        command += ["-n", self.namespace, "apply", *arguments, "-f", "-"]
        return await asyncio.to_thread(
            subprocess.run,
            command,
            input=json.dumps(obj),
            capture_output=True,
            text=True,
            check=False,
        )


@pytest_asyncio.fixture
async def world(
    kube_cluster: ClusterInfo, kube_namespace: str, tmp_path: Path
) -> AsyncGenerator[World]:
    authority = Authority(tmp_path)
    certificate, key = authority.server("webhook")
    port = free_ports(1)[0]
    settings = Settings(
        webhook_certificate=str(certificate), webhook_key=str(key), webhook_port=port
    )
    bundle = base64.b64encode(Path(authority.path).read_bytes()).decode()
    options = KubeOptions(has_webhook=True, ca_bundle=bundle)
    made = next(
        item for item in manifests(options) if item["kind"] == "ValidatingWebhookConfiguration"
    )
    made["metadata"]["name"] = kube_namespace
    hook = made["webhooks"][0]
    # Services are not routed here; and the webhook must not affect other tests.
    hook["clientConfig"] = {"url": f"https://127.0.0.1:{port}/validate", "caBundle": bundle}
    there = {"kubernetes.io/metadata.name": kube_namespace}
    hook["namespaceSelector"] = {"matchLabels": there}
    # The longest timeout: on a slow machine an object would be accepted unchecked.
    hook["timeoutSeconds"] = LONGEST_SECONDS
    world = World(kube_cluster, kube_namespace)
    async with webhook.serving(settings):
        await world.ask("POST", CONFIGURATIONS, made)
        try:
            await _until_asked(world)
            yield world
        finally:
            await world.ask("DELETE", f"{CONFIGURATIONS}/{kube_namespace}")


async def _until_asked(world: World) -> None:
    """Wait until the API server uses the new configuration."""
    async with asyncio.timeout(60):
        while True:
            try:
                await world.create("SandboxTemplate", "probe", HOST_PATH)
            except RefusedError:
                return
            path = f"/apis/paddock.dev/v1alpha1/namespaces/{world.namespace}/sandboxtemplates/probe"
            await world.ask("DELETE", path)
            await asyncio.sleep(0.1)


async def _until_allowed(world: World) -> None:
    """Wait until the RBAC rules have taken effect."""
    asked = {"verb": "create", "group": "paddock.dev", "resource": "sandboxtemplates"}
    attributes = {**asked, "namespace": world.namespace}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": OWN, "resourceAttributes": attributes},
    }
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    async with asyncio.timeout(60):
        while not (await world.ask("POST", path, review))["status"]["allowed"]:
            await asyncio.sleep(0.05)


HOST_PATH: dict[str, Any] = {
    "image": "i",
    "podTemplate": {"spec": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}},
}
NAMES_A_HOST = {"allowInternetAccess": False, "allowOut": ["example.com"]}


async def test_errors_beyond_the_schema_are_rejected(world: World) -> None:
    for spec, said in (
        ({"image": "i", "env": {"1=x": "y"}}, "spec.env"),
        ({"image": "i", "network": {"denyOut": ["nowhere"]}}, "spec.network.denyOut[0]"),
        (HOST_PATH, "spec.podTemplate.spec.volumes[0].hostPath: gives access to the node"),
        ({"image": "i", "network": NAMES_A_HOST}, "NetworkPolicies support addresses only"),
    ):
        with pytest.raises(RefusedError) as refused:
            await world.create("SandboxTemplate", "t", spec)
        assert refused.value.code == 422
        assert said in str(refused.value)
        assert "validate.paddock.dev" in str(refused.value)
    # An inline template is checked too, with its own field path.
    with pytest.raises(RefusedError, match=r"spec\.template\.podTemplate"):
        await world.create("SandboxPool", "p", {"replicas": 0, "template": HOST_PATH})


async def test_valid_objects_are_accepted_and_invalid_updates_rejected(world: World) -> None:
    made = await world.create("SandboxTemplate", "good", {"image": "i"})
    made["spec"]["env"] = {"COLOUR": "green"}
    changed = await world.replace(made)
    changed["spec"]["env"] = {"1=x": "y"}
    with pytest.raises(RefusedError, match=r"spec\.env"):
        await world.replace(changed)
    listed = f"/apis/paddock.dev/v1alpha1/namespaces/{world.namespace}/sandboxtemplates"
    found = await world.ask("GET", f"{listed}/good")
    assert found["spec"]["env"] == {"COLOUR": "green"}
    await world.ask("DELETE", f"{listed}/good")
    assert not (await world.ask("GET", listed))["items"]


async def test_an_unsupported_pause_strategy_is_refused(world: World) -> None:
    template = {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "SandboxTemplate",
        "metadata": {"name": "sleepy"},
        "spec": {"image": "i", "pauseStrategy": "Hibernate"},
    }
    done = await world.apply(template)
    assert done.returncode != 0
    assert "spec.pauseStrategy: pods cannot store their memory; use Freeze" in done.stderr


async def test_the_template_of_the_guide_is_accepted_and_its_pod_is_as_it_says(
    world: World,
) -> None:
    [text] = [
        block.text for block in blocks("docs/how-to/kubernetes.md") if block.language == "yaml"
    ]
    page = yaml.safe_load(text)
    done = await world.apply(page)
    assert done.returncode == 0, done.stderr
    path = f"/apis/paddock.dev/v1alpha1/namespaces/{world.namespace}/sandboxtemplates/python"
    stored = codec.from_builtins(SandboxTemplate, await world.ask("GET", path))
    sandbox = Sandbox(
        metadata=ObjectMeta(name="box", namespace=world.namespace, uid="u1"),
        spec=SandboxSpec(template=stored.spec),
    )
    wanted = blueprint(sandbox, stored.spec, TokenSeed(b"seed"), checkpoint_id=None)
    pod = render(wanted, PodSettings(agent_image="paddock"), control_hash="").spec
    given = page["spec"]["podTemplate"]["spec"]
    assert {name: pod[name] for name in given} == given
    main = next(item for item in pod["containers"] if item["name"] == "sandbox")
    assert main["image"] == "python:3.13"
    assert [claim.removesuffix("-box") for claim in claim_names(wanted).values()] == ["home"]


async def test_writes_of_paddock_are_not_sent_to_the_webhook(world: World) -> None:
    """They are validated before they are sent; a claim does not wait for the webhook."""
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "own"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "cluster-admin",
        },
        "subjects": [
            {"kind": "ServiceAccount", "name": "paddock-controllers", "namespace": "paddock-system"}
        ],
    }
    bindings = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{world.namespace}/rolebindings"
    await world.ask("POST", bindings, role)
    await _until_allowed(world)
    template = {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "SandboxTemplate",
        "metadata": {"name": "own"},
        "spec": HOST_PATH,
    }
    refused = await world.apply(template)
    assert "gives access to the node" in refused.stderr
    allowed = await world.apply(template, f"--as={OWN}")
    assert allowed.returncode == 0, allowed.stderr


async def test_objects_are_accepted_while_no_webhook_answers(world: World) -> None:
    path = f"{CONFIGURATIONS}/{world.namespace}"
    configuration = await world.ask("GET", path)
    unused = free_ports(1)[0]
    configuration["webhooks"][0]["clientConfig"]["url"] = f"https://127.0.0.1:{unused}/validate"
    await world.ask("PUT", path, configuration)
    async with asyncio.timeout(60):
        while True:
            try:
                await world.create("SandboxTemplate", "later", HOST_PATH)
            except RefusedError:
                await asyncio.sleep(0.1)
            else:
                break
