"""How a gateway follows the control plane of its machine."""

from paddock.api.kube.settings import KubeApiSettings
from paddock.app.roles import gateway
from paddock.settings import Settings
from paddock.store.kubernetes.backend import KubernetesStore


async def test_a_control_plane_that_has_nothing_to_say_is_not_taken_for_dead() -> None:
    store = await gateway._open_store(Settings(), "http://127.0.0.1:1", "token")
    try:
        assert isinstance(store, KubernetesStore)
        patience = store.client.settings.watch_silence_seconds
        assert patience > KubeApiSettings().bookmark_seconds * 1.5
    finally:
        await store.close()
