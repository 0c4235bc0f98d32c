"""User namespaces that only carry an id map."""

import os
import threading
from collections.abc import Iterator

import pytest

from paddock.runtime.local.checkpoint.idmap import IdNamespaces

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

BASE, COUNT = 1 << 24, 65536


@pytest.fixture
def namespaces() -> Iterator[IdNamespaces]:
    made = IdNamespaces()
    yield made
    made.close()


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Threads that often hold locks of the interpreter and of the allocator."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            _ = [bytes(size) for size in range(500)]

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    yield
    over.set()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("busy_threads")
def test_locks_of_other_threads_do_not_block_creation(namespaces: IdNamespaces):
    found = {os.fstat(namespaces.get(BASE + at * COUNT, COUNT)).st_ino for at in range(16)}
    assert len(found) == 16


def test_each_namespace_is_created_once(namespaces: IdNamespaces):
    assert namespaces.get(BASE, COUNT) == namespaces.get(BASE, COUNT)
