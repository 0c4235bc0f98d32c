"""Certificates that an installation issues to itself."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from paddock.kit import certificates
from paddock.kit.certificates import KeyPair

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def authority() -> KeyPair:
    return certificates.create_authority("test", now=NOW)


def test_a_certificate_has_its_names_and_its_end(authority: KeyPair):
    pair = certificates.issue(authority, ["localhost", "127.0.0.1", "*.a.example"], now=NOW)

    assert pair.names == {"localhost", "127.0.0.1", "*.a.example"}
    assert pair.expires == NOW + timedelta(days=certificates.SERVER_DAYS)
    assert pair.is_issued_by(authority)
    assert not pair.is_issued_by(certificates.create_authority("test", now=NOW))


def test_an_authority_signs_servers_only(authority: KeyPair):
    found = x509.load_pem_x509_certificate(authority.certificate)
    limits = found.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert limits.ca
    assert limits.path_length == 0
    server = x509.load_pem_x509_certificate(
        certificates.issue(authority, ["a"], now=NOW).certificate
    )
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_strict_clients_accept_it(tmp_path: Path):
    now = datetime.now(UTC)
    authority = certificates.create_authority("test", now=now)
    pair = certificates.issue(authority, ["localhost"], now=now)
    (tmp_path / "a.crt").write_bytes(pair.certificate)
    (tmp_path / "a.key").write_bytes(pair.key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "a.crt", tmp_path / "a.key")
    client = ssl.create_default_context(cadata=authority.certificate.decode())
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    theirs = server.wrap_bio(to_server, to_client, server_side=True)

    for _ in range(4):
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue

    assert ours.version() == "TLSv1.3"
