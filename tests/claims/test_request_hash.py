"""The hash that distinguishes requests with the same idempotency key."""

from collections.abc import Mapping

import pytest
from msgspec import structs

from paddock.claims.idempotency import request_hash
from paddock.claims.requests import NewSandbox
from paddock.resources.kinds.template import NetworkPolicy, Resources

BASE = NewSandbox(template="base", idempotency_key="k", metadata={"a": "1", "b": "2"})


@pytest.mark.parametrize(
    "change",
    [
        {"template": "other"},
        {"timeout_seconds": 301},
        {"timeout_seconds": None},
        {"metadata": {"a": "1"}},
        {"metadata": {"a": "2", "b": "1"}},
        {"env_vars": {"A": "1"}},
        {"resources": Resources(cpu="1")},
        {"network": NetworkPolicy(allow_internet_access=False)},
        {"secure": False},
        {"idempotency_key": "l"},
        {"image": "other"},
    ],
)
def test_different_requests_have_different_hashes(change: Mapping[str, object]) -> None:
    assert request_hash(structs.replace(BASE, **change)) != request_hash(BASE)


def test_the_order_of_metadata_does_not_matter() -> None:
    turned = structs.replace(BASE, metadata={"b": "2", "a": "1"})
    assert request_hash(turned) == request_hash(BASE)


def test_the_hash_is_the_same_in_every_process() -> None:
    assert len(request_hash(BASE)) == 32
    assert request_hash(NewSandbox(template="base")) == request_hash(NewSandbox(template="base"))
