"""Network policies of templates with unmodified SDKs, which send defaults of their own."""

import json
import subprocess

import httpx
import pytest

from tests.installation import Installation
from tests.sdk.clients import LEAVING, NEWEST, OLDER, SCRIPTS, python_of

pytestmark = [pytest.mark.sdk, pytest.mark.sandbox, pytest.mark.timeout(480)]

TEMPLATE = {
    "apiVersion": "paddock.dev/v1alpha1",
    "kind": "SandboxTemplate",
    "metadata": {"name": "closed", "namespace": "default"},
    "spec": {"network": {"allowInternetAccess": False, "allowPublicTraffic": False}},
}


@pytest.mark.parametrize("version", [NEWEST, OLDER])
def test_a_client_gets_the_policy_of_the_template_and_cannot_open_it(
    installation: Installation, environment: dict[str, str], version: str
) -> None:
    path = f"{installation.url}/apis/paddock.dev/v1alpha1/namespaces/default/sandboxtemplates"
    token = {"Authorization": f"Bearer {installation.secrets.token}"}
    assert httpx.post(path, json=TEMPLATE, headers=token).status_code in (201, 409)
    admin = {"X-API-Key": installation.secrets.api_key}
    body = {"name": "member", "teamName": "research"}
    key = httpx.post(f"{installation.url}/api-keys", json=body, headers=admin).json()["key"]
    done = subprocess.run(
        [python_of(version), LEAVING, SCRIPTS / "network_policy.py"],
        env=environment | {"E2B_API_KEY": key},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert "network.allowOut[0]" in facts.pop("allow_out")
    assert "network.allowPublicTraffic" in facts.pop("public")
    assert {"default", "explicit default"} <= facts.keys()
    for found in facts.values():
        assert found["egress"].endswith("Connection refused")
        assert found["has_token"]
