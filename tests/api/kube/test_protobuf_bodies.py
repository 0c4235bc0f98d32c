"""Protobuf bodies, which newer clients send for Kubernetes' own kinds."""

import contextlib

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.api.kube.body.protobuf import MEDIA_TYPE, decode
from paddock.api.kube.openapi.documents import binary_v2, document_v2
from paddock.api.kube.openapi.protobuf import encode_schema
from paddock.api.kube.status import BadRequestError, UnsupportedMediaTypeError


def part(number: int, data: bytes) -> bytes:
    assert len(data) < 128
    return bytes([number << 3 | 2, len(data)]) + data


def envelope(version: bytes, kind: bytes, raw: bytes) -> bytes:
    return b"k8s\x00" + part(1, part(1, version) + part(2, kind)) + part(2, raw)


NAMESPACE = part(1, part(1, b"team") + part(11, part(1, b"a") + part(2, b"b")) + part(8, b""))
SECRET = part(1, part(1, b"s")) + part(2, part(1, b"k") + part(2, b"\x00\xff")) + part(3, b"Opaque")


def test_a_namespace_is_decoded():
    assert decode(envelope(b"v1", b"Namespace", NAMESPACE)) == {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": "team", "labels": {"a": "b"}, "creationTimestamp": None},
    }


async def test_a_secret_is_stored(client: httpx.AsyncClient):
    response = await client.post(
        "/api/v1/namespaces/default/secrets",
        content=envelope(b"v1", b"Secret", SECRET),
        headers={"Content-Type": MEDIA_TYPE},
    )
    assert response.status_code == 201
    assert response.json()["data"] == {"k": "AP8="}


def test_unsupported_kinds_are_refused():
    with pytest.raises(UnsupportedMediaTypeError, match="Pod"):
        decode(envelope(b"v1", b"Pod", b""))


@pytest.mark.parametrize("data", [b"", b"{}", b"k8s\x00\xff", b"k8s\x00\x0a\x7fx"])
def test_what_is_not_protobuf_is_refused(data: bytes):
    with pytest.raises((BadRequestError, UnsupportedMediaTypeError)):
        decode(data)


@given(st.binary(max_size=60), st.booleans())
def test_no_bytes_break_the_decoder(data: bytes, is_wrapped: bool):
    body = envelope(b"v1", b"Secret", data) if is_wrapped else b"k8s\x00" + data
    with contextlib.suppress(BadRequestError, UnsupportedMediaTypeError):
        assert isinstance(decode(body), dict)


def test_binary_schemas_contain_all_fields_that_clients_read():
    data = encode_schema({"type": "object", "properties": {"a": {"$ref": "#/definitions/b"}}})
    assert b"#/definitions/b" in data
    whole = binary_v2()
    for name in document_v2()["definitions"]:
        assert name.encode() in whole
