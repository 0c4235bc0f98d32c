"""URLs of ports."""

import pytest

from paddock.client.urls import sandbox_url


@pytest.mark.parametrize(
    ("base", "domain", "expected"),
    [
        ("http://localhost:3000", "", "http://8000-i1.localhost:3000/"),
        ("http://10.0.0.7:3000/", "", "http://10.0.0.7:3000/kruise/i1/8000/"),
        ("https://paddock.example", "", "https://paddock.example/kruise/i1/8000/"),
        ("https://api.boxes.example", "boxes.example", "https://8000-i1.boxes.example/"),
    ],
    ids=["localhost", "address", "name", "domain"],
)
def test_a_port_has_a_url(base: str, domain: str, expected: str) -> None:
    assert sandbox_url(base, "i1", 8000, domain) == expected
