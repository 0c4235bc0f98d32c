"""How a gateway follows the control plane of its machine."""

from paddock.app import gateway
from paddock.kit.settings import Settings
from paddock.store.kubernetes.backend import KubernetesStore
from paddock.store.kubernetes.watching import LIFETIME_SECONDS


async def test_a_control_plane_that_has_nothing_to_say_is_not_taken_for_dead() -> None:
    store = await gateway._open_store(Settings(), "http://127.0.0.1:1", "token")
    try:
        assert isinstance(store, KubernetesStore)
        assert store.client.settings.watch_silence_seconds > max(LIFETIME_SECONDS)
    finally:
        await store.close()
