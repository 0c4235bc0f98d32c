"""User namespaces that only carry a map: made in a process with threads, and kept by a file."""

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
    """Threads that hold locks of the interpreter and of the allocator at any moment."""
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
def test_no_lock_of_another_thread_holds_one_up(namespaces: IdNamespaces):
    found = {os.fstat(namespaces.get(BASE + at * COUNT, COUNT)).st_ino for at in range(16)}
    assert len(found) == 16


def test_each_is_made_once(namespaces: IdNamespaces):
    assert namespaces.get(BASE, COUNT) == namespaces.get(BASE, COUNT)
