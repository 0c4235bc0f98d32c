"""All forms of an address: sandbox and port."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.gateway.routing.addressing import Destination, Malformed, SignedFile, parse


def where(target="/x", host="localhost:3000", sandbox=None, port=None, ingress=None, method="GET"):
    return parse(
        method=method,
        target=target,
        host=host,
        sandbox_header=sandbox,
        port_header=port,
        ingress_header=ingress,
    )


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"sandbox": "abc"}, ("abc", 49983, "/x")),
        ({"sandbox": "abc", "port": "8080"}, ("abc", 8080, "/x")),
        ({"sandbox": " ABC ", "port": " 80 "}, ("abc", 80, "/x")),
        ({"sandbox": "abc-client1", "port": "80"}, ("abc", 80, "/x")),
        ({"host": "8080-abc.example.com"}, ("abc", 8080, "/x")),
        ({"host": "8080-ABC.localhost:3000"}, ("abc", 8080, "/x")),
        ({"host": "49983-abc-cl1ent.e2b.app"}, ("abc", 49983, "/x")),
        ({"host": "abc-8080.example.com"}, ("abc", 8080, "/x")),
        ({"ingress": "abc-8080"}, ("abc", 8080, "/x")),
        ({"target": "/kruise/abc/8080/a/b?c"}, ("abc", 8080, "/a/b?c")),
        ({"target": "/kruise/abc/8080"}, ("abc", 8080, "/")),
        ({"target": "/kruise/abc/8080?q"}, ("abc", 8080, "/?q")),
        ({"sandbox": "abc", "host": "1-xyz.example.com"}, ("abc", 49983, "/x")),
        (
            {"target": "/sandboxes/xyz/connect", "method": "POST", "sandbox": "abc", "port": "80"},
            ("abc", 80, "/sandboxes/xyz/connect"),
        ),
    ],
)
def test_sandboxes_can_be_addressed_in_many_ways(given_, expected) -> None:
    found = where(**given_)
    assert isinstance(found, Destination)
    assert (found.sandbox_id, found.port, found.target) == expected


@pytest.mark.parametrize(
    ("given_", "prefix"),
    [
        ({"host": "8080-abc.example.com"}, None),
        ({"sandbox": "abc"}, ""),
        ({"ingress": "abc-8080"}, ""),
        ({"target": "/kruise/abc/8080/a/b?c"}, "/kruise/abc/8080"),
        ({"target": "/kruise/ABC-client1/08080?c"}, "/kruise/ABC-client1/08080"),
        ({"target": "/kruise/abc/80", "host": "8080-abc.example.com"}, "/kruise/abc/80"),
    ],
)
def test_only_an_address_by_host_gives_a_sandbox_an_origin_of_its_own(given_, prefix) -> None:
    found = where(**given_)
    assert isinstance(found, Destination)
    assert found.prefix == prefix


@pytest.mark.parametrize(
    "given_",
    [
        {},
        {"host": "127.0.0.1:3000"},
        {"host": "[::1]:3000"},
        {"host": "api.example.com"},
        {"host": "my-host.example.com"},
        {"host": "localhost"},
        {"host": ""},
        {"target": "/kruise/api/health"},
        {"target": "/files?path=x"},
        {"target": "/sandboxes"},
        # Older SDKs send the sandbox headers on this API call too.
        {"target": "/sandboxes/abc/connect", "method": "POST", "sandbox": "abc", "port": "49983"},
    ],
)
def test_requests_without_a_sandbox_go_to_the_api(given_) -> None:
    assert where(**given_) is None


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"sandbox": ""}, "Invalid sandbox id"),
        ({"sandbox": "a/b"}, "Invalid sandbox id"),
        ({"sandbox": "abc", "port": "0"}, "Invalid sandbox port"),
        ({"sandbox": "abc", "port": "65536"}, "Invalid sandbox port"),
        ({"sandbox": "abc", "port": "-1"}, "Invalid sandbox port"),
        ({"sandbox": "abc", "port": "\u0663"}, "Invalid sandbox port"),
        ({"host": "99999-abc.example.com"}, "Invalid sandbox port"),
        ({"ingress": "abc"}, "Invalid OpenSandbox-Ingress-To: <id>-<port> is expected"),
        ({"target": "/kruise/abc/x/"}, "Invalid sandbox port"),
    ],
)
def test_malformed_addresses_are_reported(given_, message) -> None:
    assert where(**given_) == Malformed(message)


def test_a_signed_url_is_parsed() -> None:
    target = "/files?path=%2Fa&username=u&signature=v1_x%2By&signature_expiration=5"
    assert where(target=target) == SignedFile("v1_x+y", "/a", "u", "read", 5)
    assert where(target=target, method="POST") == SignedFile("v1_x+y", "/a", "u", "write", 5)


@given(st.text(), st.text(), st.none() | st.text(), st.none() | st.text(), st.none() | st.text())
def test_no_input_breaks_the_address_parser(target, host, sandbox, port, ingress) -> None:
    found = where("/" + target, host, sandbox, port, ingress)
    if isinstance(found, Destination):
        assert found.sandbox_id.isalnum()
        assert 0 < found.port < 65536
        assert found.target.startswith("/")


@given(st.from_regex(r"[a-z0-9]{1,24}", fullmatch=True), st.integers(1, 65535))
def test_all_forms_of_an_address_agree(sandbox_id: str, port: int) -> None:
    ways = [
        where(sandbox=sandbox_id, port=str(port)),
        where(ingress=f"{sandbox_id}-{port}"),
        where(target=f"/kruise/{sandbox_id}/{port}/x") if sandbox_id != "api" else None,
        where(host=f"{port}-{sandbox_id}.example.com"),
    ]
    found = {(way.sandbox_id, way.port, way.target) for way in ways if isinstance(way, Destination)}
    assert found == {(sandbox_id, port, "/x")}
