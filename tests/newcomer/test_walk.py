"""README and every how-to guide do what they say, in order, on one new installation."""

import os
import time
from collections.abc import Generator

import pytest

from tests.newcomer.blocks import LAST, Block, blocks, pages
from tests.newcomer.walk import Walk

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.sdk,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes with checkpoints need root"),
]


@pytest.fixture(scope="module")
def walk() -> Generator[Walk]:
    made = Walk()
    try:
        yield made
    finally:
        made.remove()


def steps(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.skip is None]


# One test: each page needs the installation, the variables and the files of the pages before it.
def test_a_new_user_can_follow_every_page(walk: Walk) -> None:
    walk.provide_image("tools.tar")
    for page in pages():
        began = time.monotonic()
        if page == LAST:
            walk.interrupt()
        for block in steps(page):
            try:
                walk.run(block)
            except AssertionError as error:
                raise AssertionError(f"{block.place}: {error}") from error
        print(f"{time.monotonic() - began:6.1f} s  {page}")
