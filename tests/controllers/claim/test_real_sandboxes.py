"""A SandboxClaim with another size on one machine: its sandboxes have that size."""

import os
from typing import Any

import pytest

from tests.installation import Installation
from tests.runtime.local.nodes import eventually

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(300)]

CLAIMS = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxclaims"
PATIENCE_SECONDS = 150


def claim(name: str, **spec: Any) -> dict[str, Any]:
    slow = {"claimTimeoutSeconds": 120, "waitReadyTimeoutSeconds": 100}
    return {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "SandboxClaim",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"templateName": "base", **slow, **spec},
    }


async def ended(place: Installation, name: str) -> dict[str, Any]:
    async def is_final() -> bool:
        found = await place.kube("GET", f"{CLAIMS}/{name}")
        return found.get("status", {}).get("phase") in ("Completed", "Failed")

    await eventually(is_final, seconds=PATIENCE_SECONDS)
    return (await place.kube("GET", f"{CLAIMS}/{name}"))["status"]


async def test_sandboxes_of_a_claim_have_the_requested_size() -> None:
    if os.geteuid() != 0:
        pytest.skip("real sandboxes need root")
    small = {"resources": {"cpu": "500m", "memory": "128Mi"}}
    async with Installation(pool_size=1) as place:
        await place.kube("POST", CLAIMS, claim("small", replicas=2, inplaceUpdate=small))
        status = await ended(place, "small")
        assert status["phase"] == "Completed"

        assert status["claimedReplicas"] == 2, status
        reasons = {item["type"]: item["reason"] for item in status["conditions"]}
        assert reasons == {"Completed": "AllReplicasClaimed", "InplaceUpdate": "CreatedNew"}
        for box in status["sandboxes"]:
            path = f"/sandboxes/{box['sandboxId']}"

            async def measured(path: str = path) -> bool:
                return bool(await place.api("GET", f"{path}/metrics"))

            await eventually(measured, seconds=PATIENCE_SECONDS)
            sample = (await place.api("GET", f"{path}/metrics"))[-1]
            assert (sample["memTotal"], sample["cpuCount"]) == (128 << 20, 1)

        only_stock = claim("stock", createOnNoStock=False, inplaceUpdate=small)
        await place.kube("POST", CLAIMS, only_stock)
        refused = await ended(place, "stock")
        assert refused["phase"] == "Failed"
        assert refused.get("claimedReplicas", 0) == 0
        assert "this runtime cannot give a warm sandbox that size" in refused["message"]
