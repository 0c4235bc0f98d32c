"""Generated pages match the code."""

from pathlib import Path

import pytest
from tools.reference_docs import PAGES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), (
        "run: python -m tools.reference_docs --write docs"
    )
