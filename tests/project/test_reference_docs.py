"""Pages that are drawn from the code are what the code says."""

from pathlib import Path

import pytest

from paddock.app.reference_docs import PAGES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_drawn_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), (
        "run: python -m paddock.app.reference_docs --write docs"
    )
