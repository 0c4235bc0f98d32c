"""Pages of a sorted list: order, tokens, and changes between two pages."""

from datetime import UTC, datetime, timedelta

import pytest

from paddock.kit.errors import InvalidError
from paddock.manager.sandboxes import paging

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(second: int, name: str) -> tuple[paging.Position, str]:
    return (START + timedelta(seconds=second), name), name


ITEMS = [at(2, "c"), at(0, "a"), at(1, "b"), at(2, "d")]


@pytest.mark.parametrize(
    ("ascending", "limit", "pages"),
    [
        (True, 2, [("a", "b"), ("c", "d")]),
        (False, 2, [("d", "c"), ("b", "a")]),
        (True, 3, [("a", "b", "c"), ("d",)]),
        (True, 4, [("a", "b", "c", "d")]),
        (False, 9, [("d", "c", "b", "a")]),
    ],
)
def test_pages_are_consecutive(ascending: bool, limit: int, pages: list[tuple[str, ...]]) -> None:
    token: str | None = None
    for number, wanted in enumerate(pages):
        found, token = paging.page(ITEMS, limit=limit, token=token, ascending=ascending)
        assert found == wanted
        assert (token is None) == (number == len(pages) - 1)


def test_an_empty_list_is_one_empty_page() -> None:
    assert paging.page([], limit=5, token=None, ascending=True) == ((), None)


@pytest.mark.parametrize(
    ("items", "wanted"),
    [
        ([*ITEMS, at(0, "0")], ("c", "d")),  # added before the token: not seen again
        ([*ITEMS, at(3, "e")], ("c", "d", "e")),  # added after the token
        ([item for item in ITEMS if item[1] != "b"], ("c", "d")),  # the named item is gone
    ],
)
def test_a_page_begins_after_its_token_whatever_changed(
    items: list[tuple[paging.Position, str]], wanted: tuple[str, ...]
) -> None:
    _, token = paging.page(ITEMS, limit=2, token=None, ascending=True)
    assert paging.page(items, limit=9, token=token, ascending=True) == (wanted, None)


@pytest.mark.parametrize("ascending", [True, False])
def test_a_token_decodes_to_its_position(ascending: bool) -> None:
    position = (START, "abc")
    assert paging.decode(paging.encode(position, ascending=ascending)) == position


@pytest.mark.parametrize("token", ["?", "abc", "YWJj", "MjAyNi0wMS0wMV9fYQ", "ä"])
def test_other_tokens_are_invalid(token: str) -> None:
    with pytest.raises(InvalidError, match="nextToken"):
        paging.decode(token)
