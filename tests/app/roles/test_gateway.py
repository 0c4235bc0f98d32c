"""The watch of a gateway on the control plane of its machine."""

from paddock.api.kube.settings import KubeApiSettings
from paddock.app.roles import gateway
from paddock.settings import Settings
from paddock.store.kubernetes.backend import KubernetesStore


async def test_an_idle_watch_is_not_mistaken_for_a_dead_control_plane() -> None:
    store = await gateway._open_store(Settings(), "http://127.0.0.1:1", "token")
    try:
        assert isinstance(store, KubernetesStore)
        silence = store.client.settings.watch_silence_seconds
        assert silence > KubeApiSettings().bookmark_seconds * 1.5
    finally:
        await store.close()
