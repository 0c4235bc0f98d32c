"""References are parsed as other tools parse them."""

import pytest

from paddock.kit.errors import InvalidError
from paddock.runtime.local.images.model import canonical_name
from paddock.runtime.local.images.registry.reference import is_loopback, parse_reference

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "host", "repository", "wanted", "name"),
    [
        ("python", "docker.io", "library/python", "latest", "python:latest"),
        ("python:3.12", "docker.io", "library/python", "3.12", "python:3.12"),
        ("e2bdev/base", "docker.io", "e2bdev/base", "latest", "e2bdev/base:latest"),
        ("docker.io/library/python:3", "docker.io", "library/python", "3", "python:3"),
        ("index.docker.io/python:3", "docker.io", "library/python", "3", "python:3"),
        ("ghcr.io/o/app:1", "ghcr.io", "o/app", "1", "ghcr.io/o/app:1"),
        ("localhost/app", "localhost", "app", "latest", "localhost/app:latest"),
        ("127.0.0.1:5000/a/b:1", "127.0.0.1:5000", "a/b", "1", "127.0.0.1:5000/a/b:1"),
        (f"python@{DIGEST}", "docker.io", "library/python", DIGEST, f"python@{DIGEST}"),
        (f"a.b/c:1@{DIGEST}", "a.b", "c", DIGEST, f"a.b/c:1@{DIGEST}"),
    ],
)
def test_parts_and_stored_name(text: str, host: str, repository: str, wanted: str, name: str):
    reference = parse_reference(text)
    assert (reference.host, reference.repository, reference.wanted) == (host, repository, wanted)
    assert reference.name == name
    assert canonical_name(name) == name
    assert parse_reference(name) == reference


@pytest.mark.parametrize(
    "text",
    [
        *("", "UPPER", "a//b", "a:", "a:b:c", "-a", "a/", "/a", "a b", "a@sha256:1", "a@md5:00"),
        *("host:99999/a", "host:0/a", "a/../b", "ho st.de/a", "a:" + "x" * 129, "a\n", "a%2fb"),
        "x" * 300,
    ],
)
def test_malformed_references_are_refused(text: str):
    with pytest.raises(InvalidError, match="not a reference"):
        parse_reference(text)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("localhost", True),
        ("localhost:5000", True),
        ("127.0.0.1:5000", True),
        ("127.9.9.9", True),
        ("[::1]:5000", True),
        ("localhost.example", False),
        ("10.0.0.1", False),
        ("127.0.0.1.example:80", False),
    ],
)
def test_hosts_of_this_machine(host: str, is_local: bool):
    assert is_loopback(host) is is_local
