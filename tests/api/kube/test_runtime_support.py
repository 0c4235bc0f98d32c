"""The declarative API refuses what the runtime cannot do, by every verb that writes."""

import httpx
import pytest
import yaml

from paddock.api.kube.app import create_app
from paddock.api.kube.settings import KubeApiSettings
from paddock.kit.clock import LoopClock
from paddock.resources.kinds.builtin import Namespace
from paddock.resources.meta import ObjectMeta
from paddock.runtime.support import LOCAL, support_check
from paddock.store.memory import MemoryStore

pytestmark = pytest.mark.looptime

PATH = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxtemplates"
VOLUMES = [{"name": "v", "mountPath": "/v", "claimName": "data"}]


def template(**spec: object) -> dict[str, object]:
    return {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "SandboxTemplate",
        "metadata": {"name": "t"},
        "spec": spec,
    }


async def test_create_update_patch_and_apply_are_refused() -> None:
    store = MemoryStore(clock=LoopClock())
    await store.create(Namespace(metadata=ObjectMeta(name="default")))
    app = create_app(store, KubeApiSettings(tokens=("t",)), checks=[support_check(LOCAL)])
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://api",
        headers={"authorization": "Bearer t"},
    ) as client:

        async def write(method: str, path: str, body: object, kind: str = "json") -> httpx.Response:
            return await client.request(
                method,
                path,
                content=yaml.safe_dump(body) if "yaml" in kind else None,
                json=None if "yaml" in kind else body,
                headers={"content-type": f"application/{kind}"},
            )

        def refused(response: httpx.Response) -> None:
            assert response.status_code == 422, response.text
            message = response.json()["message"]
            assert "spec.volumes[0].claimName: one machine has no volume claims" in message
            assert "hostPath" in message

        bad = template(volumes=VOLUMES)
        applied = f"{PATH}/t?fieldManager=m"
        refused(await write("POST", PATH, bad))
        refused(await write("POST", f"{PATH}?dryRun=All", bad))
        refused(await write("PATCH", applied, bad, "apply-patch+yaml"))
        assert (await client.get(f"{PATH}/t")).status_code == 404

        assert (await write("POST", PATH, template(user="root"))).status_code == 201
        refused(await write("PUT", f"{PATH}/t", bad))
        refused(
            await write("PATCH", f"{PATH}/t", {"spec": {"volumes": VOLUMES}}, "merge-patch+json")
        )
        refused(await write("PATCH", applied, bad, "apply-patch+yaml"))
        kept = (await client.get(f"{PATH}/t")).json()["spec"]
        assert "volumes" not in kept
        assert kept["user"] == "root"
